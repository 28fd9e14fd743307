"""Tree attention as a Pallas kernel for Hopper GPUs (Mosaic GPU: the back end of Pallas that stays).

A program takes 64 rows of one kv head (its query heads are rows) and a part of the context, so that a single prompt
keeps all multiprocessors busy. Blocks of 64 keys and values come through a ring of shared-memory buffers, the new rows
first (in the first part), then the context up to the row's length; both products are wgmmas, the softmax is online.
What the parts found is merged by log-sum-exp outside.

Its numerics are tested in interpret mode. It has not run on a GPU yet.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

_ROWS = 64  # of a program: what a wgmma takes
_BLOCK = 64  # keys of a step
_PROGRAMS = 132  # multiprocessors of an H100
_LOWEST = -1e30  # as in ``jspec.attention.xla``
ALIGNED = 8  # positions: where a copy may begin
CAPABILITY = "9.0"  # wgmma exists on Hopper alone


def check_gpu() -> None:
    """Makes sure that the kernel can run here; a GPU that is only traced for is taken to be one that can.

    Raises:
      ValueError: another jax or another GPU.
    """
    if not hasattr(plgpu, "InterpretGPUParams"):
        raise ValueError(
            f"pallas_gpu needs jax 0.12 or newer, and this is {jax.__version__}: use xla"
        )
    if jax.default_backend() != "gpu":
        return
    device = jax.devices()[0]
    capability = getattr(device, "compute_capability", "unknown")
    if capability != CAPABILITY:
        raise ValueError(
            f"pallas_gpu serves Hopper GPUs (compute capability {CAPABILITY}), and this "
            f"{device.device_kind} has {capability}: use xla"
        )


def pallas_gpu_tree_attention(
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
    interpret: Any = None,
) -> Float[Array, "B Q nh hd"]:
    """See ``tree_attention``; bf16 only.

    Args:
      q: queries.
      k_ctx: cached keys.
      v_ctx: cached values; finite, also beyond ``length``.
      length: cached rows in use.
      k_new: keys of this pass.
      v_new: values of this pass.
      visible: packed bits.
      q_positions: with a window.
      window: of cached positions.
      scale: of the scores.
      interpret: ``plgpu.InterpretGPUParams`` runs the kernel on a CPU.
    """
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
    kv_heads, group = k_ctx.shape[1], heads // k_ctx.shape[1]
    dtype = k_ctx.dtype

    def padded(x, axis, multiple):
        pads = [(0, 0)] * x.ndim
        pads[axis] = (0, -x.shape[axis] % multiple)
        return jnp.pad(x, pads)

    capacity = k_ctx.shape[2]
    if capacity < _BLOCK:  # a copy reads a whole block
        pads = [(0, 0), (0, 0), (0, _BLOCK - capacity), (0, 0)]
        k_ctx, v_ctx = jnp.pad(k_ctx, pads), jnp.pad(v_ctx, pads)
    length = jnp.minimum(length, capacity)

    def tiled(x):  # [B, G * Q, ...] -> [B, T, 64, ...]
        x = padded(x, 1, _ROWS)
        return x.reshape(batch, -1, _ROWS, *x.shape[2:])

    rows = (q * scale).astype(dtype).reshape(batch, queries, kv_heads, group, head_dim)
    rows = rows.transpose(0, 3, 1, 2, 4).reshape(batch, group * queries, kv_heads, head_dim)
    rows = tiled(rows).transpose(0, 3, 1, 2, 4)  # [B, kh, T, 64, hd]
    tiles = rows.shape[2]
    k_new, v_new = (
        padded(x.astype(dtype), 1, _BLOCK).transpose(0, 2, 1, 3) for x in (k_new, v_new)
    )
    new_blocks = k_new.shape[2] // _BLOCK

    first = jnp.zeros_like(length)
    above = jnp.full((batch, queries, 1), -1, jnp.int32)  # what a query sees stands above it
    if window is not None:
        above = (q_positions - window)[..., None]
        first = jnp.clip(above.min(axis=(1, 2)) + 1, 0, length) // ALIGNED * ALIGNED
    words = padded(visible, 2, _BLOCK // 32)
    marks = jnp.tile(jnp.concatenate([above, words], axis=2), (1, group, 1))
    marks = tiled(marks).swapaxes(2, 3)  # [B, T, 1 + W, 64]
    # Blocks of the context, in equal parts; each part's range of positions.
    parts = max(1, min(_PROGRAMS // (batch * kv_heads * tiles), pl.cdiv(capacity, 4 * _BLOCK)))
    each = pl.cdiv(pl.cdiv(length - first, _BLOCK), parts) * _BLOCK
    starts = first[:, None] + each[:, None] * jnp.arange(parts)
    ends = jnp.minimum(starts + each[:, None], length[:, None])

    shape = (batch, kv_heads, tiles, parts, _ROWS)
    slots = 4 if head_dim <= 128 else 2
    acc, top, total = plgpu.kernel(
        functools.partial(_kernel, new_blocks=new_blocks, slots=slots, window=window is not None),
        out_type=[
            jax.ShapeDtypeStruct((*shape, head_dim), jnp.float32),
            jax.ShapeDtypeStruct(shape, jnp.float32),
            jax.ShapeDtypeStruct(shape, jnp.float32),
        ],
        grid=shape[:4],
        grid_names=("batch", "head", "tile", "part"),
        interpret=interpret,
    )(rows, marks, starts.astype(jnp.int32), ends.astype(jnp.int32), k_new, v_new, k_ctx, v_ctx)

    weight = jnp.exp(top - top.max(axis=3, keepdims=True))
    out = (acc * weight[..., None]).sum(axis=3)
    total = (total * weight).sum(axis=3)[..., None]
    out = out / jnp.maximum(total, jnp.finfo(jnp.float32).tiny)  # [B, kh, T, 64, hd]
    out = out.reshape(batch, kv_heads, tiles * _ROWS, head_dim)[:, :, : group * queries]
    out = out.reshape(batch, kv_heads, group, queries, head_dim).transpose(0, 3, 1, 2, 4)
    return out.reshape(batch, queries, heads, head_dim).astype(q.dtype)


def _kernel(
    q_ref, marks, starts, ends, k_new, v_new, k_ctx, v_ctx, acc_ref, top_ref, total_ref,
    *, new_blocks, slots, window,
):  # fmt: skip
    head_dim = q_ref.shape[-1]
    columns = 64 if head_dim % 64 == 0 else 32
    transforms = (plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(2 * columns))
    wide = 128 if head_dim % 128 == 0 else head_dim  # values in registers at a time
    pieces = head_dim // wide
    row = plgpu.Layout.WGMMA.reduce(1)

    def smem(*shape):
        return plgpu.SMEM(shape, q_ref.dtype, transforms=transforms)

    def body(q_smem, k_smem, v_smem, p_smem, q_barrier, barrier):
        b, h, t, part = (jax.lax.axis_index(n) for n in ("batch", "head", "tile", "part"))
        start, end = starts[b, part], ends[b, part]
        fresh = jnp.where(part == 0, new_blocks, 0)
        steps = fresh + jnp.maximum(end - start + _BLOCK - 1, 0) // _BLOCK

        def origin(step):  # of the copied block: the last one is moved back into the cache
            return jnp.minimum(start + (step - fresh) * _BLOCK, k_ctx.shape[2] - _BLOCK)

        def fetch(step):
            slot = jax.lax.rem(step, slots)

            def copy(keys, values, at):
                rows = (b, h, pl.ds(pl.multiple_of(at, ALIGNED), _BLOCK))
                plgpu.copy_gmem_to_smem(keys.at[rows], k_smem.at[slot], barrier.at[slot])
                for i, piece in enumerate(v_smem):
                    some = (*rows, pl.ds(i * wide, wide))
                    plgpu.copy_gmem_to_smem(values.at[some], piece.at[slot], barrier.at[slot])

            @pl.when(step < fresh)
            def _():
                copy(k_new, v_new, step * _BLOCK)

            @pl.when((step >= fresh) & (step < steps))
            def _():
                copy(k_ctx, v_ctx, origin(step))

        plgpu.copy_gmem_to_smem(q_ref.at[b, h, t], q_smem, q_barrier)
        for step in range(slots - 1):
            fetch(jnp.int32(step))
        plgpu.barrier_wait(q_barrier)

        def column(x):
            return jax.lax.broadcast_in_dim(x, (_ROWS, _BLOCK), (0,))

        def mark(word):
            return column(plgpu.load(marks.at[b, t, word], layout=row, optimized=False))

        def one(step, carry):
            top, total, *acc = carry
            slot, turn = jax.lax.rem(step, slots), jax.lax.rem(step, 2)
            plgpu.barrier_wait(barrier.at[slot])

            def scores(s):
                plgpu.wgmma(s, q_smem, k_smem.at[slot].transpose((1, 0)))
                return s[...]

            s = pl.run_scoped(scores, plgpu.ACC((_ROWS, _BLOCK), jnp.float32))
            lane = plgpu.broadcasted_iota(jnp.int32, s.shape, 1, layout=plgpu.Layout.WGMMA)
            at = origin(step) + lane
            begun = start + (step - fresh) * _BLOCK
            seen = (at >= begun) & (at < jnp.where(step < fresh, begun, end))
            if window:
                seen &= at > mark(0)
            word = 1 + 2 * jnp.minimum(step, new_blocks - 1)
            bits = jnp.where(lane < 32, mark(word), mark(word + 1))
            bits = jnp.where(lane < jnp.where(step < fresh, _BLOCK, 0), bits >> (lane & 31), 0)
            s = jnp.where(seen | ((bits & 1) == 1), s, 2 * _LOWEST)
            before = top
            top = jnp.maximum(before, s.max(axis=1))
            p = jnp.exp(s - column(top))
            fade = jnp.exp(before - top)
            total = total * fade + p.sum(axis=1)
            p_smem[turn] = p.astype(p_smem.dtype)
            plgpu.commit_smem()  # and all warps are done with the step before: its buffer is free
            fetch(step + slots - 1)

            def mix(piece, o):
                plgpu.wgmma(o, p_smem.at[turn], piece.at[slot])
                return o[...]

            for i, piece in enumerate(v_smem):
                kind = plgpu.ACC((_ROWS, wide), jnp.float32)
                more = pl.run_scoped(functools.partial(mix, piece), kind)
                acc[i] = acc[i] * jax.lax.broadcast_in_dim(fade, (_ROWS, wide), (0,)) + more
            return top, total, *acc

        def full(value, *shape):
            layout = plgpu.Layout.WGMMA if len(shape) == 2 else row
            return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)

        zeros = (full(0.0, _ROWS, wide) for _ in range(pieces))
        carry = (full(_LOWEST, _ROWS), full(0.0, _ROWS), *zeros)
        top, total, *acc = jax.lax.fori_loop(0, steps, one, carry)
        store = functools.partial(plgpu.store, optimized=False)
        store(top_ref.at[b, h, t, part], top)
        store(total_ref.at[b, h, t, part], total)
        for i, x in enumerate(acc):
            store(acc_ref.at[b, h, t, part, :, pl.ds(i * wide, wide)], x)

    pl.run_scoped(
        body,
        smem(_ROWS, head_dim),
        smem(slots, _BLOCK, head_dim),
        [smem(slots, _BLOCK, wide)] * pieces,
        smem(2, _ROWS, _BLOCK),
        plgpu.Barrier(),
        plgpu.Barrier(num_arrivals=1 + pieces, num_barriers=slots),
    )


__all__ = ["check_gpu", "pallas_gpu_tree_attention"]
