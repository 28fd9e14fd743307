"""DDTree (arXiv 2604.12989): one pass of a parallel head, and the likeliest nodes of all that it drafts."""

from jspec.heads.config import HeadConfig
from jspec.method import Method
from jspec.methods.one_pass import one_pass
from jspec.tables import exact_tree


def ddtree(
    head_config: HeadConfig, budget: int, depth: int | None = None, width: int | None = None
) -> Method:
    """Drafts the best ``budget`` nodes: see ``jspec.tables.exact_tree``.

    Args:
      head_config: of ``params["head"]``; the paper's is bidirectional, a causal one does too.
      budget: most nodes, root included.
      depth: slots drafted, at most; default: as far as the head drafts.
      width: candidates of a slot, at most; default: as many as the budget can hold, with which the tree is exact.

    Raises:
      ValueError: an argument below 1, or a depth beyond what the head drafts.
    """
    width = max(budget - 1, 1) if width is None else width
    return one_pass("ddtree", exact_tree, head_config, budget, depth, width)
