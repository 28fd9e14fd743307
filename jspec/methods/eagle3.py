"""EAGLE-3 (arXiv 2503.01840): an autoregressive head, and the dynamic tree of EAGLE-2 (arXiv 2406.16858)."""

import functools

from jspec.device import cache_dtype
from jspec.growth import best_paths, grow
from jspec.heads.config import check_kind
from jspec.heads.eagle import begin_draft, draft_level, empty_state, read_known
from jspec.heads.eagle_config import EagleConfig
from jspec.method import MAX_BUDGET, Method, MethodState, Needs, Proposal, check_range
from jspec.methods.ar import ar
from jspec.tree import select


def eagle3(head_config: EagleConfig, budget: int, depth: int = 8, width: int = 10) -> Method:
    """Drafts level by level: the best ``width`` nodes of a level get their best ``width`` tokens as children.

    All those children are candidates; the tree is the best ``budget`` of them, the root included, by the
    log-probability of their paths (ties: the shallower, then the one under the better parent). The paper's budget is 60
    and its "depth" counts the passes after the root's: 7 there is 8 here.

    What cannot be among the best ``budget`` is left out from the start: the tree is the same with frontiers no wider
    than ``budget - 1``. Its rows of state are ``jspec.heads.eagle.EagleState``.

    Args:
      head_config: of ``params["head"]``.
      budget: most nodes, root included; 1 drafts nothing and is autoregressive decoding.
      depth: the deepest node, and passes of the head, at most; cut to what the budget can hold as a chain.
      width: nodes expanded a level, and children considered of each; 1 drafts a chain.

    Raises:
      ValueError: an argument below 1, or a head of another kind.
    """
    check_kind("eagle3", head_config, EagleConfig)
    check_range("budget", budget, 1, MAX_BUDGET)
    check_range("depth", depth, 1)
    check_range("width", width, 1)
    depth, width = min(depth, budget - 1), min(width, budget - 1)
    return _eagle3(head_config, budget, depth, width)


@functools.cache
def _eagle3(head_config, budget, depth, width):
    if budget == 1:
        return ar()._replace(name="eagle3")
    children = min(width, head_config.draft_vocab_size or head_config.vocab_size)
    keep = min(width * children, budget - 1)

    def init(params, batch, capacity, memory):
        if "head" not in params:
            raise ValueError('params must hold the weights of the head that eagle3 has, as "head"')
        dtype = cache_dtype(params["head"]["fc"].dtype)
        return MethodState(rows=empty_state(head_config, batch, capacity, dtype))

    def absorb(params, state, tokens, taps, counts):
        parts = (params["head"], params["target"], state.rows)
        return MethodState(rows=read_known(head_config, *parts, tokens, taps, counts))

    def propose(params, state, roots, keep_growing=None):
        parts = (params["head"], params["target"], state.rows)
        expand = functools.partial(draft_level, head_config, *parts, children)
        start = begin_draft(state.rows, depth, width)
        tree, draft = grow(expand, start, roots, depth, width, keep, keep_growing)
        sure = best_paths(tree, depth)
        return Proposal(select(tree, budget), passes=draft.passes, sure=sure), state

    needs = Needs(depth=depth, taps=head_config.taps)
    return Method("eagle3", budget, propose, needs, init, absorb, detail=f"width {width}")
