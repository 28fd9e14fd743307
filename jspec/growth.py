"""Growing trees level by level, for drafters that read a level before they draft the next."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jspec.tree import Tree, compact, root_only, take


class Frontier(NamedTuple):
    """The q nodes that :func:`grow` expands next, best first; an invalid slot is zeros and -inf."""

    tokens: Int[Array, "B q"]
    nodes: Int[Array, "B q"]  # ids in the tree being built, which is compacted only at the end
    slots: Int[Array, "B q"]  # the parents' slots in the frontier before; 0 at the root
    depths: Int[Array, "B q"]
    scores: Float[Array, "B q"]
    valid: Bool[Array, "B q"]


def grow(
    expand: Callable[[Any, Frontier], tuple[tuple[Array, Array], Any]],
    carry: Any,
    roots: Int[Array, " B"],
    depth: int,
    width: int,
    keep: int,
    keep_growing: Callable[[Array, Array], Array] | None = None,
    limits: Sequence[int] | None = None,
) -> tuple[Tree, Any]:
    """Grows trees level by level, as a ``lax.scan``, or a ``lax.while_loop`` with ``keep_growing``.

    The best ``keep`` candidates of a level become nodes; the best ``width`` of those are the next
    frontier (ties: lower slot, then lower candidate). The budget is ``1 + depth * keep``.

    Args:
      expand: ``expand(carry, frontier) -> (tokens i32[B, q, W], logps f32[B, q, W]), carry``: W
        candidate children of each frontier node and their edges' log-probabilities (NaN or -inf:
        no candidate; a positive one counts as 0). The frontier has q = ``width`` slots at every
        level; at the first one only slot 0, the root, is valid.
      carry: any pytree.
      roots: tokens of the roots.
      depth: levels below the root.
      width: slots of the frontier.
      keep: nodes recorded a level, at most q * W.
      keep_growing: ``keep_growing(level i32[], scores f32[B, q]) -> bool[B]``, asked before each
        level (0 expands the root) with the frontier's scores. A row that stops has an invalid
        frontier from then on; ``expand`` is not called where no row grows.
      limits: of each level, how many of the ``keep`` it keeps, at most; default: all.

    Returns:
      The trees and the last carry.

    Raises:
      ValueError: ``keep`` is not from 1 to q * W, or there are not as many ``limits`` as levels.
    """
    if limits is not None and len(limits) != depth:
        raise ValueError(f"limits must be one for each of {depth} levels, got {len(limits)}")

    def step(state):
        level, frontier, nodes, carry = state
        (tokens, logps), carry = expand(carry, frontier)
        batch, _, fan = tokens.shape
        if not 1 <= keep <= width * fan:
            most = f"width * candidates = {width * fan}"
            raise ValueError(f"keep must be from 1 to {most}, got {keep}")
        edges = jnp.where(logps > -jnp.inf, jnp.minimum(logps.astype(jnp.float32), 0), -jnp.inf)
        paths = frontier.scores[:, :, None] + edges
        scores, best = lax.top_k(paths.reshape(batch, -1), keep)
        if limits is not None:
            scores = jnp.where(jnp.arange(keep) < jnp.asarray(limits)[level], scores, -jnp.inf)
        slots = best // fan
        tokens = take(tokens.reshape(batch, -1).astype(jnp.int32), best)
        new = (tokens, take(frontier.nodes, slots), scores)
        start = 1 + level * keep
        nodes = [lax.dynamic_update_slice_in_dim(x, y, start, 1) for x, y in zip(nodes, new)]
        ids = jnp.broadcast_to(start + jnp.arange(keep, dtype=jnp.int32), best.shape)
        return level + 1, advance(level + 1, tokens, ids, slots, scores), nodes, carry

    def advance(level, tokens, nodes, slots, scores):
        def fit(x, fill):
            room = max(0, width - x.shape[1])
            return jnp.pad(x[:, :width], [(0, 0), (0, room)], constant_values=fill)

        scores = fit(scores, -jnp.inf)
        if keep_growing is not None:
            scores = jnp.where(keep_growing(level, scores)[:, None], scores, -jnp.inf)
        valid = scores > -jnp.inf
        fields = (fit(tokens, 0), fit(nodes, 0), fit(slots, 0), level)
        return Frontier(*(jnp.where(valid, x, 0) for x in fields), scores, valid)

    if depth == 0:
        return root_only(roots), carry
    tree = root_only(roots, 1 + depth * keep)
    level, zero = jnp.int32(0), jnp.zeros_like(tree.tokens[:, :1])
    frontier = advance(level, tree.tokens[:, :1], zero, zero, tree.scores[:, :1])
    state = level, frontier, [tree.tokens, tree.parents, tree.scores], carry
    if keep_growing is None:
        state, _ = lax.scan(lambda state, _: (step(state), None), state, length=depth)
    else:
        state = lax.while_loop(lambda s: (s[0] < depth) & jnp.any(s[1].valid), step, state)
    _, _, (tokens, parents, scores), carry = state
    depths = jnp.broadcast_to((jnp.arange(tree.budget) + keep - 1) // keep, tokens.shape)
    full = jnp.full_like(tree.size, tree.budget)
    grown = Tree(tokens, parents, depths, scores, tree.source, full)
    return compact(grown, scores > -jnp.inf), carry


def best_paths(tree: Tree, depth: int) -> Float[Array, "B D"]:
    """The log-probability of the likeliest path to each depth from 1 to D; -inf where there is none."""
    wanted = jnp.arange(1, depth + 1)
    there = tree.live[:, :, None] & (tree.depths[:, :, None] == wanted)
    return jnp.max(jnp.where(there, tree.scores[:, :, None], -jnp.inf), axis=1, initial=-jnp.inf)
