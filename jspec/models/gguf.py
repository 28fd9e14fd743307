"""A GGUF file rewritten as a hub-style directory: config, fp32 safetensors, tokenizer, template."""

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, dequantize
from jaxtyping import Float

from jspec.models.config import ModelConfig, TargetError, from_gguf, to_hf
from jspec.models.gguf_tokenizer import tokenizer_files

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_q.bias": "self_attn.q_proj.bias",
    "attn_k.bias": "self_attn.k_proj.bias",
    "attn_v.bias": "self_attn.v_proj.bias",
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
_ROPE_DIVISORS = "rope_freqs.weight"


def convert(source: Path, dest: Path) -> None:
    """Writes the GGUF file ``source`` as the hub-style directory ``dest``.

    Weights are dequantised to fp32, in which every GGUF type is exact, one tensor at a time.

    Raises:
      TargetError: not a whole GGUF file, or a model or tokenizer that is not supported.
    """
    try:
        reader = GGUFReader(source)
        fields = {key: field.contents() for key, field in reader.fields.items()}
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        raise TargetError(f"{source} is not a whole GGUF file: {error}") from None
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    divisors = tensors.pop(_ROPE_DIVISORS, None)
    config = from_gguf(
        fields,
        tie_embeddings="output.weight" not in tensors,
        rope_divisors=None if divisors is None else divisors.data.tolist(),
    )
    names = {_hub_name(name): name for name in tensors}
    dest.mkdir()
    for name, content in tokenizer_files(fields).items():
        (dest / name).write_text(content, encoding="utf-8")
    (dest / "config.json").write_text(json.dumps(to_hf(config), indent=2))
    write_safetensors(
        dest / "model.safetensors",
        {hub: tuple(map(int, reversed(tensors[name].shape))) for hub, name in names.items()},
        (_weights(tensors[name], config) for name in names.values()),
    )


def write_safetensors(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    arrays: Iterable[Float[np.ndarray, "..."]],
) -> None:
    """Writes fp32 arrays, given in the order of ``shapes``, holding one at a time in memory."""
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as out:
        out.write(len(encoded).to_bytes(8, "little") + encoded)
        for shape, array in zip(shapes.values(), arrays, strict=True):
            out.write(array.astype("<f4").reshape(shape).tobytes())


def _hub_name(name: str) -> str:
    if name in _TOP:
        return _TOP[name]
    block, _, rest = name.partition(".")[2].partition(".")
    if not name.startswith("blk.") or rest not in _LAYER:
        raise TargetError(f"the GGUF file has a tensor that jspec does not know: {name}")
    return f"model.layers.{block}.{_LAYER[rest]}"


def _weights(tensor: Any, config: ModelConfig) -> Float[np.ndarray, "..."]:
    try:
        array = dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError:
        raise TargetError(f"GGUF type {tensor.tensor_type.name} cannot be read") from None
    if config.arch == "llama" and tensor.name.endswith(("attn_q.weight", "attn_k.weight")):
        # llama.cpp interleaves the two halves of each head's rows for its rope; the hub does not
        pairs = array.reshape(-1, config.head_dim // 2, 2, config.hidden_size)
        array = pairs.swapaxes(1, 2).reshape(array.shape)
    return array
