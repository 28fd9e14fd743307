"""DARTree (arXiv 2608.13524): trees of Domino's head, all nodes of a depth corrected at once, each by its own path."""

import functools

from jspec.heads.config import HeadConfig
from jspec.heads.correction import best_of_few
from jspec.method import Method, check_range
from jspec.methods.corrected import corrected
from jspec.methods.one_pass import check_shape

VARIANTS = ("pruned", "fixed")
NORMS = ("candidates", "vocabulary")
_WIDTH = 12  # published, for 64 nodes of 16 depths: three times what a depth has in "fixed"
_PENALTY = 0.2


def dartree(
    head_config: HeadConfig,
    budget: int,
    depth: int | None = None,
    width: int | None = None,
    *,
    variant: str = "pruned",
    candidates: int = 64,
    depth_penalty: float | int | None = None,
    normalise: str = "candidates",
) -> Method:
    """Drafts a tree depth by depth: every node scores the slot's candidates given its own path.

    "pruned", the paper's best, keeps the ``width`` best nodes of each depth, and of all those the best by
    ``score - depth_penalty * depth``. "fixed" shares the budget out among the depths, ceil(nodes left / depths left)
    to each, and keeps all. A depth's nodes may stand under one parent.

    Args:
      head_config: of ``params["head"]``, with a correction; the paper's is bidirectional, a causal one does too.
      budget: most nodes, root included (the paper's 64 leave it out).
      depth: tokens drafted, at most; default: as far as the head drafts.
      width: nodes kept of a depth; default: 12, as published, but three times as many as "fixed" keeps of the first
        where that is more, and never more than the budget can use. "fixed" has none.
      variant: "pruned" or "fixed".
      candidates: tokens of a slot that are scored, at most.
      depth_penalty: of "pruned", 0 or above; default: 0.2.
      normalise: what a node's probabilities are over: its "candidates", as published, or the draft "vocabulary", where
        the other tokens count with the slot's own logits; not published.

    Raises:
      ValueError: an argument out of range, a depth beyond what the head drafts, or a head without a correction.
    """
    depth = check_shape(head_config, budget, depth)
    check_range("candidates", candidates, 1)
    if variant not in VARIANTS:
        raise ValueError(f"variant must be 'pruned' or 'fixed', got {variant!r}")
    if normalise not in NORMS:
        raise ValueError(f"normalise must be 'candidates' or 'vocabulary', got {normalise!r}")
    nodes = budget - 1
    shares = tuple(_shares(nodes, depth))
    most = shares[0] if shares else 1
    candidates = min(candidates, head_config.draft_vocab_size or head_config.vocab_size)
    drafts = _scorer(candidates, normalise == "vocabulary"), head_config, budget, depth
    if variant == "fixed":
        if width is not None or depth_penalty is not None:
            raise ValueError("the fixed variant has no width and no depth_penalty: leave them out")
        detail = f"candidates {candidates}"
        return corrected("dartree_fixed", *drafts, most, shares, detail=detail)
    width = max(_WIDTH, 3 * most) if width is None else width
    check_range("width", width, 1)
    penalty = _PENALTY if depth_penalty is None else depth_penalty
    if not 0 <= penalty < float("inf"):
        raise ValueError(f"depth_penalty must be finite and 0 or above, got {penalty!r}")
    width = min(width, max(nodes, 1))
    detail = f"width {width}, candidates {candidates}"
    return corrected("dartree", *drafts, width, depth_penalty=penalty, detail=detail)


def _shares(nodes, depth):
    """The nodes of each depth: ceil(nodes left / depths left)."""
    for left in range(depth, 0, -1):
        share = -(-nodes // left)
        yield share
        nodes -= share


@functools.cache
def _scorer(candidates, whole):
    """One object for equal arguments, since a method is compiled for it."""
    return functools.partial(best_of_few, candidates=candidates, whole=whole)
