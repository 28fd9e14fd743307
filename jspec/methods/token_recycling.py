"""Token Recycling (Luo et al. 2024, arXiv 2408.08696): drafts from the target's own earlier second thoughts.

A table holds, for every token, the target's best k successors the last time it verified that token, accepted or not.
A tree of static shape is filled from it.
"""

import functools
import heapq
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from jspec.method import MAX_BUDGET, Method, MethodState, Needs, Proposal, check_range
from jspec.tree import RETRIEVED, Tree, compact

# The chance that the successor of rank r = 1, 2, ... is the next token is about _PRIOR * r ** _DECAY: fitted to replays
# of SmolLM2-135M-Instruct on the four benches, where it is .39, .11, .06, .04, .02, .02, .01, .02.
_PRIOR = 0.39
_DECAY = -1.7


def token_recycling(budget: int, k: int = 8, depth: int = 8, scope: str = "prompt") -> Method:
    """Drafts a static tree whose nodes are the successors that the target gave last.

    Args:
      budget: most nodes, root included; those whose token isn't known yet are left out.
      k: successors kept of each token.
      depth: the deepest node, at most.
      scope: "prompt": each row has a table of its own, that starts from the one in memory, if any; memory doesn't
        change. "kept": all rows share one table, and memory is that table.

    Memory is a table i32[V, k], -1 where nothing is known (see ``seed_table``), or None.

    Raises:
      ValueError: an argument out of range; in ``init``, a memory of another shape.
    """
    check_range("budget", budget, 1, MAX_BUDGET)
    check_range("k", k, 1, 256)
    check_range("depth", depth, 1)
    if scope not in ("prompt", "kept"):
        raise ValueError(f"scope must be 'prompt' or 'kept', got {scope!r}")
    return _token_recycling(budget, k, depth, scope)


@functools.cache
def _token_recycling(budget, k, depth, scope):
    parents, ranks, depths, scores = best_template(budget, k, depth)
    levels = [np.flatnonzero(depths == d) for d in range(1, depths[-1] + 1)]
    above = [parents[level] - np.searchsorted(depths, d) for d, level in enumerate(levels)]
    source = np.where(depths > 0, RETRIEVED, 0).astype(np.int8)

    def init(params, batch, capacity, memory):
        vocab = params["target"]["embed"].shape[0]
        if memory is not None:
            shape, kind = jnp.shape(memory), jnp.asarray(memory).dtype
            if shape != (vocab, k) or not jnp.issubdtype(kind, jnp.integer):
                raise ValueError(
                    f"memory must be integers of shape {(vocab, k)}, got {kind}{shape}"
                )
        # A state is donated, so it must not share a buffer with memory.
        table = (
            jnp.full((vocab, k), -1, jnp.int32) if memory is None else jnp.array(memory, jnp.int32)
        )
        if scope == "kept":
            return MethodState(shared=table)
        rows = jnp.broadcast_to(table, (batch, vocab, k))
        return MethodState(rows=rows, shared=None if memory is None else table)

    def tables(state):
        """[B, V, k], or [1, V, k] where all rows share it."""
        return state.shared[None] if scope == "kept" else state.rows

    def propose(params, state, roots, keep_growing=None):
        table = tables(state)
        row = jnp.arange(table.shape[0])[:, None]
        tokens = [roots[:, None]]
        for level, slots in zip(levels, above):
            token = tokens[-1][:, slots]
            found = table[row, jnp.maximum(token, 0), ranks[level]]
            tokens.append(jnp.where(token < 0, -1, found))
        tokens = jnp.concatenate(tokens, axis=1)
        fields = (jnp.broadcast_to(x, tokens.shape) for x in (parents, depths, scores, source))
        tree = Tree(tokens, *fields, jnp.full_like(roots, len(parents)))
        return Proposal(compact(tree, tokens >= 0, budget)), state

    def observe(params, state, verdict):
        table, tree = tables(state), verdict.tree

        def by_table(x):
            return x.reshape(table.shape[0], -1, *x.shape[2:])

        tokens, live, best = map(by_table, (tree.tokens, tree.live, verdict.top_tokens))
        # Of nodes with the same token the last one counts; a scatter would not say which.
        later = jnp.triu(tokens[:, :, None] == tokens[:, None, :], 1) & live[:, None, :]
        at = jnp.where(live & ~later.any(axis=2), tokens, table.shape[1])
        table = table.at[jnp.arange(table.shape[0])[:, None], at].set(best, mode="drop")
        if scope == "kept":
            return MethodState(shared=table[0])
        return MethodState(rows=table, shared=state.shared)

    def memory(state):
        return state.shared

    needs = Needs(depth=len(levels), top_k=k)
    shown = {"observe": observe, "memory": memory, "detail": f"k {k}, {scope}"}
    return Method("token_recycling", budget, propose, needs, init, **shown)


def best_template(budget, k, depth):
    """The best nodes by the product of their ranks' priors, level by level: parents, ranks, depths, log-scores."""
    edges = np.log(_PRIOR * np.arange(1, k + 1) ** _DECAY)
    heap, best = [(0.0, ())], []  # (-log of the product, ranks from the root)
    while heap and len(best) < budget:
        cost, path = heapq.heappop(heap)
        best.append((len(path), cost, path))
        if len(path) < depth:
            for rank in range(k):
                heapq.heappush(heap, (cost - edges[rank], (*path, rank)))
    best.sort()
    depths, costs, paths = zip(*best)
    index = {path: node for node, path in enumerate(paths)}
    parents = [index.get(path[:-1], -1) if path else -1 for path in paths]
    ranks = [path[-1] if path else 0 for path in paths]
    integers = (np.array(x, np.int32) for x in (parents, ranks, depths))
    return *integers, -np.array(costs, np.float32)


def seed_table(
    tokens: Sequence[int] | Int[np.ndarray, " n"], vocab: int, k: int = 8
) -> Int[np.ndarray, "V k"]:
    """A table from text, to be used as memory: the most frequent successors of each token.

    Args:
      tokens: the text.
      vocab: V.
      k: successors kept; of equal counts the lower token first.

    Returns:
      i32[V, k], -1 where the text shows no more successors.

    Raises:
      ValueError: a token outside the vocabulary.
    """
    tokens = np.asarray(tokens, np.int64)
    if tokens.size and not 0 <= tokens.min() <= tokens.max() < vocab:
        raise ValueError(f"tokens must be in 0..{vocab - 1}")
    pairs, counts = np.unique(tokens[:-1] * vocab + tokens[1:], return_counts=True)
    first, second = pairs // vocab, pairs % vocab
    order = np.lexsort((second, -counts, first))
    first, second = first[order], second[order]
    rank = np.arange(len(first)) - np.searchsorted(first, first)
    table = np.full((vocab, k), -1, np.int32)
    table[first[rank < k], rank[rank < k]] = second[rank < k]
    return table
