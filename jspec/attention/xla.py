"""Tree attention in plain XLA: complete on every platform, and the oracle of the others."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

# A finite floor under the running maximum, so that rows that see nothing give zeros and not NaN.
_LOWEST = -1e30
_FEW_ROWS = (
    48  # of one kv head: up to there XLA:CPU takes a third to all of the time for the other product
)


def xla_tree_attention(
    q: Float[Array, "B Q nh hd"],
    k_ctx: Float[Array, "B kh C hd"],
    v_ctx: Float[Array, "B kh C hd"],
    length: Int[Array, " B"],
    k_new: Float[Array, "B M kh hd"],
    v_new: Float[Array, "B M kh hd"],
    visible: Int[Array, "B Q W"],
    q_positions: Int[Array, "B Q"] | None,
    window: int | None,
    scale: float | None,
) -> Float[Array, "B Q nh hd"]:
    """See ``tree_attention``. Query heads of one kv head are folded into rows: two batched products a part."""
    batch, queries, heads, head_dim = q.shape
    kv_heads, capacity = k_ctx.shape[1:3]
    rows = k_new.shape[1]
    k_new, v_new = k_new.astype(k_ctx.dtype), v_new.astype(v_ctx.dtype)
    scale = head_dim**-0.5 if scale is None else scale
    group = heads // kv_heads
    # Rows of one kv head: [B, kh, G * Q, hd]. Scores as [rows, keys] keep softmax along the contiguous axis (on XLA:CPU
    # half the time of [keys, rows] for few queries).
    folded = q.reshape(batch, queries, kv_heads, group, head_dim).transpose(0, 2, 3, 1, 4) * scale
    folded = folded.reshape(batch, kv_heads, group * queries, head_dim).astype(k_ctx.dtype)

    at = jnp.arange(capacity)
    in_ctx = (at < length[:, None])[:, None]  # [B, 1 or Q, C]
    if window is not None:
        in_ctx = in_ctx & (at > q_positions[..., None] - window)
    at = jnp.arange(rows)
    in_new = (visible[..., at // 32] >> (at % 32)) & 1 == 1  # [B, Q, M]

    def scores(keys, mask):  # [B, kh, G * Q, keys]
        if group * queries <= _FEW_ROWS:
            # As products of columns, then transposed; XLA would fold the transposition into a slower product.
            s = jnp.einsum("bkch,bkrh->bkcr", keys, folded, preferred_element_type=jnp.float32)
            s = jax.lax.optimization_barrier(s).swapaxes(2, 3)
        else:
            s = jnp.einsum("bkch,bkrh->bkrc", keys, folded, preferred_element_type=jnp.float32)
        shape = s.shape
        s = s.reshape(batch, kv_heads, group, queries, -1)
        return jnp.where(mask[:, None, None], s, -jnp.inf).reshape(shape)

    s_ctx = scores(k_ctx, in_ctx)
    s_new = scores(k_new.transpose(0, 2, 1, 3), in_new)
    top = jnp.maximum(s_ctx.max(-1, initial=_LOWEST), s_new.max(-1))[..., None]  # C may be 0
    p_ctx, p_new = jnp.exp(s_ctx - top), jnp.exp(s_new - top)
    total = (p_ctx.sum(-1) + p_new.sum(-1))[..., None]

    def mix(values, p):  # [B, kh, G * Q, hd]
        p = p.astype(values.dtype)
        return jnp.einsum("bkch,bkrc->bkrh", values, p, preferred_element_type=jnp.float32)

    out = mix(v_ctx, p_ctx) + mix(v_new.transpose(0, 2, 1, 3), p_new)
    out = out / jnp.maximum(total, jnp.finfo(jnp.float32).tiny)
    out = out.reshape(batch, kv_heads, group, queries, head_dim).transpose(0, 3, 1, 2, 4)
    return out.reshape(batch, queries, heads, head_dim).astype(q.dtype)


__all__ = ["xla_tree_attention"]
