"""The target's states of training texts, made while training where they were not kept with the text."""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jspec.attention import tree_attention
from jspec.models.config import ModelConfig
from jspec.models.transformer import forward
from jspec.train.data import Text


def target_taps(
    config: ModelConfig, params: dict, tokens: Int[Array, "R S"], taps: tuple[int, ...]
) -> Float[Array, "R S T H"]:
    """The taps of all tokens of R texts, in one causal pass of the target.

    Args:
      config: the target's; static, as ``taps`` is.
      params: its weights, as ``jspec.models.transformer.fuse`` arranges them.
      tokens: padding only at the end.
      taps: layers, as ``forward`` takes them.
    """
    rows, width = tokens.shape
    at = np.arange(width)
    seen = np.tril(np.ones((width, width), np.uint8))
    seen = np.pad(seen, [(0, 0), (0, -width % 32)])
    bits = np.packbits(seen, axis=1, bitorder="little").view("<u4").astype(np.int32)
    visible = jnp.broadcast_to(jnp.asarray(bits), (rows, *bits.shape))

    def attend(layer, q, k, v):
        q, k, v = (x.reshape(rows, width, *x.shape[1:]) for x in (q, k, v))
        empty = jnp.zeros((rows, k.shape[2], 1, k.shape[3]), k.dtype)
        none = jnp.zeros((rows,), jnp.int32)
        mixed = tree_attention(q, empty, empty, none, k, v, visible)
        return mixed.reshape(rows * width, *mixed.shape[2:])

    positions = jnp.broadcast_to(jnp.asarray(at, jnp.int32), tokens.shape).reshape(-1)
    out = forward(config, params, tokens.reshape(-1), positions, attend, taps)
    return jax.lax.stop_gradient(out.taps).reshape(rows, width, len(taps), -1)


def with_taps(
    config: ModelConfig, params: dict, texts: Sequence[Text], taps: tuple[int, ...]
) -> list[Text]:
    """The texts with taps, made here for those that have none."""
    longest = max((len(text.tokens) for text in texts), default=0)
    width = -(-longest // 64) * 64  # one shape for all
    out = []
    for text in texts:
        if text.taps is None:
            tokens = np.zeros((1, width), np.int32)
            tokens[0, : len(text.tokens)] = text.tokens
            made = np.asarray(_taps(config, params, tokens, taps)[0], np.float32)
            text = text._replace(taps=made[: len(text.tokens) - 1])
        out.append(text)
    return out


_taps = partial(jax.jit, static_argnums=(0, 3))(target_taps)
