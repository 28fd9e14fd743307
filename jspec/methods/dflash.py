"""DFlash (arXiv 2602.06036): one pass of a parallel head, and the chain of its likeliest tokens."""

from jspec.heads.config import HeadConfig
from jspec.method import Method
from jspec.methods.one_pass import one_pass
from jspec.tables import chain_tree


def dflash(head_config: HeadConfig, budget: int, depth: int | None = None) -> Method:
    """Drafts a chain: see ``jspec.tables.chain_tree``.

    Args:
      head_config: of ``params["head"]``; the paper's is bidirectional, a causal one does too.
      budget: most nodes, root included; a chain uses no more than its depth and the root.
      depth: slots drafted, at most; default: as far as the head drafts.

    Raises:
      ValueError: an argument below 1, or a depth beyond what the head drafts.
    """
    return one_pass("dflash", chain_tree, head_config, budget, depth, 1)
