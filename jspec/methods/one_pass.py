"""What JetSpec, DFlash and DDTree have in common: one pass of a parallel head gives a table, the table a tree.

And what all methods of a parallel head have in common: its cache, and how deep they draft.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from jspec.device import cache_dtype
from jspec.heads.config import HeadConfig, check_kind
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
      depth: slots drafted, at most; cut to what the budget can hold as a chain. Default: as far as the head drafts;
        a bidirectional one runs its whole block at any depth.
      width: candidates of a slot, at most.

    Raises:
      ValueError: an argument below 1, a depth beyond what the head drafts, or a head of another kind.
    """
    check_kind(name, head_config, HeadConfig)
    depth = check_shape(head_config, budget, depth)
    check_range("width", width, 1)
    width = min(width, head_config.draft_vocab_size or head_config.vocab_size)
    return _one_pass(name, build, head_config, budget, depth, width)


def check_shape(head_config: HeadConfig, budget: int, depth: int | None) -> int:
    """The depth to draft: what is asked for, default the head's block, cut to what the budget can hold as a chain.

    Raises:
      ValueError: an argument below 1, or a depth beyond what the head drafts.
    """
    depth = head_config.depth if depth is None else depth
    check_range("budget", budget, 1, MAX_BUDGET)
    check_range("depth", depth, 1)
    if depth > head_config.depth:
        raise ValueError(
            f"depth must be at most {head_config.depth}, as far as the head drafts, got {depth}"
        )
    return min(depth, budget - 1)


@functools.cache
def _one_pass(name, build, head_config, budget, depth, width):
    def propose(params, state, roots, keep_growing=None):
        table = draft_table(
            head_config, params["head"], params["target"], state.rows, roots, depth, width
        )
        sure = jnp.cumsum(table.logps[:, :, 0], axis=1)
        return Proposal(build(*table, roots, budget), passes=1, sure=sure), state

    return head_reader(name, propose, head_config, budget, depth, f"width {width}")


def head_reader(
    name: str,
    propose: Callable[..., Any],
    head_config: HeadConfig,
    budget: int,
    depth: int,
    detail: str,
) -> Method:
    """A method whose rows of state are the cache of ``params["head"]``; with a budget of 1 it is ``ar``.

    Args:
      name: the method's.
      propose: see ``Method``.
      head_config: of the head.
      budget: most nodes, root included.
      depth: of the deepest node.
      detail: see ``Method``.
    """
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

    needs = Needs(depth=depth, taps=head_config.taps)
    return Method(name, budget, propose, needs, init, absorb, detail=detail)
