"""The target's forward over packed rows: llama, qwen2 and qwen3, by configuration.

Activations stand features first, ``[features, M]``, so that every product is ``W[out, in] @ x`` with the weights as
checkpoints store them. On XLA:CPU that is what makes a few rows cheap (SmolLM2's output head at M = 2: 6 ms, against
133 ms rows first). Layers are unrolled: scanning over stacked layers copies each layer's weights at every step.

All that is not a product is fp32, also where the weights are bf16. The forward knows nothing of caches, batches or
trees: ``attend`` does.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jspec.models.config import ModelConfig
from jspec.models.products import product

Attend = Callable[[int, Array, Array, Array], Array]
"""``attend(layer, q [M, nh, hd], k [M, kh, hd], v [M, kh, hd]) -> [M, nh, hd]``; q and k after rope; all in fp32."""


class Forward(NamedTuple):
    """What one pass over M rows gives, H the hidden width, T the number of taps."""

    hidden: Float[Array, "H M"]  # after the final norm: what the output head reads
    keys: tuple[Float[Array, "M kh hd"], ...]  # one a layer, after rope
    values: tuple[Float[Array, "M kh hd"], ...]
    taps: Float[Array, "M T H"]


def rms_norm(
    x: Float[Array, "*batch H M"], weight: Float[Array, " H"], eps: float
) -> Float[Array, "*batch H M"]:
    """Root-mean-square norm over the features (second axis from the end), in fp32."""
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.square(wide).mean(axis=-2, keepdims=True) + eps)
    return (wide * scale).astype(x.dtype) * weight[:, None]


def rope_frequencies(config: ModelConfig) -> np.ndarray:
    """Angular speed of each pair of dimensions, radians a position: f32[head_dim / 2], scaling applied."""
    speed = 1.0 / config.rope_theta ** (
        np.arange(0, config.head_dim, 2, dtype=np.float32) / config.head_dim
    )
    scaling = config.rope_scaling
    if scaling is None:
        return speed.astype(np.float32)
    if scaling.kind == "linear":
        return (speed / scaling.factor).astype(np.float32)
    # llama3: slow dimensions are slowed by the factor, fast ones stay, those between go linearly in their turns.
    turns = scaling.original_max_position * speed / (2 * np.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    stay = np.clip((turns - low) / (high - low), 0, 1)
    return (stay * speed + (1 - stay) * speed / scaling.factor).astype(np.float32)


def rope_angles(
    config: ModelConfig, positions: Int[Array, " M"]
) -> tuple[Float[Array, "half M"], Float[Array, "half M"]]:
    """Cosine and sine of how far each pair of dimensions turns at each position, in fp32."""
    angle = jnp.asarray(rope_frequencies(config))[:, None] * positions.astype(jnp.float32)
    return jnp.cos(angle), jnp.sin(angle)


def rope(
    x: Float[Array, "heads hd M"], cos: Float[Array, "half M"], sin: Float[Array, "half M"]
) -> Float[Array, "heads hd M"]:
    """Rotates dimension i with dimension i + hd / 2 (the half-rotation layout)."""
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=1).astype(x.dtype)


def embed_rows(embed: Float[Array, "V H"], tokens: Int[Array, " M"]) -> Float[Array, "H M"]:
    """The embeddings of tokens, in fp32."""
    # XLA:CPU takes rows of a bf16 table as fp32. Without the barrier a loop around this would widen all of it first.
    embed, tokens = jax.lax.optimization_barrier((embed, tokens))
    return embed[tokens].T.astype(jnp.float32)


def decoder_layer(
    config: ModelConfig,
    layer: dict,
    x: Float[Array, "H M"],
    y: Float[Array, "I M"],
    angles: tuple[Array, Array],
    attend: Callable[[Array, Array, Array], Array],
) -> tuple[Float[Array, "H M"], Float[Array, "M kh hd"], Float[Array, "M kh hd"]]:
    """One layer over M rows.

    Args:
      config: static.
      layer: as ``fuse`` arranges it.
      x: the residual stream.
      y: what attention reads, normed.
      angles: of ``rope_angles``.
      attend: mixes rows, as ``Attend`` does in one layer.

    Returns:
      The residual stream after it, and the rows' own keys (after rope) and values.
    """
    heads, head_dim = config.num_heads, config.head_dim
    z = product(layer["qkv"], y)  # [kh, G + 2, hd, M]
    if config.qkv_bias:
        z = z + layer["qkv_bias"][..., None]
    q, k, v = z[:, :-2].reshape(heads, head_dim, -1), z[:, -2], z[:, -1]
    if config.qk_norm:
        q = rms_norm(q, layer["q_norm"], config.norm_eps)
        k = rms_norm(k, layer["k_norm"], config.norm_eps)
    q, k, v = (a.transpose(2, 0, 1) for a in (rope(q, *angles), rope(k, *angles), v))
    mixed = attend(q, k, v)
    x = x + product(layer["o"], mixed.reshape(-1, heads * head_dim).T)
    y = rms_norm(x, layer["post_norm"], config.norm_eps)
    gate, up = product(layer["gate_up"], y)
    return x + product(layer["down"], jax.nn.silu(gate) * up), k, v


def forward(
    config: ModelConfig,
    params: dict,
    tokens: Int[Array, " M"],
    positions: Int[Array, " M"],
    attend: Attend,
    taps: Sequence[int] = (),
) -> Forward:
    """Runs all layers over M rows.

    Args:
      config: static.
      params: the weights, as ``fuse`` arranges them.
      tokens: token ids.
      positions: rope positions.
      attend: mixes rows; called once a layer.
      taps: layers whose output residual stream is returned, in the order listed; ``config.num_layers`` is the final
        normed state.

    Raises:
      ValueError: a tap outside 0..num_layers.
    """
    if bad := [t for t in taps if not 0 <= t <= config.num_layers]:
        raise ValueError(
            f"taps must be layers 0..{config.num_layers} ({config.num_layers}: final norm), got {bad}"
        )
    angles = rope_angles(config, positions)
    x = embed_rows(params["embed"], tokens)
    keys, values, tapped = [], [], {}
    for index, layer in enumerate(params["layers"]):
        y = rms_norm(x, layer["input_norm"], config.norm_eps)
        x, k, v = decoder_layer(config, layer, x, y, angles, partial(attend, index))
        keys.append(k)
        values.append(v)
        tapped[index] = x
    hidden = rms_norm(x, params["norm"], config.norm_eps)
    tapped[config.num_layers] = hidden
    rows = [tapped[t].T for t in taps]
    empty = jnp.zeros((tokens.shape[0], 0, config.hidden_size), x.dtype)
    return Forward(hidden, tuple(keys), tuple(values), jnp.stack(rows, axis=1) if rows else empty)


def fuse(config: ModelConfig, weights: dict) -> dict:
    """The params that ``forward`` takes, from weights under their checkpoint names (see ``jspec.models.load``).

    Per layer, q, k and v become one array "qkv" [kv heads, G + 2, head_dim, H] (the G query heads of a kv head, its
    key, its value), their biases "qkv_bias" [kv heads, G + 2, head_dim], and gate and up "gate_up" [2, F, H]: 7 % less
    time for a single row on XLA:CPU, and both shard over their head or feature axes.
    """
    kv_heads, head_dim = config.num_kv_heads, config.head_dim

    def layer(names):
        names = dict(names)

        def group(suffix):
            parts = [names.pop(n + suffix) for n in "qkv"]
            parts = [p.reshape(kv_heads, -1, head_dim, *p.shape[1:]) for p in parts]
            return jnp.concatenate(parts, axis=1)

        names["qkv"] = group("")
        if config.qkv_bias:
            names["qkv_bias"] = group("_bias")
        names["gate_up"] = jnp.stack([names.pop("gate"), names.pop("up")])
        return names

    return {**weights, "layers": tuple(layer(names) for names in weights["layers"])}


def unfuse(config: ModelConfig, params: dict) -> dict:
    """The weights under their checkpoint names: undoes ``fuse``."""

    def layer(fused):
        fused = dict(fused)
        for suffix in ("", "_bias") if config.qkv_bias else ("",):
            group = fused.pop("qkv" + suffix)
            parts = group[:, :-2], group[:, -2], group[:, -1]
            rows = (p.reshape(-1, *group.shape[3:]) for p in parts)
            fused |= dict(zip(("q" + suffix, "k" + suffix, "v" + suffix), rows))
        fused["gate"], fused["up"] = fused.pop("gate_up")
        return fused

    return {**params, "layers": tuple(layer(fused) for fused in params["layers"])}


def output_logits(params: dict, hidden: Float[Array, "H M"]) -> Float[Array, "V M"]:
    """Logits in fp32, vocabulary first; the output head is the embedding where the checkpoint ties them."""
    return product(params.get("lm_head", params["embed"]), hidden)
