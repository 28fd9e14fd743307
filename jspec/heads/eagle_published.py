"""The published layout of EAGLE-3 heads: keys of config.json, names of tensors, and the maps of the draft vocabulary.

Two spellings are read: that of SafeAILab's EAGLE, with the layer as "midlayer" and a flat config, and that of vLLM's
speculators, with "layers.0" and the layer's keys in "transformer_layer_config". The first is written. Its draft
vocabulary is "d2t" i64[Vd], the target's id less the draft's, and "t2d" bool[V], which of the target's ids there are.

What jspec adds to config.json: "target_layer_ids" (layers whose outputs are read), "num_target_layers", "steps",
"own_output" and "target_fingerprint". Where the first is missing, "eagle_aux_hidden_state_layer_ids" says the same in
one of two ways: beside the other keys they are the layers that the states enter (vLLM), within "eagle_config" those
that they leave (SGLang).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jspec.heads.config import HeadError
from jspec.heads.eagle_config import STEPS, EagleConfig
from jspec.heads.keys import fingerprint_of, integer_of, is_int, rope_keys
from jspec.heads.published import as_head_error
from jspec.models.config import from_hf, to_hf
from jspec.models.params import hub_names, param_shapes
from jspec.models.tensors import read_tensors, stored_names
from jspec.models.transformer import fuse, unfuse

_OWN, _OTHER = "midlayer.", "layers.0."
_UNSERVED = ("norm_before_fc", "fc_norm", "norm_output")  # of speculators


def is_eagle(data: Mapping[str, Any]) -> bool:
    """Whether a config.json says that it is one of these heads, or is a plain Llama's but for a draft vocabulary."""
    names = data.get("architectures")
    names = names if isinstance(names, list) else []
    if data.get("speculators_model_type") == "eagle3" or any(
        "eagle" in str(n).lower() for n in names
    ):
        return True
    other = any(key in data for key in ("dflash_config", "block_size", "speculators_model_type"))
    return data.get("model_type") == "llama" and "draft_vocab_size" in data and not other


def config_from_json(data: Mapping[str, Any]) -> EagleConfig:
    """The config of a head's ``config.json``; ``taps`` and ``target_layers`` may be left to its target.

    Raises:
      HeadError: a key is missing or of a wrong type, or the head needs something that jspec does not compute.
    """
    layer = data.get("transformer_layer_config", data)
    nested = data.get("eagle_config") or {}
    for name, value in (("transformer_layer_config", layer), ("eagle_config", nested)):
        if not isinstance(value, Mapping):
            raise HeadError(f"{name} in config.json must be an object, got {value!r}")
    if layer.get("model_type", "llama") != "llama":
        raise HeadError(f"head layers of type {layer['model_type']!r} are not supported (llama is)")
    for unknown in _UNSERVED:
        if data.get(unknown):
            raise HeadError(f"{unknown} in config.json is not supported")
    with as_head_error():
        stack = from_hf({**layer, "model_type": "llama"})
    if stack.num_layers != 1:
        raise HeadError(f"EAGLE-3 heads of {stack.num_layers} layers are not supported (1 is)")
    if (data.get("target_hidden_size") or stack.hidden_size) != stack.hidden_size:
        raise HeadError("heads that are narrower or wider than their target are not supported")
    for name in ("own_output", "norm_before_residual"):
        if not isinstance(data.get(name, False), bool):
            raise HeadError(f"{name} in config.json must be true or false, got {data[name]!r}")
    narrowed = data.get("draft_vocab_size") is not None
    drafted = integer_of(data, "draft_vocab_size") if narrowed else None
    return EagleConfig(
        hidden_size=stack.hidden_size,
        ffn_size=stack.ffn_size,
        num_heads=stack.num_heads,
        num_kv_heads=stack.num_kv_heads,
        head_dim=stack.head_dim,
        vocab_size=stack.vocab_size,
        taps=_taps(data, nested),
        target_layers=integer_of(data, "num_target_layers")
        if "num_target_layers" in data
        else None,
        steps=integer_of(data, "steps") if "steps" in data else STEPS,
        norm_eps=stack.norm_eps,
        rope_theta=stack.rope_theta,
        rope_scaling=stack.rope_scaling,
        draft_vocab_size=None if drafted == stack.vocab_size else drafted,
        own_output=data.get("own_output", True),
        norm_before_residual=data.get("norm_before_residual", False),
        target_fingerprint=fingerprint_of(data),
    )


def _taps(data, nested) -> tuple[int, ...]:
    entered = "eagle_aux_hidden_state_layer_ids"
    for keys, name, later in (
        (data, "target_layer_ids", 0),
        (data, entered, 1),
        (nested, entered, 0),
    ):
        if (ids := keys.get(name)) is None:
            continue
        if not isinstance(ids, list) or not ids or not all(map(is_int, ids)):
            raise HeadError(f"{name} in config.json must be a list of layers, got {ids!r}")
        return tuple(i - later for i in ids)
    return ()


def config_to_json(config: EagleConfig, dtype: str) -> dict[str, Any]:
    """The ``config.json`` object of a head: ``config_from_json(config_to_json(c, dtype)) == c``.

    Args:
      config: the head's.
      dtype: of the weights beside it, as in "bfloat16".
    """
    data = to_hf(config.stack)
    for key in ("max_position_embeddings", "eos_token_id"):  # the target's to say
        del data[key]
    data |= rope_keys(data.pop("rope_parameters"))
    data |= {
        "architectures": ["LlamaForCausalLMEagle3"],
        "tie_word_embeddings": False,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size or config.vocab_size,
        "norm_before_residual": config.norm_before_residual,
        "steps": config.steps,
        "own_output": config.own_output,
        "dtype": dtype,
    }
    layers = config.target_layers
    if config.taps:
        data["target_layer_ids"] = list(config.taps)
        if layers is None or max(config.taps) < layers:  # the final normed state enters no layer
            data["eagle_aux_hidden_state_layer_ids"] = [tap + 1 for tap in config.taps]
    if layers is not None:
        data["num_target_layers"] = layers
    if config.target_fingerprint is not None:
        data["target_fingerprint"] = config.target_fingerprint
    return data


def _names(config):
    """A head's pytree, its layer not fused, with the published name at each leaf; the maps left out."""
    names = hub_names(config.stack)
    layer = {k: v.replace("model.layers.0.", _OWN) for k, v in names["layers"][0].items()}
    layer["hidden_norm"] = f"{_OWN}hidden_norm.weight"
    out = {"fc": "fc.weight", "layer": layer, "norm": "norm.weight"}
    return out | ({"output": "lm_head.weight"} if config.own_output else {})


def _by_name(config, tree):
    names, structure = jax.tree.flatten(_names(config))
    return dict(zip(names, structure.flatten_up_to(tree)))


def tensor_shapes(config: EagleConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes by published name; floats are given as fp32."""

    def floats(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    hidden, shapes = config.hidden_size, param_shapes(config.stack)
    layer = shapes["layers"][0] | {"hidden_norm": floats(hidden)}
    layer |= {name: floats(layer[name].shape[0], 2 * hidden) for name in "qkv"}
    tree = {"fc": floats(hidden, config.tap_count * hidden), "layer": layer, "norm": shapes["norm"]}
    if config.own_output:
        tree["output"] = shapes["lm_head"]
    found = _by_name(config, tree)
    if config.draft_vocab_size is not None:
        found["d2t"] = jax.ShapeDtypeStruct((config.draft_vocab_size,), np.int64)
        found["t2d"] = jax.ShapeDtypeStruct((config.vocab_size,), np.bool_)
    return found


def to_tensors(config: EagleConfig, head: Mapping[str, Any]) -> dict[str, Array | np.ndarray]:
    """A head's arrays by their published names; the target's rows are left out."""
    layer = unfuse(config.stack, {"layers": (head["layer"],)})["layers"][0]
    found = _by_name(config, {name: head[name] for name in _names(config)} | {"layer": layer})
    if config.draft_vocab_size is not None:
        ids = np.asarray(head["draft_ids"], np.int64)
        found["d2t"] = ids - np.arange(len(ids))
        found["t2d"] = np.isin(np.arange(config.vocab_size), ids)
    return found


def read_arrays(folder: Path, config: EagleConfig) -> dict[str, np.ndarray]:
    """The arrays in a folder by the names that jspec writes, as they are stored, and "draft_ids" for the maps.

    An embedding that is stored too is the target's, and is not read.

    Raises:
      TargetError: as ``jspec.models.tensors.read_tensors``.
      HeadError: pickled weights, or maps that are missing or do not map into the target's vocabulary.
    """
    if not any(folder.glob("model.safetensors*")) and (folder / "pytorch_model.bin").exists():
        raise HeadError(
            f"{folder} has pickled weights, which are never read: convert them to model.safetensors"
        )
    stored = stored_names(folder)
    other = any(name.startswith(_OTHER) for name in stored)
    wanted = {
        name.replace(_OWN, _OTHER) if other else name: shape
        for name, shape in tensor_shapes(config).items()
        if name not in ("d2t", "t2d")
    }
    drafted = config.draft_vocab_size or config.vocab_size
    maps = {"d2t": ((drafted,), np.int64), "t2d": ((config.vocab_size,), np.bool_)}
    maps = {name: jax.ShapeDtypeStruct(*maps[name]) for name in maps.keys() & stored}
    found = dict(read_tensors(folder, wanted | maps, "draft heads", ("embed_tokens.weight",)))
    ids = _draft_ids(config, found.pop("d2t", None), found.pop("t2d", None), folder)
    out = {name.replace(_OTHER, _OWN) if other else name: x for name, x in found.items()}
    return out if config.draft_vocab_size is None else {**out, "draft_ids": ids}


def _draft_ids(config, d2t, t2d, folder) -> Int[np.ndarray, " Vd"]:
    """The target's ids out of the maps that there are; buffers that were never filled are all zero."""
    vocab, narrowed = config.vocab_size, config.draft_vocab_size is not None
    drafted = config.draft_vocab_size or vocab
    marked = None if t2d is None or not t2d.any() else np.flatnonzero(t2d)
    offsets = None if d2t is None or not d2t.any() else d2t.astype(np.int64)
    if offsets is None:
        if not narrowed:
            return np.arange(vocab)
        if marked is None:
            lacks = "lack a map" if d2t is None else "have a map of zeros"
            raise HeadError(
                f"the weights in {folder} {lacks} from their {drafted} draft tokens to the "
                f"target's {vocab}: d2t or t2d must say which they are"
            )
        if len(marked) != drafted:
            raise HeadError(f"t2d in {folder} marks {len(marked)} tokens, not {drafted}")
        return marked
    ids = np.arange(drafted) + offsets
    bad = np.flatnonzero((ids < 0) | (ids >= vocab))
    if bad.size:
        raise HeadError(
            f"the draft vocabulary in {folder} does not map into the target's: "
            f"d2t makes draft token {bad[0]} token {ids[bad[0]]} of 0..{vocab - 1}"
        )
    if (np.diff(ids) <= 0).any():
        raise HeadError(f"d2t in {folder} must map draft tokens to ascending tokens of the target")
    if marked is not None and not np.array_equal(marked, ids):
        raise HeadError(f"d2t and t2d in {folder} name different tokens")
    return ids


def from_tensors(config: EagleConfig, tensors: Mapping[str, Array]) -> dict[str, Any]:
    """The head whose arrays ``read_arrays`` gave."""
    weights = jax.tree.map(lambda name: tensors[name], _names(config))
    layer = fuse(config.stack, {"layers": (weights["layer"],)})["layers"][0]
    ids = {} if config.draft_vocab_size is None else {"draft_ids": tensors["draft_ids"]}
    return weights | {"layer": layer} | ids
