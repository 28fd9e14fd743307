"""How much of the drafted trees to verify: SMART's two readings (arXiv 2604.09731), over a whole batch.

The rows of a verify forward are packed, so a node costs the same whichever row it serves: one threshold
serves them all.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jspec.cost.table import Cost, fitted_seconds, fitted_slope
from jspec.tree import Tree


class Choice(NamedTuple):
    """The nodes to verify, roots left out, and what is expected of them."""

    keep: Bool[Array, "B N"]
    bucket: Int[Array, ""]  # index of the row bucket that they are for
    speed: Float[Array, ""]  # tokens a second expected of the best bucket


def choose_bucket(
    chances: Float[Array, "B N"],
    active: Bool[Array, " B"],
    buckets: Float[Array, " K"],
    seconds: Float[Array, " K"],
    rate: Float[Array, ""] | None = None,
) -> Choice:
    """The exact optimum where the cost depends on the rows alone: the likeliest nodes of all, up to a bucket's edge.

    With each node's chance to be accepted never above its parent's, the best n nodes are closed under ancestors, so for
    every bucket they are the best filling. Without a ``rate`` the best bucket is the one whose round yields the most
    tokens a second. But rounds differ, and what decoding as a whole yields is the ratio of two sums: that is greatest
    when each round makes the most of tokens - rate * seconds, ``rate`` being that of the whole (renewal reward;
    Dinkelbach's method): less is spent on rounds that promise little, more on those that promise much.

    Args:
      chances: of each drafted node; 0 at roots and wherever there is no node.
      active: rows that have a root.
      buckets: row counts, ascending; no more nodes are kept than the last one holds.
      seconds: of a whole round in each.
      rate: tokens a second that the seconds could yield elsewhere.
    """
    roots = active.sum()
    chances = jnp.where(active[:, None], chances, 0.0)
    room = buckets.astype(jnp.int32) - roots
    filled = jnp.clip(room, 0, chances.size)
    best = -jnp.sort(-chances.reshape(-1))
    sums = jnp.concatenate([jnp.zeros((1,)), jnp.cumsum(best)])
    tokens = roots + sums[filled]
    speed = jnp.where(room >= 0, tokens / jnp.maximum(seconds, 1e-9), -jnp.inf)
    value = speed if rate is None else jnp.where(room >= 0, tokens - rate * seconds, -jnp.inf)
    bucket = jnp.argmax(value).astype(jnp.int32)
    return Choice(_top(chances, best, filled[bucket]), bucket, speed.max())


def _top(chances, best, count):
    """bool[B, N]: the ``count`` highest; ties to the earlier row, then to the earlier node."""
    edge = jnp.where(count > 0, best[jnp.maximum(count, 1) - 1], jnp.inf)
    more, ties = chances > edge, chances == edge
    rank = jnp.cumsum(ties.reshape(-1)).reshape(ties.shape)
    return (chances > 0) & (more | (ties & (rank <= count - more.sum())))


def choose_marginal(
    tree: Tree,
    chances: Float[Array, "B N"],
    active: Bool[Array, " B"],
    cost: Cost,
    plain: Float[Array, ""],
    alpha: float,
    mean_paths: bool,
) -> Bool[Array, "B N"]:
    """The published rule: a node stays while its marginal benefit over its marginal cost beats the tree's own.

        alpha * (step * chance / paths) / slope(n) > step * L / seconds(n)

    Nodes are scanned level by level, each level from the likeliest on; a node whose parent went goes too. ``step`` is
    the time of an autoregressive step, L the expected tokens a row, n all rows of the batch, which is treated as one
    tree with many roots (the paper divides a budget evenly). Costs are those of the closed form.

    Args:
      tree: what was drafted.
      chances: of each drafted node, as the drafter has them; 0 where there is none.
      active: rows that have a root.
      cost: with its ``fit``.
      plain: seconds of an autoregressive step of this batch.
      alpha: what a drafter's probability is worth.
      mean_paths: divide a benefit by the tree's root-to-leaf paths, as published; else expect it whole.
    """
    chances = jnp.where(active[:, None], chances, 0.0).reshape(-1)
    first = jnp.arange(tree.batch)[:, None] * tree.budget
    parents = (first + jnp.maximum(tree.parents, 0)).reshape(-1)
    order = jnp.lexsort((-chances, tree.depths.reshape(-1)))
    roots = jnp.maximum(active.sum(), 1).astype(jnp.float32)

    def visit(carry, node):
        kept, inner, rows, length, leaves = carry
        above, chance = parents[node], chances[node]
        gain = chance / roots / jnp.where(mean_paths, leaves / roots, 1.0)
        ratio = alpha * plain * gain / jnp.maximum(fitted_slope(cost, rows), 1e-12)
        speed = plain * length / jnp.maximum(fitted_seconds(cost, rows), 1e-12)
        keep = (chance > 0) & kept[above] & (ratio > speed)
        leaves = leaves + (keep & inner[above])  # a first child takes its parent's place
        kept = kept.at[node].set(kept[node] | keep)
        inner = inner.at[above].set(inner[above] | keep)
        return (kept, inner, rows + keep, length + keep * gain, leaves), None

    kept = jnp.zeros_like(chances, bool).at[first[:, 0]].set(active)
    start = kept, jnp.zeros_like(kept), roots, jnp.float32(1.0), roots
    (kept, *_), _ = lax.scan(visit, start, order)
    return kept.reshape(tree.tokens.shape) & (tree.parents >= 0)
