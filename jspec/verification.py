"""Verify: one target forward over the live nodes of a batch of trees, packed into the smallest row bucket."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jspec.acceptance import accept
from jspec.attention import tree_attention
from jspec.method import Params
from jspec.models.transformer import forward, output_logits
from jspec.sampling import draw, position_noise, top_k
from jspec.state import DecodeState, Plan
from jspec.tree import Tree, positions, visibility


class Verified(NamedTuple):
    """What the target says of every node. Entries of padding are undefined."""

    tokens: Int[Array, "B N"]  # the target's draw after the node
    top_tokens: Int[Array, "B N k"]
    top_logits: Float[Array, "B N k"]  # raw
    taps: Float[Array, "B N T H"]
    # the accepted path's own rows, root first, one array a layer: not in the cache yet
    keys: tuple[Float[Array, "B P kh hd"], ...]
    values: tuple[Float[Array, "B P kh hd"], ...]


class Packing(NamedTuple):
    """Where the M rows of a forward stand in a batch of trees of at most Q live nodes each."""

    row: Int[Array, " M"]  # the tree
    node: Int[Array, " M"]  # the node
    at: Int[Array, "B Q"]  # the packed row of each node

    def pack(self, x: Array) -> Array:
        """``[B, Q or more, ...] -> [M, ...]``."""
        return x[0, : self.row.shape[0]] if self.at.shape[0] == 1 else x[self.row, self.node]

    def unpack(self, x: Array) -> Array:
        """``[M, ...] -> [B, Q, ...]``; entries that are not live hold other rows' values."""
        return x[None] if self.at.shape[0] == 1 else x[self.at]


def packing(size: Int[Array, " B"], nodes: int, rows: int) -> Packing:
    """Packs the first ``size[b]`` nodes of each tree, in order, into ``rows`` rows (at least their sum)."""
    start = jnp.cumsum(size) - size
    packed = jnp.arange(rows)
    row = jnp.clip(jnp.searchsorted(start, packed, side="right") - 1, 0, size.shape[0] - 1)
    node = jnp.clip(packed - start[row], 0, nodes - 1)
    at = jnp.clip(start[:, None] + jnp.arange(min(nodes, rows)), 0, rows - 1)
    return Packing(row, node, at)


def run_rows(
    plan: Plan,
    params: Params,
    state: DecodeState,
    tree: Tree,
    rows: int,
    drawing: bool = True,
    all_rows: bool = True,
) -> Verified:
    """The target over all live nodes in a forward of ``rows`` rows (static; at least the sum of sizes).

    ``drawing=False`` skips the draw (``tokens`` are zeros), and the output head where no top tokens are asked for.
    With ``all_rows`` the keys and values are all nodes', not the accepted path's.
    """
    needs, cache, target = plan.method.needs, state.cache, params["target"]
    rows = min(rows, tree.batch * tree.budget)  # trees may be narrower than the method's budget
    packs = packing(tree.size, tree.budget, rows)
    seen = packs.at.shape[1]
    visible = visibility(tree)[:, :seen, : math.ceil(seen / 32)]

    def attend(layer, q, k, v):
        out = tree_attention(
            packs.unpack(q),
            cache.keys[layer],
            cache.values[layer],
            cache.length,
            packs.unpack(k),
            packs.unpack(v),
            visible,
            implementation=plan.attention,
        )
        return packs.pack(out)

    at = packs.pack(positions(tree, cache.length))
    out = forward(plan.config, target, packs.pack(tree.tokens), at, attend, needs.taps)

    def spread(x):  # [M, ...] -> [B, N, ...]
        x = packs.unpack(x)
        return jnp.pad(x, [(0, 0), (0, tree.budget - seen)] + [(0, 0)] * (x.ndim - 2))

    tokens = jnp.zeros((rows,), jnp.int32)
    best = jnp.zeros((rows, 0)), jnp.zeros((rows, 0), jnp.int32)
    if drawing or needs.top_k:
        logits = output_logits(target, out.hidden)
        if needs.top_k:
            best = top_k(logits, needs.top_k)
        if drawing:
            tokens = draw(plan.sampling, logits, _noise(plan, state, tree, packs))
    tokens = spread(tokens)
    if all_rows:
        kept = spread
    else:
        # What is accepted is settled by the draw, so no more leaves the branch than the cache will take.
        path, _ = accept(tree, tokens, needs.depth)
        on_path = packs.at[jnp.arange(tree.batch)[:, None], jnp.clip(path, 0, seen - 1)]

        def kept(x):  # [M, ...] -> [B, P, ...]
            return x[on_path]

    return Verified(
        tokens=tokens,
        top_tokens=spread(best[1]),
        top_logits=spread(best[0]),
        taps=spread(out.taps),
        keys=tuple(map(kept, out.keys)),
        values=tuple(map(kept, out.values)),
    )


def _noise(
    plan: Plan, state: DecodeState, tree: Tree, packs: Packing
) -> Float[Array, "V M"] | None:
    """One noise vector a depth, since all nodes of a depth draw the token of the same position."""
    if plan.sampling.greedy:
        return None
    depths = min(plan.path, packs.at.shape[1])
    drawn_at = state.known[:, None] + jnp.arange(depths)
    noise = position_noise(state.key, state.rows.prompt, drawn_at, plan.config.vocab_size)
    depth = jnp.clip(packs.pack(tree.depths), 0, depths - 1)
    return noise[packs.row, depth].T


def verify(plan: Plan, params: Params, state: DecodeState, tree: Tree) -> Verified:
    """One target forward over the live nodes, in the smallest bucket of rows that holds them.

    Args:
      plan: static.
      params: ``params["target"]`` are the target's weights.
      state: gives the cached prefix, the seed and the positions.
      tree: at most ``plan.method.budget`` nodes a row; a row of size 0 costs nothing.
    """
    buckets = plan.row_buckets(tree.batch)
    branches = [
        lambda rows=rows: run_rows(plan, params, state, tree, rows, all_rows=False)
        for rows in buckets
    ]
    return jax.lax.switch(row_bucket(plan, state, tree), branches)


def row_bucket(plan: Plan, state: DecodeState, tree: Tree) -> Int[Array, ""]:
    """Index of the bucket that ``verify`` runs a batch of trees in."""
    rows = jnp.maximum(tree.size.sum(), state.least_rows)
    return jnp.searchsorted(jnp.asarray(plan.row_buckets(tree.batch)), rows)
