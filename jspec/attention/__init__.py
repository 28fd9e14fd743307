"""Attention as a cascade: the cached prefix by length, the rows of the same pass by packed bits."""

from functools import partial
from typing import Literal

from jaxtyping import Array, Float, Int

from jspec.attention.xla import xla_tree_attention
from jspec.mesh import over_heads

Implementation = Literal["xla", "pallas_tpu", "pallas_gpu"]


def tree_attention(
    q: Float[Array, "B Q nh hd"],
    k_ctx: Float[Array, "B kh C hd"],
    v_ctx: Float[Array, "B kh C hd"],
    length: Int[Array, " B"],
    k_new: Float[Array, "B M kh hd"],
    v_new: Float[Array, "B M kh hd"],
    visible: Int[Array, "B Q W"],
    *,
    q_positions: Int[Array, "B Q"] | None = None,
    window: int | None = None,
    scale: float | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "B Q nh hd"]:
    """Attends to ``length`` cached rows and to the visible rows of this pass, merged by log-sum-exp.

    Args:
      q: queries, after rope.
      k_ctx: cached keys, kv head before position; rows at or beyond ``length`` are never read into the result.
      v_ctx: cached values; what stands beyond ``length`` must be finite.
      length: cached rows in use.
      k_new: keys of this pass, M rows; M and Q may differ. Queries and new rows take the dtype of the cached ones.
      v_new: values of this pass.
      visible: bit ``j % 32`` of word ``j // 32`` says whether the query sees new row j; W = ceil(M / 32).
      q_positions: positions of the queries, needed with ``window``.
      window: a query sees cached positions above ``q_position - window``. For the new rows the caller clears the bits.
      scale: of the scores; default ``hd ** -0.5``.
      implementation: None picks for the platform.

    Returns:
      Attention outputs; zeros where a query sees nothing.

    Raises:
      ValueError: unknown implementation; ``visible`` of another width; ``window`` without ``q_positions``.
    """
    if implementation not in (None, "xla"):
        raise ValueError(
            f"implementation must be 'xla' (the only one so far) or None, got {implementation!r}"
        )
    if visible.shape[-1] != -(-k_new.shape[1] // 32):
        raise ValueError(
            f"visible must have ceil({k_new.shape[1]} / 32) words, got {visible.shape[-1]}"
        )
    if window is not None and q_positions is None:
        raise ValueError("q_positions are needed with a window")
    attention = partial(xla_tree_attention, window=window, scale=scale)
    return over_heads(attention, q, k_ctx, v_ctx, length, k_new, v_new, visible, q_positions)


__all__ = ["Implementation", "tree_attention"]
