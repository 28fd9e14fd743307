"""Trees over per-depth tables: what a head that drafts a whole block in one pass leaves to choose from.

Row d of a table holds candidates for depth d + 1 and their log-probabilities, the same for every node of depth d: the
head saw no branch. A node is thus a tuple of candidates, and its score the sum of their log-probabilities. The builders
are pure, batched and jit-able. Whatever stands in a table, they make valid trees of it: a row may be in any order, a
NaN or -inf is no candidate, a positive log-probability counts as 0, and of equal tokens in a row the best counts.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from jspec.method import MAX_BUDGET, check_range
from jspec.tree import HEAD, Tree, canonical, from_paths, root_only, take


def chain_tree(
    tokens: Int[Array, "B D W"],
    logps: Float[Array, "B D W"],
    roots: Int[Array, " B"],
    budget: int,
) -> Tree:
    """The best candidate of every depth, as a chain: DFlash (arXiv 2602.06036).

    Args:
      tokens: candidates for depths 1..D.
      logps: their log-probabilities.
      roots: tokens of the roots.
      budget: node axis of the result, root included.

    Raises:
      ValueError: a budget out of range.
    """
    check_range("budget", budget, 1, MAX_BUDGET)
    if budget == 1 or 0 in logps.shape:
        return root_only(roots, budget)
    tokens, edges = _best(tokens, logps, 1)
    scores = jnp.cumsum(edges[:, :, 0], axis=1)
    lengths = jnp.sum(scores > -jnp.inf, axis=1, keepdims=True)
    return from_paths(roots, tokens[:, None, :, 0], lengths, scores[:, None], HEAD, budget)


def best_first_tree(
    tokens: Int[Array, "B D W"],
    logps: Float[Array, "B D W"],
    roots: Int[Array, " B"],
    budget: int,
) -> Tree:
    """JetSpec's best-first growth (arXiv 2606.18394, Algorithm 1).

    While there is room, the best node that has no children yet (ties: the older one) gets all W candidates for the next
    depth as children, best first, as far as there is room. Nodes stand in the order in which they were added.

    Args:
      tokens: candidates for depths 1..D.
      logps: their log-probabilities.
      roots: tokens of the roots.
      budget: node axis of the result, root included.

    Raises:
      ValueError: a budget out of range.
    """
    check_range("budget", budget, 1, MAX_BUDGET)
    if budget == 1 or 0 in logps.shape:
        return root_only(roots, budget)
    tokens, edges = _best(tokens, logps, budget - 1)
    width = edges.shape[2]
    inner = jnp.pad(edges[:, :, 0] > -jnp.inf, [(0, 0), (0, 1)])  # can depth 0..D have children?
    slot = jnp.arange(budget)

    def row(x, index):
        return jnp.take_along_axis(x, index.reshape(-1, *[1] * (x.ndim - 1)), axis=1)[:, 0]

    def growing(tree, leaves):
        return (tree.size < budget) & jnp.any(leaves > -jnp.inf, axis=1)

    def expand(state):
        tree, leaves = state
        parent = jnp.argmax(leaves, axis=1).astype(jnp.int32)
        depth = row(tree.depths, parent)
        rank = slot - tree.size[:, None]
        child = jnp.clip(rank, 0, width - 1)
        scores = row(tree.scores, parent)[:, None] + take(row(edges, depth), child)
        new = growing(tree, leaves)[:, None] & (rank == child) & (scores > -jnp.inf)

        def put(values, old):
            return jnp.where(new, values, old)

        tree = dataclasses.replace(
            tree,
            tokens=put(take(row(tokens, depth), child), tree.tokens),
            parents=put(parent[:, None], tree.parents),
            depths=put(depth[:, None] + 1, tree.depths),
            scores=put(scores, tree.scores),
            size=tree.size + jnp.sum(new, axis=1, dtype=jnp.int32),
        )
        fresh = jnp.where(take(inner, tree.depths), tree.scores, -jnp.inf)
        return tree, jnp.where(slot == parent[:, None], -jnp.inf, put(fresh, leaves))

    tree = root_only(roots, budget)
    leaves = jnp.where(inner[:, :1], tree.scores, -jnp.inf)
    # ceil((budget - 1) / W) turns, unless candidates are missing.
    return lax.while_loop(lambda state: growing(*state).any(), expand, (tree, leaves))[0]


def exact_tree(
    tokens: Int[Array, "B D W"],
    logps: Float[Array, "B D W"],
    roots: Int[Array, " B"],
    budget: int,
) -> Tree:
    """The best ``budget`` nodes of all: DDTree (arXiv 2604.12989).

    Nodes stand in the order of their scores; ties: the shallower node first, then the one whose parent comes first,
    then the better candidate. A heap gives them out so when each node pushes its next sibling and its first child.

    Args:
      tokens: candidates for depths 1..D.
      logps: their log-probabilities.
      roots: tokens of the roots.
      budget: node axis of the result, root included.

    Raises:
      ValueError: a budget out of range.
    """
    check_range("budget", budget, 1, MAX_BUDGET)
    if budget == 1 or 0 in logps.shape:
        return root_only(roots, budget)
    keep = budget - 1
    tokens, edges = _best(tokens, logps, keep)
    batch, _, width = edges.shape
    # A depth's nodes in order, and their candidates in order: candidate j of node i comes after (i + 1) * (j + 1) - 1
    # others of that depth, so only these pairs can be among the best. Each depth keeps as many as a tree can hold.
    pairs = np.outer(1 + np.arange(keep), 1 + np.arange(width)) <= keep
    node, rank = (jnp.asarray(x, jnp.int32) for x in np.nonzero(pairs))

    def deeper(scores, edge):
        scores, best = lax.top_k(scores[:, node] + edge[:, rank], keep)
        return scores, (scores, node[best], rank[best])

    root = jnp.where(jnp.arange(keep) == 0, 0.0, jnp.full((batch, keep), -jnp.inf))
    _, levels = lax.scan(deeper, root, edges.swapaxes(0, 1))
    scores, parents, ranks = (x.swapaxes(0, 1).reshape(batch, -1) for x in levels)
    scores, best = lax.top_k(scores, keep)
    level = best // keep
    above = (level - 1) * keep + take(parents, best)
    found = jnp.argmax(above[:, :, None] == best[:, None, :], axis=2)
    tree = root_only(roots, budget)
    return canonical(
        Tree(
            tree.tokens.at[:, 1:].set(
                take(tokens.reshape(batch, -1), level * width + take(ranks, best))
            ),
            tree.parents.at[:, 1:].set(jnp.where(level > 0, 1 + found, 0).astype(jnp.int32)),
            tree.depths.at[:, 1:].set(1 + level),
            tree.scores.at[:, 1:].set(scores),
            tree.source,
            jnp.sum(scores > -jnp.inf, axis=1, dtype=jnp.int32) + 1,
        )
    )


def _best(tokens, logps, most):
    """The best ``most`` candidates of every depth, best first (ties: lower index), and their log-probabilities."""
    edges = jnp.where(logps > -jnp.inf, jnp.minimum(logps.astype(jnp.float32), 0), -jnp.inf)
    edges = jnp.where(edges == 0, 0.0, edges)  # top_k ranks -0.0 below 0.0
    mine, theirs = edges[..., :, None], edges[..., None, :]
    index = jnp.arange(edges.shape[-1])
    before = (theirs > mine) | ((theirs == mine) & (index < index[:, None]))
    again = before & (tokens[..., :, None] == tokens[..., None, :])
    edges, best = lax.top_k(
        jnp.where(again.any(axis=-1), -jnp.inf, edges), min(most, edges.shape[-1])
    )
    return jnp.take_along_axis(tokens, best, axis=-1).astype(jnp.int32), edges
