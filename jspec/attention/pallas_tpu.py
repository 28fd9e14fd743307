"""Tree attention as a Pallas kernel for TPUs: the context in blocks, online softmax, visibility as packed bits.

A grid step holds a block of the context of some kv heads, and all the rows of those heads (or a tile of them): the
query heads of one kv head are rows. The first step attends to the new rows, the last one divides. Blocks beyond a row's
length, or before its window, are not read; the grid ends with the longest row of the batch.

Shapes inside: k heads of a step, R rows of a tile, hd, C the context's block, M the new rows.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

_TILE = 512  # rows of a step, over all its kv heads
_BLOCK = 512  # context positions of a step, at most
_BLOCK_BYTES = 1 << 20  # of a step's keys, about
_LOWEST = -1e30  # as in ``jspec.attention.xla``


def pallas_tpu_tree_attention(
    q: Float[Array, "B Q nh hd"],
    k_ctx: Float[Array, "B kh C hd"],
    v_ctx: Float[Array, "B kh C hd"],
    length: Int[Array, " B"],
    k_new: Float[Array, "B M kh hd"],
    v_new: Float[Array, "B M kh hd"],
    visible: Int[Array, "B Q W"],
    q_positions: Int[Array, "B Q"] | None = None,
    window: int | None = None,
    scale: float | None = None,
    *,
    interpret: Any = False,
) -> Float[Array, "B Q nh hd"]:
    """See ``tree_attention``; cached values beyond ``length`` may be anything here.

    Args:
      q: queries.
      k_ctx: cached keys.
      v_ctx: cached values.
      length: cached rows in use.
      k_new: keys of this pass.
      v_new: values of this pass.
      visible: packed bits.
      q_positions: with a window.
      window: of cached positions.
      scale: of the scores.
      interpret: as ``pallas_call`` takes it: True, or ``pltpu.InterpretParams``, runs the kernel on a CPU.
    """
    if k_ctx.shape[2] == 0:  # a block needs a row
        k_ctx, v_ctx = (jnp.pad(x, [(0, 0), (0, 0), (0, 1), (0, 0)]) for x in (k_ctx, v_ctx))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if window is None:
        q_positions = None
    return _attend(
        q, k_ctx, v_ctx, length, k_new, v_new, visible, q_positions, window, scale, interpret
    )


# A jit of its own, so that the layers of a model, equal in shape, trace it once.
@functools.partial(jax.jit, static_argnums=(8, 9, 10))
def _attend(q, k_ctx, v_ctx, length, k_new, v_new, visible, q_positions, window, scale, interpret):
    batch, queries, heads, head_dim = q.shape
    kv_heads, capacity = k_ctx.shape[1:3]
    dtype, new = k_ctx.dtype, k_new.shape[1]
    group = heads // kv_heads
    width, tiles, together, block = _blocking(
        queries, group, kv_heads, capacity, head_dim * dtype.itemsize
    )
    rows = group * width

    def tiled(x):  # [B, Q, ...] -> [B, T, width, ...]
        x = jnp.pad(x, [(0, 0), (0, tiles * width - queries)] + [(0, 0)] * (x.ndim - 2))
        return x.reshape(batch, tiles, width, *x.shape[2:])

    folded = tiled(q * scale).astype(dtype)
    folded = folded.reshape(batch, tiles, width, kv_heads, group, head_dim)
    folded = folded.transpose(0, 3, 1, 4, 2, 5).reshape(batch, kv_heads, tiles, rows, head_dim)
    k_new, v_new = (x.astype(dtype).transpose(0, 2, 1, 3) for x in (k_new, v_new))

    length = jnp.minimum(length, capacity)
    first = jnp.zeros_like(length)
    marks = visible
    if window is not None:
        above = (q_positions - window)[..., None]  # what a query sees of the context is above it
        first = jnp.clip(above.min(axis=(1, 2)) + 1, 0, jnp.maximum(length - 1, 0)) // block
        marks = jnp.concatenate([visible, above], axis=-1)
    blocks = pl.cdiv(length, block) - first
    # Rows on lanes: 4 bytes a word, where words on lanes would be padded to 512 bytes.
    marks = jnp.tile(tiled(marks), (1, 1, group, 1)).swapaxes(2, 3)  # [B, T, words, R]
    marks = jnp.pad(marks, [(0, 0), (0, 0), (0, -marks.shape[2] % 8), (0, -marks.shape[3] % 128)])

    def context(b, h, t, step, first, blocks, length):
        last = jnp.maximum(blocks[b] - 1, 0)
        return b, h, first[b] + jnp.minimum(step, last), 0

    def of_tile(b, h, t, step, *_):
        return b, h, t, 0, 0

    rows_spec = pl.BlockSpec((None, together, None, rows, head_dim), of_tile)
    new_spec = pl.BlockSpec((None, together, new, head_dim), lambda b, h, t, step, *_: (b, h, 0, 0))
    ctx_spec = pl.BlockSpec((None, together, block, head_dim), context)
    marks_spec = pl.BlockSpec(
        (None, None, *marks.shape[2:]), lambda b, h, t, step, *_: (b, t, 0, 0)
    )
    keys = batch * heads * tiles * width * (capacity + new)
    out = pl.pallas_call(
        functools.partial(_kernel, window=window),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(batch, kv_heads // together, tiles, jnp.maximum(blocks.max(), 1)),
            in_specs=[rows_spec, marks_spec, new_spec, new_spec, ctx_spec, ctx_spec],
            out_specs=rows_spec,
            scratch_shapes=[
                pltpu.VMEM((together, rows, 1), jnp.float32),
                pltpu.VMEM((together, rows, 1), jnp.float32),
                pltpu.VMEM((together, rows, head_dim), jnp.float32),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(folded.shape, q.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")
        ),
        cost_estimate=pl.CostEstimate(
            flops=4 * keys * head_dim,
            transcendentals=keys,
            bytes_accessed=sum(x.nbytes for x in (folded, marks, k_new, v_new, k_ctx, v_ctx))
            + folded.size * q.dtype.itemsize,
        ),
        interpret=interpret,
        name="tree_attention",
    )(first, blocks, length, folded, marks, k_new, v_new, k_ctx, v_ctx)
    out = out.reshape(batch, kv_heads, tiles, group, width, head_dim).transpose(0, 2, 4, 1, 3, 5)
    return out.reshape(batch, tiles * width, heads, head_dim)[:, :queries]


def _blocking(queries, group, kv_heads, capacity, row_bytes):
    """Queries of a tile, tiles, kv heads of a step, context positions of a step."""
    width = max(_TILE // group // 8 * 8, 8)
    width = queries if queries <= width else width
    tiles = -(-queries // width)
    fitting = [
        h for h in range(1, kv_heads + 1) if kv_heads % h == 0 and h * group * width <= _TILE
    ]
    together = max(fitting, default=1)
    block = 1 << int(math.log2(max(_BLOCK_BYTES // (together * row_bytes), 128)))
    return width, tiles, together, min(block, _BLOCK, capacity)


def _kernel(
    first, blocks, length, q, marks, k_new, v_new, k_ctx, v_ctx, out, top, total, acc, *, window
):
    b, step = pl.program_id(0), pl.program_id(3)
    rows, new, block = q.shape[1], k_new.shape[1], k_ctx.shape[1]
    # fp32 means fp32: by default the MXU would round the inputs to bf16
    precise = jax.lax.Precision.HIGHEST if k_ctx.dtype == jnp.float32 else None

    def product(equation, *x):
        return jnp.einsum(equation, *x, precision=precise, preferred_element_type=jnp.float32)

    def column(word):  # of each row: i32[R, 1]
        return marks[...].T[:rows, word : word + 1]

    def scores(keys, seen):  # [k, R, keys]
        return jnp.where(seen[None], product("krh,kch->krc", q[...], keys), -jnp.inf)

    @pl.when(step == 0)
    def _():
        at = jax.lax.broadcasted_iota(jnp.int32, (rows, new), 1)
        words = jnp.zeros((rows, new), jnp.int32)
        for word in range(pl.cdiv(new, 32)):
            words = jnp.where(at >> 5 == word, column(word), words)
        s = scores(k_new[...], (words >> (at & 31)) & 1 == 1)
        top[...] = jnp.maximum(s.max(axis=-1, keepdims=True), _LOWEST)
        p = jnp.exp(s - top[...])
        total[...] = p.sum(axis=-1, keepdims=True)
        acc[...] = product("krc,kch->krh", p.astype(v_new.dtype), v_new[...])

    @pl.when(step < blocks[b])
    def _():
        start = (first[b] + step) * block
        at = start + jax.lax.broadcasted_iota(jnp.int32, (rows, block), 1)
        seen = at < length[b]
        if window is not None:
            seen &= at > column(pl.cdiv(new, 32))
        s = scores(k_ctx[...], seen)
        before = top[...]
        top[...] = jnp.maximum(before, s.max(axis=-1, keepdims=True))
        fade, p = jnp.exp(before - top[...]), jnp.exp(s - top[...])
        total[...] = total[...] * fade + p.sum(axis=-1, keepdims=True)
        known = start + jax.lax.broadcasted_iota(jnp.int32, (1, block, 1), 1) < length[b]
        values = jnp.where(known, v_ctx[...], 0)
        acc[...] = acc[...] * fade + product("krc,kch->krh", p.astype(v_ctx.dtype), values)

    @pl.when(step == pl.num_programs(3) - 1)
    def _():
        tiny = np.finfo(np.float32).tiny
        out[...] = (acc[...] / jnp.maximum(total[...], tiny)).astype(out.dtype)


__all__ = ["pallas_tpu_tree_attention"]
