"""What JetSpec, DFlash and DDTree have in common: one pass of a parallel head gives a table, the table a tree."""

import functools
from collections.abc import Callable

from jspec.device import cache_dtype
from jspec.heads.config import HeadConfig
from jspec.heads.parallel import draft_table, empty_cache, read_context
from jspec.method import MAX_BUDGET, Method, MethodState, Needs, Proposal, check_range
from jspec.methods.ar import ar
from jspec.tree import Tree


def one_pass(
    name: str,
    build: Callable[..., Tree],
    head_config: HeadConfig,
    budget: int,
    depth: int | None,
    width: int,
) -> Method:
    """Drafts with ``params["head"]``; its rows of state are the head's cache.

    Args:
      name: the method's.
      build: of ``jspec.tables``.
      head_config: of the head: causal or bidirectional.
      budget: most nodes, root included; 1 drafts nothing and is autoregressive decoding.
      depth: slots drafted, at most; cut to what the budget can hold as a chain. Default: the head's block, which a
        bidirectional head runs whole at any depth.
      width: candidates of a slot, at most.

    Raises:
      ValueError: an argument below 1, or a depth beyond the head's block.
    """
    depth = head_config.depth if depth is None else depth
    check_range("budget", budget, 1, MAX_BUDGET)
    check_range("depth", depth, 1)
    check_range("width", width, 1)
    if depth > head_config.depth:
        raise ValueError(
            f"depth must be at most {head_config.depth}, as far as the head drafts, got {depth}"
        )
    depth = min(depth, budget - 1)
    width = min(width, head_config.draft_vocab_size or head_config.vocab_size)
    return _one_pass(name, build, head_config, budget, depth, width)


@functools.cache
def _one_pass(name, build, head_config, budget, depth, width):
    if budget == 1:
        return ar()._replace(name=name)

    def init(params, batch, capacity, memory):
        if "head" not in params:
            raise ValueError(f'params must hold the weights of the head that {name} has, as "head"')
        return MethodState(
            rows=empty_cache(head_config, batch, capacity, cache_dtype(params["head"]["fc"].dtype))
        )

    def absorb(params, state, tokens, taps, counts):
        return MethodState(rows=read_context(head_config, params["head"], state.rows, taps, counts))

    def propose(params, state, roots, keep_growing=None):
        table = draft_table(
            head_config, params["head"], params["target"], state.rows, roots, depth, width
        )
        return Proposal(build(*table, roots, budget), passes=1), state

    needs = Needs(depth=depth, taps=head_config.taps)
    return Method(name, budget, propose, needs, init, absorb, detail=f"width {width}")
