"""JetSpec (arXiv 2606.18394): one pass of a causal parallel head, and best-first growth over what it drafts."""

from jspec.heads.config import HeadConfig
from jspec.method import Method
from jspec.methods.one_pass import one_pass
from jspec.tables import best_first_tree


def jetspec(
    head_config: HeadConfig, budget: int, depth: int | None = None, width: int = 7
) -> Method:
    """Drafts a tree whose best nodes get ``width`` children each: see ``jspec.tables.best_first_tree``.

    Args:
      head_config: of ``params["head"]``; the paper's is causal, a bidirectional one does too.
      budget: most nodes, root included.
      depth: slots drafted, at most; default: as far as the head drafts.
      width: children of a node, at most.

    Raises:
      ValueError: an argument below 1, or a depth beyond what the head drafts.
    """
    return one_pass("jetspec", best_first_tree, head_config, budget, depth, width)
