"""The published layout of JetSpec, DFlash and Domino heads: keys of config.json, names of tensors.

Reading is liberal, since the checkpoints that are around differ; writing is canonical. jspec adds two keys,
"draft_vocab_size" and "target_fingerprint", and a tensor, "draft_ids".
"""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jspec.heads.config import Correction, HeadConfig, HeadError
from jspec.heads.keys import fingerprint_of, rope_keys
from jspec.heads.keys import integer_of as _integer
from jspec.heads.keys import is_int as _is_int
from jspec.models.config import TargetError, from_hf, to_hf
from jspec.models.params import hub_names, param_shapes
from jspec.models.tensors import read_tensors
from jspec.models.transformer import fuse, unfuse

_PROJECTORS = ("domino", "causal_v5")  # how the correction is called, in old files too
_CORRECTION = {  # names of its tensors
    "gru_in": "prefix_gru.weight_ih_l0",
    "gru_state": "prefix_gru.weight_hh_l0",
    "down": "embed_proj.0.weight",
    "up": "embed_proj.2.weight",
}


@contextlib.contextmanager
def as_head_error() -> Iterator[None]:
    """Faults that the readers of targets find are faults of a head here."""
    try:
        yield
    except TargetError as error:
        raise HeadError(_explained(str(error))) from None


def _explained(fault):
    """What it means that a tensor of the correction is missing, or there."""
    if not any(
        f"{said} {name}" in fault for said in ("lack", "have") for name in _CORRECTION.values()
    ):
        return fault
    parts = "a prefix_gru and an embed_proj go with projector_type domino in config.json"
    return f"{fault}: {parts}, and without one there is none of them"


def config_from_json(data: Mapping[str, Any]) -> HeadConfig:
    """The config of a head's ``config.json``; what is the head's own may stand in "dflash_config" or beside it.

    Raises:
      HeadError: a key is missing or of a wrong type, or the head needs something that jspec does not compute.
    """
    nested = data.get("dflash_config") or {}
    if not isinstance(nested, Mapping):
        raise HeadError(f"dflash_config in config.json must be an object, got {nested!r}")
    keys = {**data, **nested}
    if keys.get("model_type", "qwen3") != "qwen3":
        raise HeadError(f"head layers of type {keys['model_type']!r} are not supported (qwen3 is)")
    for unknown in ("use_swa", "draft_shift"):
        if keys.get(unknown):
            raise HeadError(f"{unknown} in config.json is not supported")
    layers = {k: v for k, v in data.items() if k not in ("layer_types", "use_sliding_window")}
    with as_head_error():
        stack = from_hf({**layers, "model_type": "qwen3"})
    if keys.get("target_hidden_size", stack.hidden_size) != stack.hidden_size:
        raise HeadError("heads that are narrower or wider than their target are not supported")
    taps = keys.get("target_layer_ids")
    if not isinstance(taps, list) or not all(_is_int(tap) for tap in taps):
        raise HeadError(f"config.json needs target_layer_ids, a list of layers, got {taps!r}")
    causal = keys.get("causal_head", keys.get("causal", False))
    if not isinstance(causal, bool):
        raise HeadError(f"causal_head in config.json must be true or false, got {causal!r}")
    narrowed = keys.get("draft_vocab_size") is not None
    shifted = keys.get("shift_label", False)
    if not isinstance(shifted, bool):
        raise HeadError(f"shift_label in config.json must be true or false, got {shifted!r}")
    return HeadConfig(
        hidden_size=stack.hidden_size,
        ffn_size=stack.ffn_size,
        num_layers=stack.num_layers,
        num_heads=stack.num_heads,
        num_kv_heads=stack.num_kv_heads,
        head_dim=stack.head_dim,
        block_size=_integer(keys, "block_size"),
        causal=causal,
        mask_token_id=_integer(keys, "mask_token_id"),
        taps=tuple(taps),
        target_layers=_integer(keys, "num_target_layers"),
        vocab_size=stack.vocab_size,
        windows=_windows(data, stack.num_layers),
        norm_eps=stack.norm_eps,
        rope_theta=stack.rope_theta,
        rope_scaling=stack.rope_scaling,
        draft_vocab_size=_integer(keys, "draft_vocab_size") if narrowed else None,
        target_fingerprint=fingerprint_of(keys),
        shift_labels=shifted,
        correction=_correction(keys),
    )


def config_to_json(config: HeadConfig, dtype: str) -> dict[str, Any]:
    """The ``config.json`` object of a head: ``config_from_json(config_to_json(c, dtype)) == c``.

    Args:
      config: the head's.
      dtype: of the weights beside it, as in "bfloat16".
    """
    data = to_hf(config.stack)
    data |= rope_keys(data.pop("rope_parameters"))
    for key in ("max_position_embeddings", "eos_token_id"):  # the target's to say
        del data[key]
    window = next((w for w in config.windows if w is not None), None)
    data |= {
        "architectures": ["DFlashDraftModel"],
        "tie_word_embeddings": False,
        "attention_bias": False,
        "layer_types": [
            "full_attention" if w is None else "sliding_attention" for w in config.windows
        ],
        "sliding_window": window,
        "use_sliding_window": window is not None,
        "block_size": config.block_size,
        "num_target_layers": config.target_layers,
        "dflash_config": {
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": list(config.taps),
            "causal_head": config.causal,
        },
        "dtype": dtype,
    }
    if config.shift_labels or config.correction is not None:
        data["dflash_config"]["shift_label"] = config.shift_labels
    if config.correction is not None:
        data["dflash_config"] |= {
            "projector_type": _PROJECTORS[0],
            "pure_draft_prefix_len": config.correction.prefix,
            "emb_dim": config.correction.rank,
            "gru_hidden_dim": config.correction.gru_size,
        }
    if config.draft_vocab_size is not None:
        data["draft_vocab_size"] = config.draft_vocab_size
    if config.target_fingerprint is not None:
        data["target_fingerprint"] = config.target_fingerprint
    return data


def to_tensors(config: HeadConfig, head: Mapping[str, Any]) -> dict[str, Array]:
    """A head's arrays by their published names; the target's rows are left out."""
    layers = tuple(head["layers"][i] for i in range(config.num_layers))
    weights = unfuse(config.stack, {**head, "layers": layers})
    weights.pop("lm_head", None)
    return _by_name(config, weights)


def read_arrays(folder: Path, config: HeadConfig) -> dict[str, np.ndarray]:
    """The arrays in a folder by their published names, as they are stored.

    Raises:
      TargetError: as ``jspec.models.tensors.read_tensors``.
    """
    return dict(read_tensors(folder, tensor_shapes(config), "draft heads"))


def from_tensors(config: HeadConfig, tensors: Mapping[str, Array]) -> dict[str, Any]:
    """The head whose arrays these are: undoes ``to_tensors``."""
    weights = jax.tree.map(lambda name: tensors[name], _names(config))
    head = fuse(config.stack, weights)
    return {**head, "layers": dict(enumerate(head["layers"]))}


def tensor_shapes(config: HeadConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes by published name; floats are given as fp32."""
    shapes = param_shapes(config.stack)
    del shapes["embed"]
    hidden = config.hidden_size
    shapes["fc"] = jax.ShapeDtypeStruct((hidden, len(config.taps) * hidden), jnp.float32)
    shapes["hidden_norm"] = jax.ShapeDtypeStruct((hidden,), jnp.float32)
    if (own := config.correction) is not None:
        gates, drafted = 3 * own.gru_size, config.draft_vocab_size or config.vocab_size
        sizes = {
            "gru_in": (gates, hidden),
            "gru_state": (gates, own.gru_size),
            "down": (own.rank, hidden + own.gru_size),
            "up": (drafted, own.rank),
        }
        shapes["correction"] = {
            name: jax.ShapeDtypeStruct(size, jnp.float32) for name, size in sizes.items()
        }
    if config.draft_vocab_size is not None:
        shapes["draft_ids"] = jax.ShapeDtypeStruct((config.draft_vocab_size,), jnp.int32)
    return _by_name(config, shapes)


def _names(config):
    """A head's pytree, its layers not fused, with the published name at each leaf."""
    names = hub_names(config.stack)
    del names["embed"]
    names = jax.tree.map(lambda name: name.removeprefix("model."), names)
    names |= {"fc": "fc.weight", "hidden_norm": "hidden_norm.weight"}
    if config.correction is not None:
        names["correction"] = _CORRECTION
    return names if config.draft_vocab_size is None else {**names, "draft_ids": "draft_ids"}


def _by_name(config, tree):
    names, structure = jax.tree.flatten(_names(config))
    return dict(zip(names, structure.flatten_up_to(tree)))


def _correction(keys):
    """Domino's correction, if the config has one."""
    kind = keys.get("projector_type")
    if kind is None:
        return None
    if kind not in _PROJECTORS:
        raise HeadError(f"projector_type {kind!r} in config.json is not supported (domino is)")
    prefix = "pure_draft_prefix_len"
    return Correction(
        gru_size=_integer(keys, "gru_hidden_dim"),
        rank=_integer(keys, "emb_dim"),
        prefix=_integer(keys, prefix) if keys.get(prefix) is not None else 1,
    )


def _windows(data, layers):
    """The window of each layer; where some are listed as sliding that holds, whatever use_sliding_window says."""
    kinds = data.get("layer_types")
    if kinds is None:
        if data.get("use_sliding_window"):
            raise HeadError("a head with sliding windows needs layer_types in its config.json")
        return ()
    known = ("full_attention", "sliding_attention")
    if not isinstance(kinds, list) or len(kinds) != layers or any(k not in known for k in kinds):
        raise HeadError(f"layer_types in config.json must list {layers} of {known}, got {kinds!r}")
    if "sliding_attention" not in kinds:
        return ()
    window = _integer(data, "sliding_window")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
