"""Attention as a cascade: the cached prefix by length, the rows of the same pass by packed bits."""

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Literal, get_args

from jaxtyping import Array, Float, Int

from jspec.attention.xla import xla_tree_attention
from jspec.device import traced_platform
from jspec.mesh import over_heads

Implementation = Literal["xla", "pallas", "pallas_tpu", "pallas_gpu"]
_PLATFORMS = {"pallas": ("tpu", "gpu"), "pallas_tpu": ("tpu",), "pallas_gpu": ("gpu",)}
MAX_ROWS = 512  # of a pass: a kernel takes all their scores at a time
_DEFAULT: contextvars.ContextVar = contextvars.ContextVar("tree_attention", default=None)


@contextlib.contextmanager
def default_attention(implementation: Implementation | None) -> Iterator[None]:
    """What ``tree_attention`` takes where its caller names none, while steps are traced under it.

    The steps of a round trace a method's functions under ``plan.attention``, so that a head attends as its target does.
    It is like ``jax.default_matmul_precision``. A step has its plan as a static argument, so no program is mistaken for
    another.
    """
    token = _DEFAULT.set(implementation)
    try:
        yield
    finally:
        _DEFAULT.reset(token)


def pick_attention(implementation: Implementation | None = None) -> Implementation:
    """The implementation that a name, or None, stands for on the platform that is traced for.

    None is "pallas_tpu" on a TPU and "xla" elsewhere: the GPU's kernel has not run on one yet.

    Raises:
      ValueError: an unknown name, or a kernel that the platform cannot run.
    """
    here = traced_platform()
    if implementation is None:
        return "pallas_tpu" if here == "tpu" else "xla"
    if implementation not in get_args(Implementation):
        names = ", ".join(get_args(Implementation))
        raise ValueError(
            f"attention implementation must be {names} or None, got {implementation!r}"
        )
    if implementation == "xla":
        return "xla"
    wanted = _PLATFORMS[implementation]
    if here not in wanted:
        machines = " or ".join(name.upper() for name in wanted)
        raise ValueError(
            f"attention by {implementation} needs a {machines}, and this is a {here}: use xla"
        )
    implementation = f"pallas_{here}"
    if implementation == "pallas_gpu":
        from jspec.attention.pallas_gpu import check_gpu

        check_gpu()
    return implementation


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
      implementation: "pallas" is the platform's kernel. None is what ``default_attention`` says, or else what
        ``pick_attention`` picks; then xla, too, where the kernel does not serve these shapes.

    Returns:
      Attention outputs; zeros where a query sees nothing.

    Raises:
      ValueError: ``visible`` of another width; ``window`` without ``q_positions``; an implementation that is
        unknown, or that the platform, the dtype or the shapes rule out.
    """
    if visible.shape[-1] != -(-k_new.shape[1] // 32):
        raise ValueError(
            f"visible must have ceil({k_new.shape[1]} / 32) words, got {visible.shape[-1]}"
        )
    if window is not None and q_positions is None:
        raise ValueError("q_positions are needed with a window")
    asked = implementation or _DEFAULT.get()
    kind = pick_attention(asked)
    if kind != "xla" and (problem := unserved(kind, k_ctx, k_new)):
        if asked is not None:
            raise ValueError(f"{kind} {problem}: use xla")
        kind = "xla"
    if kind == "pallas_tpu":
        from jspec.attention.pallas_tpu import pallas_tpu_tree_attention as attend
    elif kind == "pallas_gpu":
        from jspec.attention.pallas_gpu import pallas_gpu_tree_attention as attend
    else:
        attend = xla_tree_attention

    def attention(*arrays):
        return attend(*arrays, window, scale)

    return over_heads(attention, q, k_ctx, v_ctx, length, k_new, v_new, visible, q_positions)


def unserved(kind: Implementation, k_ctx: Array, k_new: Array) -> str | None:
    """What of the arrays a kernel does not serve, or None."""
    dtypes = ("bfloat16",) if kind == "pallas_gpu" else ("float32", "bfloat16")
    if k_ctx.dtype.name not in dtypes:
        return f"takes {' or '.join(dtypes)}, not {k_ctx.dtype.name}"
    if k_new.shape[1] > MAX_ROWS:
        return f"attends to at most {MAX_ROWS} new rows, not {k_new.shape[1]}"
    if kind == "pallas_gpu" and k_ctx.shape[2] % 8:
        return f"takes caches of a multiple of 8 rows, not {k_ctx.shape[2]}"
    if kind == "pallas_gpu" and (k_ctx.shape[3] % 32 or k_ctx.shape[3] > 256):
        return f"takes a head_dim of 32, 64, .. 256, not {k_ctx.shape[3]}"
    return None


__all__ = ["Implementation", "default_attention", "pick_attention", "tree_attention"]
