"""Domino (arXiv 2605.29707): one pass of a parallel head, and a chain, each draft corrected by those before it."""

from jspec.heads.config import HeadConfig
from jspec.heads.correction import best_of_all
from jspec.method import Method
from jspec.methods.corrected import corrected
from jspec.methods.one_pass import check_shape


def domino(head_config: HeadConfig, budget: int, depth: int | None = None) -> Method:
    """Drafts a chain: each token the likeliest of the whole draft vocabulary after those before it.

    Args:
      head_config: of ``params["head"]``, with a correction; the paper's is bidirectional, a causal one does too.
      budget: most nodes, root included; a chain uses no more than its depth and the root.
      depth: tokens drafted, at most; default: as far as the head drafts.

    Raises:
      ValueError: an argument below 1, a depth beyond what the head drafts, or a head without a correction.
    """
    depth = check_shape(head_config, budget, depth)
    return corrected("domino", best_of_all, head_config, budget, depth, 1)
