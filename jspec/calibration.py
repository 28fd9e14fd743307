"""What a drafter's probabilities are worth: of the edges that the target was asked about, how many it took.

An edge is known to be right or wrong where its parent stands in the target's text; of the others it says nothing.
Counts are kept by who proposed the edge's lower node, by its depth and by the probability that it was given, on the
device: a head and a match in earlier text are not equally right where they say the same. The probabilities are a few
knots, between which an edge is counted and read with the same weights: counted at one knot alone, it would be read half
by another one that never learns. The idea of a calibrated product along a path is the exact form of what SMART (arXiv
2604.09731) takes its drafter's probabilities for: for the match rule the expected number of accepted nodes is the sum
of the nodes' path probabilities.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jspec.tree import HEAD, SOURCES, Tree, reached, take

# Probabilities, closer to each other where good drafters' best candidates are.
KNOTS = (
    0.005,
    0.015,
    0.035,
    0.075,
    0.15,
    0.25,
    0.35,
    0.45,
    0.55,
    0.65,
    0.75,
    0.85,
    0.925,
    0.97,
    0.995,
)
DEPTHS = (2, 3, 4, 6, 9)  # first depth of each bin but the first
WEIGHT = 4.0  # of the prior, in edges
KEPT = 128.0  # edges a knot remembers: more are scaled down to it, so that old ones fade
_KNOTS = np.asarray(KNOTS, np.float32)


class Calibration(NamedTuple):
    """Edges seen and edges accepted, by source, depth bin and knot."""

    tried: Float[Array, "S D Q"]
    hit: Float[Array, "S D Q"]


def no_calibration() -> Calibration:
    """Counts of nothing."""
    shape = (len(SOURCES), len(DEPTHS) + 1, len(_KNOTS))
    return Calibration(jnp.zeros(shape), jnp.zeros(shape))


def edge_values(tree: Tree) -> Float[Array, "B N"]:
    """The drafter's probability of each node after its parent; 0 at roots, padding, and where a score is no number."""
    above = take(tree.scores, jnp.maximum(tree.parents, 0))
    edges = jnp.exp(jnp.minimum(tree.scores - above, 0.0))
    return jnp.where(tree.live & (tree.parents >= 0) & (edges > 0), edges, 0.0)


def estimates(calibration: Calibration, alpha: float) -> Float[Array, "S D Q"]:
    """The chance of an edge by source, depth bin and knot, never decreasing with the drafter's probability.

    Where little was seen, it is what all depths of the source say; where nothing, ``alpha`` times the drafter's
    probability.
    """
    tried, hit = calibration
    seen, right = (x.sum(axis=1, keepdims=True) for x in calibration)
    pooled = (right + WEIGHT * alpha * _KNOTS) / (seen + WEIGHT)
    each = (hit + WEIGHT * pooled) / (tried + WEIGHT)
    return _rising(each, tried + 1e-3)


def _rising(values, weights):
    """The isotonic regression along the last axis: the least of the averages up to later entries, the best start."""
    slot = np.arange(values.shape[-1])
    inside = (slot[:, None, None] <= slot) & (slot <= slot[:, None])  # [first, last, entry]
    # Sums over ranges, not differences of running sums: weights of very different size stand side by side.
    mass = (weights[..., None, None, :] * inside).sum(axis=-1)
    sums = ((weights * values)[..., None, None, :] * inside).sum(axis=-1)
    means = jnp.where(inside.any(axis=-1), sums / jnp.maximum(mass, 1e-9), jnp.inf)
    least = lax.cummin(means, axis=means.ndim - 1, reverse=True)  # [.., first, k]: over last >= k
    seen = np.tri(values.shape[-1], dtype=bool).T  # first <= k
    return jnp.where(seen, least, -jnp.inf).max(axis=-2)


def depth_bin(depths: Int[Array, "*n"]) -> Int[Array, "*n"]:
    """The bin of a depth, 1 or above."""
    return (depths[..., None] >= np.asarray(DEPTHS)).sum(axis=-1)


def calibrated(
    table: Float[Array, "S D Q"],
    edges: Float[Array, "*n"],
    depths: Int[Array, "*n"],
    source: Int[Array, "*n"] | int = HEAD,
) -> Float[Array, "*n"]:
    """The chance of edges: between the estimates at the knots around, 0 where the drafter's probability is 0.

    Args:
      table: of ``estimates``.
      edges: the drafter's probabilities.
      depths: of the edges' lower ends.
      source: likewise, who proposed them.
    """
    low, high, part = _around(edges)
    row = depth_bin(depths)
    under, over = table[source, row, low], table[source, row, high]
    chance = under + part * (over - under)
    return jnp.clip(chance * jnp.minimum(edges / _KNOTS[0], 1.0), 0.0, 1.0)


def _around(edges):
    """The knots around each edge, and how much of it the upper one has; beyond the outermost, that one twice."""
    above = (edges[..., None] > _KNOTS).sum(axis=-1)
    low, high = jnp.maximum(above - 1, 0), jnp.minimum(above, len(_KNOTS) - 1)
    first, knots = jnp.asarray(_KNOTS)[low], jnp.asarray(_KNOTS)
    return low, high, jnp.where(low < high, (edges - first) / (knots[high] - first + 1e-9), 0.0)


def along_paths(tree: Tree, edges: Float[Array, "B N"], depth: int) -> Float[Array, "B N"]:
    """The product of the edges from the root to each node, never above its parent's; 1 at roots, 0 at padding.

    Args:
      tree: B trees.
      edges: a number in [0, 1] for each node but the roots.
      depth: static; no node is deeper.
    """
    inner, above = tree.parents >= 0, jnp.maximum(tree.parents, 0)
    paths = jnp.ones_like(edges)
    for _ in range(depth):
        paths = jnp.where(inner, take(paths, above) * edges, 1.0)
    return jnp.where(tree.live, paths, 0.0)


def standing(
    tree: Tree, said: Int[Array, "B P"], counts: Int[Array, " B"]
) -> tuple[Bool[Array, "B N"], Bool[Array, "B N"]]:
    """The nodes that stand in the target's text, roots included; and those of which it is known whether they do.

    Args:
      tree: as it was drafted.
      said: the tokens after the root.
      counts: how many; what stands beyond changes nothing.
    """
    place = jnp.minimum(jnp.maximum(tree.depths - 1, 0), said.shape[1] - 1)
    within = (tree.parents >= 0) & (tree.depths <= counts[:, None])
    stands = tree.live & ((tree.parents < 0) | (within & (tree.tokens == take(said, place))))
    stands = reached(tree, stands)
    return stands, within & take(stands, jnp.maximum(tree.parents, 0))


def learn(
    calibration: Calibration,
    tree: Tree,
    said: Int[Array, "B P"],
    counts: Int[Array, " B"],
    counted: Bool[Array, " B"],
) -> Calibration:
    """Counts the edges that what the target said decides: those below nodes that stand in its text.

    So of a drafted tree the nodes that were not verified count as well, and what is chosen to be verified is no bias.

    Args:
      calibration: so far.
      tree: see ``standing``.
      said: likewise.
      counts: likewise.
      counted: rows that are not, change nothing.
    """
    stands, known = standing(tree, said, counts)
    edges = edge_values(tree)
    known &= (edges > 0) & counted[:, None]
    low, high, part = _around(edges)
    source, row = tree.source, depth_bin(tree.depths)
    row = jnp.where(known, row, calibration.tried.shape[1])  # beyond: dropped

    def count(which):
        empty = jnp.zeros_like(calibration.tried)
        counts = empty.at[source, row, low].add(which * (1 - part), mode="drop")
        return counts.at[source, row, high].add(which * part, mode="drop")

    tried = calibration.tried + count(known)
    hit = calibration.hit + count(known & stands)
    scale = jnp.minimum(1.0, KEPT / jnp.maximum(tried, 1.0))
    return Calibration(tried * scale, hit * scale)
