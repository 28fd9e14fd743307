"""A speculative-decoding method as a value: a NamedTuple of pure functions.

The shape of the idea is optax's ``GradientTransformation``: a method is what it does, not a class hierarchy.
Closures hold static configuration only; every array a method reads is in ``params``, in its state or in memory,
so nothing recompiles when a table changes.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from jspec.tree import Tree

MAX_BUDGET = 512
Params = Mapping[str, Any]  # {"target": ..., "head": ..., ...}: plain pytrees of arrays
Memory = Any  # what outlives a request; None for a cold start


@dataclasses.dataclass(frozen=True)
class Needs:
    """What a method asks of the target's forward. Static, hashable.

    Attributes:
      depth: the deepest node the method can propose (root is 0); a round emits at most ``depth + 1`` tokens.
      top_k: how many of the target's top tokens (and raw logits) each verified node reports to ``observe``.
      taps: 0-based layers whose output residual stream is returned; ``num_layers`` is the final normed state.
      lookahead: extra rows that ride along in the verify forward (PTD); they cannot be accepted.
    """

    depth: int = 0
    top_k: int = 0
    taps: tuple[int, ...] = ()
    lookahead: int = 0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MethodState:
    """A method's state.

    Attributes:
      rows: leading axis B; a slot that gets a new prompt starts afresh from a batch-1 ``init``.
      shared: no batch axis; outlives prompts.
    """

    rows: Any = ()
    shared: Any = ()


class Proposal(NamedTuple):
    """What ``propose`` returns: the tree to verify; lookahead rows and draft logits where the method has them.

    ``sure`` [B, D] is the log-probability of the best path to each depth from 1 on, as drafted, before any node was
    left out; -inf where no node was drafted. None: the tree is all that was drafted.
    """

    tree: Tree
    lookahead: Any = None
    draft_logits: Array | None = None
    passes: Int[Array, ""] | int = 0  # of a draft head, or levels where it drafts by levels
    sure: Float[Array, "B D"] | None = None


class Verdict(NamedTuple):
    """All that the target said about one tree.

    B rows, N nodes, P = needs.depth + 1 path slots, k = needs.top_k, T = len(needs.taps), H hidden width. While a
    prompt is read, the tree is a chunk of it, a chain accepted whole: then N and P are the chunk's width, and
    ``tokens`` are the target's likeliest ones, since nothing is drawn.
    """

    tree: Tree  # the tree that was verified (after narrowing)
    path: Int[Array, "B P"]  # accepted node ids, root first; -1 beyond count
    count: Int[Array, " B"]  # accepted nodes with the root, and tokens to emit with the bonus
    tokens: Int[Array, "B N"]  # the target's draw at each node
    top_tokens: Int[Array, "B N k"]  # the target's k best tokens at each live node
    top_logits: Float[Array, "B N k"]  # their raw logits, before temperature and filters
    taps: Float[Array, "B N T H"]  # tapped states of each node
    lookahead: Any = None


def check_range(name: str, value: Any, low: int, high: int | None = None) -> None:
    """Makes sure that an argument is a whole number from ``low`` to ``high``.

    Raises:
      ValueError: it is not; the argument is named.
    """
    wanted = f"{low} or above" if high is None else f"in {low}..{high}"
    if not isinstance(value, int | np.integer) or isinstance(value, bool):
        raise ValueError(f"{name} must be a whole number, {wanted}, got {value!r}")
    if value < low or (high is not None and value > high):
        raise ValueError(f"{name} must be {wanted}, got {value}")


def check_method(method: Any) -> None:
    """Makes sure that an argument is a method.

    Raises:
      ValueError: it is something else.
    """
    if not isinstance(method, Method):
        raise ValueError(
            f"method must be a Method, as jspec.prompt_lookup(8) is one, got {method!r}"
        )


def no_state(params: Params, batch: int, capacity: int, memory: Memory) -> MethodState:
    """An ``init`` for a method that keeps nothing."""
    return MethodState()


def unchanged(params: Params, state: MethodState, *shown: Any) -> MethodState:
    """An ``absorb`` or ``observe`` for a method that learns nothing from what it is shown."""
    return state


def no_memory(state: MethodState) -> Memory:
    """A ``memory`` for a method from which nothing outlives a request."""
    return None


class Method(NamedTuple):
    """A method: pure functions over pytrees.

    * ``init(params, batch, capacity, memory) -> MethodState``; ``capacity`` is the cache's row count.
    * ``absorb(params, state, tokens [B, K], taps [B, K, T, H], counts [B]) -> state``: the next ``counts[b]``
      known tokens of row b and their taps; every prefill chunk, then each round's accepted path (root and
      accepted nodes, never the bonus token, which is the next round's root).
    * ``propose(params, state, roots [B], keep_growing=None) -> (Proposal, state)``: roots are the last known tokens,
      not yet absorbed.
    * ``observe(params, state, verdict) -> state``: called after ``absorb``, with all that the target said; of prompt
      chunks only where ``needs.top_k`` is above 0. A finished row has ``verdict.tree.size == 0`` and ``count == 0``.
    * ``memory(state) -> Memory``: what a later ``init`` may be given.

    ``path_only`` says that ``observe`` reads no more of a verdict than the tree, its accepted path and the draws along
    that, so that replay is exact. ``detail`` names what else than budget and depth it was made with, as far as a
    round's cost depends on it.
    All but ``propose`` may be left out.

    ``propose`` returns trees of at most ``budget`` node slots and nodes no deeper than ``needs.depth``
    (``jspec.tree.check`` tells what else makes a tree). A factory should be a ``functools.cache``: a method is a static
    argument of the jitted steps, and a new object is compiled anew. ``keep_growing`` is for combinators; drafters that
    do not draft level by level ignore it.

    Entries beyond a row's count or size are garbage by contract (NaN, wrong tokens) and must change nothing.
    """

    name: str
    budget: int
    propose: Callable[..., tuple[Proposal, MethodState]]
    needs: Needs = Needs()
    init: Callable[[Params, int, int, Memory], MethodState] = no_state
    absorb: Callable[..., MethodState] = unchanged
    observe: Callable[..., MethodState] = unchanged
    memory: Callable[[MethodState], Memory] = no_memory
    path_only: bool = False
    detail: str = ""
