"""A speculative-decoding method as a value: a NamedTuple of pure functions.

The shape of the idea is optax's ``GradientTransformation``: a method is what it does, not a class hierarchy.
Closures hold static configuration only; every array a method reads is in ``params``, in its state or in memory,
so nothing recompiles when a table changes.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
from jaxtyping import Array, Float, Int

from jspec.tree import Tree

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
    """What ``propose`` returns: the tree to verify; lookahead rows and draft logits where the method has them."""

    tree: Tree
    lookahead: Any = None
    draft_logits: Array | None = None
    passes: Int[Array, ""] | int = 0  # forward passes of a draft head that it took


class Verdict(NamedTuple):
    """All that the target said about one tree.

    B rows, N nodes, P = needs.depth + 1 path slots, k = needs.top_k, T = len(needs.taps), H hidden width. While a
    prompt is read, the tree is a chunk of it, a chain accepted whole: then N and P are the chunk's width, and
    ``tokens`` are the target's likeliest ones, since nothing is drawn.
    """

    tree: Tree  # the tree that was verified (after narrowing)
    path: Int[Array, "B P"]  # accepted node ids, root first; -1 beyond count
    count: Int[
        Array, " B"
    ]  # accepted nodes, root included: rows to commit, tokens to emit (bonus included)
    tokens: Int[Array, "B N"]  # the target's draw at each node
    top_tokens: Int[
        Array, "B N k"
    ]  # the target's k best tokens at each node (undefined on padding)
    top_logits: Float[Array, "B N k"]  # their raw logits, before temperature and filters
    taps: Float[Array, "B N T H"]  # tapped states of each node
    lookahead: Any = None


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

    ``propose`` returns trees of at most ``budget`` node slots and nodes no deeper than ``needs.depth``
    (``jspec.tree.check`` tells what else makes a tree). A factory should be a ``functools.cache``: a method is a static
    argument of the jitted steps, and a new object is compiled anew. ``keep_growing`` is for combinators; drafters that
    do not draft level by level ignore it.

    Entries beyond a row's count or size are garbage by contract (NaN, wrong tokens) and must change nothing.
    """

    name: str
    budget: int
    needs: Needs
    init: Callable[[Params, int, int, Memory], MethodState]
    absorb: Callable[..., MethodState]
    propose: Callable[..., tuple[Proposal, MethodState]]
    observe: Callable[..., MethodState]
    memory: Callable[[MethodState], Memory]
