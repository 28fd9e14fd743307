"""The shape of a target's weights: names, sizes, hub names, and random ones for tests.

``params`` is a plain dict: "embed" [V, H]; "layers", a tuple of one dict a layer; "norm" [H]; and
"lm_head" [V, H] unless the embeddings are tied. A layer has "input_norm" [H], "q" [heads * hd, H],
"k" and "v" [kv heads * hd, H], "o" [H, heads * hd], "post_norm" [H], "gate" and "up" [F, H],
"down" [H, F]; with biases "q_bias", "k_bias", "v_bias"; with norms on q and k "q_norm" and
"k_norm" [hd]. Linear weights are [out, in], as checkpoints store them.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Key

from jspec.models.config import ModelConfig

_HUB_TOP = {
    "embed": "model.embed_tokens.weight",
    "norm": "model.norm.weight",
    "lm_head": "lm_head.weight",
}
_HUB_LAYER = {
    "input_norm": "input_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "o": "self_attn.o_proj.weight",
    "post_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
    "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
}


def param_shapes(config: ModelConfig, dtype: DTypeLike = jnp.float32) -> dict[str, Any]:
    """The params tree with a ``jax.ShapeDtypeStruct`` at each leaf."""
    hidden, ffn, hd = config.hidden_size, config.ffn_size, config.head_dim
    query, kv = config.num_heads * hd, config.num_kv_heads * hd
    layer = {
        "input_norm": (hidden,),
        "q": (query, hidden),
        "k": (kv, hidden),
        "v": (kv, hidden),
        "o": (hidden, query),
        "post_norm": (hidden,),
        "gate": (ffn, hidden),
        "up": (ffn, hidden),
        "down": (hidden, ffn),
    }
    if config.qkv_bias:
        layer |= {"q_bias": (query,), "k_bias": (kv,), "v_bias": (kv,)}
    if config.qk_norm:
        layer |= {"q_norm": (hd,), "k_norm": (hd,)}
    shapes: dict[str, Any] = {
        "embed": (config.vocab_size, hidden),
        "layers": (layer,) * config.num_layers,
        "norm": (hidden,),
    }
    if not config.tie_embeddings:
        shapes["lm_head"] = (config.vocab_size, hidden)
    return jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, dtype),
        shapes,
        is_leaf=lambda node: isinstance(node, tuple) and isinstance(node[0], int),
    )


def hub_names(config: ModelConfig) -> dict[str, Any]:
    """The params tree with the tensor's name in a hub checkpoint at each leaf."""

    def name(path, _):
        if len(path) == 1:
            return _HUB_TOP[path[0].key]
        return f"model.layers.{path[1].idx}.{_HUB_LAYER[path[2].key]}"

    return jax.tree_util.tree_map_with_path(name, param_shapes(config))


def init_params(
    config: ModelConfig, key: Key[Array, ""], dtype: DTypeLike = jnp.float32
) -> dict[str, Any]:
    """Random weights with peaked logits (standard deviation about 4), so that ties are rare."""
    shapes = param_shapes(config, dtype)
    leaves, tree = jax.tree_util.tree_flatten_with_path(shapes)

    def init(path, shape, key):
        name = path[-1].key
        noise = jax.random.normal(key, shape.shape, dtype)
        if name.endswith("norm"):
            return 1 + 0.1 * noise
        if name in ("embed", "lm_head"):
            return 4 * noise / shape.shape[-1] ** 0.5
        return noise / shape.shape[-1] ** 0.5

    keys = jax.random.split(key, len(leaves))
    return tree.unflatten([init(path, shape, k) for (path, shape), k in zip(leaves, keys)])
