"""The target's states of training texts, made while training where they were not kept with the text."""

from collections.abc import Iterator, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jspec.attention import tree_attention
from jspec.mesh import alike, mesh_under
from jspec.models.config import ModelConfig
from jspec.models.transformer import forward
from jspec.train.data import Text

ROWS, WIDTH = 8, 64  # of a pass over whole texts: rows, and what the padded length is a multiple of


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


def states_of(
    config: ModelConfig, params: dict, texts: Sequence[Int[np.ndarray, " _"]], taps: tuple[int, ...]
) -> Iterator[tuple[int, Float[np.ndarray, "_ T H"]]]:
    """The taps of each text's tokens but the last, with the text's number: texts of similar length in one pass."""
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
    for members in (order[i : i + ROWS] for i in range(0, len(order), ROWS)):
        width = -(-len(texts[members[-1]]) // WIDTH) * WIDTH
        tokens = np.zeros((ROWS, width), np.int32)
        for row, i in enumerate(members):
            tokens[row, : len(texts[i])] = texts[i]
        made = np.asarray(_taps(config, params, tokens, taps, mesh_under(params)), np.float32)
        for row, i in enumerate(members):
            yield i, made[row, : len(texts[i]) - 1].copy()


def with_taps(
    config: ModelConfig, params: dict, texts: Sequence[Text], taps: tuple[int, ...]
) -> list[Text]:
    """The texts with taps, made here for those that have none."""
    bare = [i for i, text in enumerate(texts) if text.taps is None]
    out = list(texts)
    for number, made in states_of(config, params, [texts[i].tokens for i in bare], taps):
        out[bare[number]] = out[bare[number]]._replace(taps=made)
    return out


@partial(jax.jit, static_argnums=(0, 3, 4))
def _taps(config, params, tokens, taps, mesh):
    return alike(mesh, partial(target_taps, config, taps=taps))(params, tokens)
