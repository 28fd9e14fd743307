"""The one tree type of the project, and its primitives.

A :class:`Tree` holds a batch of draft trees in arrays of static shape: contents change from round to round, shapes
do not, so nothing recompiles. Every function here is pure, batched and jit-able, breaks ties towards the lower index,
and reads nothing from padding (which may hold NaN or wild indices). Two facts carry the code:

* a parent's index is smaller than its child's, so any prefix of the nodes is a tree, and
* scores never increase along a path, so the best-scored nodes are a tree too.
"""

import dataclasses
import math
import typing
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

HEAD = 0
RETRIEVED = 1
SOURCES = ("head", "retrieved")  # names of the source codes, for reports


@typing.no_type_check  # JAX rebuilds pytrees with leaves that are not arrays (shapes, vmapped tracers)
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tree:
    """A batch of B draft trees with at most N nodes each; real nodes first, then padding.

    Attributes:
      tokens: i32[B, N]; node 0 is the root, the last known token. Padding: 0.
      parents: i32[B, N], each below its child's index; -1 for the root and for padding.
      depths: i32[B, N]; root 0. Padding: 0.
      scores: f32[B, N], log-probability of the path from the root under the drafter, never increasing along a path;
        root 0. Padding: -inf.
      source: i8[B, N], who proposed the node: ``HEAD``, ``RETRIEVED``. Padding: 0.
      size: i32[B], number of real nodes; 0 is a finished row that has not even a root.
    """

    tokens: Int[Array, "B N"]
    parents: Int[Array, "B N"]
    depths: Int[Array, "B N"]
    scores: Float[Array, "B N"]
    source: Int[Array, "B N"]
    size: Int[Array, " B"]

    @property
    def batch(self):
        """B, the number of trees."""
        return self.tokens.shape[0]

    @property
    def budget(self):
        """N, the most nodes a tree can have, root included."""
        return self.tokens.shape[1]

    @property
    def live(self):
        """bool[B, N], True for real nodes."""
        return jnp.arange(self.budget) < self.size[:, None]

    def draw(self, row=0, text=None, path=None):
        """The tree of one row as text; see :func:`jspec.picture.draw_text`."""
        from jspec.picture import draw_text

        return draw_text(self, row, text, path)

    def _repr_html_(self):
        from jspec.picture import draw_svg

        concrete = not any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(self))
        return draw_svg(self) if concrete else None


class Frontier(NamedTuple):
    """The q nodes that :func:`grow` asks ``expand`` to expand, best first; invalid slots hold zeros and score -inf."""

    tokens: Int[Array, "B q"]
    nodes: Int[Array, "B q"]  # ids in the tree being built (before it is compacted)
    slots: Int[Array, "B q"]  # the parent's slot in the frontier before; 0 at the root
    depths: Int[Array, "B q"]
    scores: Float[Array, "B q"]
    valid: Bool[Array, "B q"]


def root_only(roots: Int[Array, " B"], budget: int = 1) -> Tree:
    """Trees of one node each, padded to ``budget`` nodes."""
    shape = (roots.shape[0], budget)
    tokens = jnp.broadcast_to(roots[:, None].astype(jnp.int32), shape)
    zeros = jnp.zeros(shape, jnp.int32)
    size = jnp.ones(shape[0], jnp.int32)
    return _canonical(tokens, zeros, zeros, zeros, zeros, size)


# Ancestors, bits, positions.


def pack_bits(bits: Bool[Array, "*batch M"]) -> Int[Array, "*batch W"]:
    """Packs booleans into W = ceil(M / 32) i32 words: bit j is bit ``j % 32`` of word ``j // 32``."""
    padded = jnp.pad(bits, [(0, 0)] * (bits.ndim - 1) + [(0, -bits.shape[-1] % 32)])
    lanes = padded.reshape(*bits.shape[:-1], -1, 32).astype(jnp.uint32)
    words = jnp.sum(lanes << jnp.arange(32, dtype=jnp.uint32), axis=-1, dtype=jnp.uint32)
    return lax.bitcast_convert_type(words, jnp.int32)


def unpack_bits(words: Int[Array, "*batch W"], count: int) -> Bool[Array, "*batch M"]:
    """The first ``count`` booleans that :func:`pack_bits` packed."""
    bits = (words[..., None] >> jnp.arange(32, dtype=jnp.int32)) & 1
    return bits.reshape(*words.shape[:-1], -1)[..., :count].astype(bool)


def visibility(tree: Tree) -> Int[Array, "B N W"]:
    """:func:`ancestors` as packed bits i32[B, N, ceil(N / 32)]: the rows each node attends to."""
    words = pack_bits(jnp.eye(tree.budget, dtype=bool) & tree.live[:, :, None])
    for jump in _jumps(_parent_or_self(tree), tree.budget - 1):
        words |= _take(words, jump[:, :, None])
    return words


def ancestors(tree: Tree) -> Bool[Array, "B N N"]:
    """Whether node j is an ancestor of node i, or i itself, at ``[b, i, j]``. Padding rows are all False."""
    return unpack_bits(visibility(tree), tree.budget)


def positions(tree: Tree, lengths: Int[Array, " B"]) -> Int[Array, "B N"]:
    """Position of each node: ``lengths`` (cached tokens) + depth. Padding stands at ``lengths``."""
    return lengths[:, None] + jnp.where(tree.live, tree.depths, 0)


# Fewer nodes.


def compact(tree: Tree, keep: Bool[Array, "B N"], budget: int | None = None) -> Tree:
    """Drops the nodes that are not kept, with all their descendants; renumbers the rest in order.

    Args:
      tree: B trees of N nodes.
      keep: the nodes to keep; without its root a tree becomes empty.
      budget: node axis of the result (default N); what does not fit is dropped from the end.
    """
    budget = tree.budget if budget is None else budget
    parents = _parent_or_self(tree)
    kept = keep & tree.live
    for jump in _jumps(parents, tree.budget - 1):
        kept &= _take(kept, jump)
    rank = jnp.cumsum(kept, axis=1, dtype=jnp.int32) - 1  # a kept node's new index
    order = _invert(rank, kept, budget)
    fields = (tree.tokens, _take(rank, parents), tree.depths, tree.scores, tree.source)
    size = jnp.minimum(rank[:, -1] + 1, budget)
    return _canonical(*(_take(x, order) for x in fields), size)


def select(tree: Tree, budget: int, depth_penalty: float | Float[Array, ""] = 0.0) -> Tree:
    """The best ``budget`` nodes by ``score - depth_penalty * depth``, root included, in their order.

    The key never increases along a path and ties go to the lower index, so with a node come its ancestors.

    Raises:
      ValueError: ``depth_penalty`` is negative or not finite (looked at where it is a Python number).
    """
    if isinstance(depth_penalty, int | float) and not 0 <= depth_penalty < math.inf:
        raise ValueError(f"depth_penalty must be finite and >= 0, got {depth_penalty}")
    keep = tree.live
    if budget < tree.budget:
        key = jnp.where(keep, tree.scores - depth_penalty * tree.depths, -jnp.inf)
        slot = jnp.arange(tree.budget)
        better = (key[:, :, None] > key[:, None, :]) | _equal(key) & (slot[:, None] < slot)
        keep &= jnp.sum(better, axis=1) < budget
    return compact(tree, keep, budget)


# From candidates to trees.


def assemble(
    roots: Int[Array, " B"],
    parents: Int[Array, "B M"],
    tokens: Int[Array, "B M"],
    scores: Float[Array, "B M"],
    source: Int[Array, "B M"],
    valid: Bool[Array, "B M"],
    budget: int,
    depth: int | None = None,
) -> Tree:
    """A tree from candidates in any order: merged, sorted, and :func:`select`-ed to ``budget``.

    Candidates with the same token under the same parent become one node, transitively, with the highest of their
    scores and that candidate's source (ties: lower index). Nodes are ordered by depth, then by the index of their
    first candidate. Scores are clamped to the parent's. A candidate is dropped when it is not valid, its score is
    NaN or -inf, its parent is out of range or dropped, or it is in a cycle or deeper than ``depth``.

    Args:
      roots: tokens of the roots.
      parents: index of each candidate's parent in this list, -1 for the root.
      tokens: the candidates' tokens.
      scores: log-probabilities of their paths.
      source: who proposed them.
      valid: False for padding.
      budget: node axis of the result, root included.
      depth: the deepest node kept (default M); the cost grows with its logarithm.
    """
    batch, listed = parents.shape
    depth = listed if depth is None else depth
    count = (
        listed + 2
    )  # element 0 is the root, then the candidates, last a sink for what must not be reached

    def around(first, middle, last):
        column = lambda x: jnp.broadcast_to(x, batch)[:, None].astype(middle.dtype)
        return jnp.concatenate([column(first), middle, column(last)], axis=1)

    ok = valid & (parents >= -1) & (parents < listed) & (scores > -jnp.inf)
    parent = around(0, jnp.where(ok, parents.astype(jnp.int32) + 1, count - 1), count - 1)
    tokens = around(roots, tokens, 0)
    scores = around(0, scores.astype(jnp.float32), -jnp.inf)
    source = around(0, source, 0)
    ids = jnp.broadcast_to(jnp.arange(count, dtype=jnp.int32), (batch, count))

    # Label each element with the first one that has the same last 2^r tokens of path, r = 0, 1, ... All that is kept
    # reaches the root within those, and nothing else does, so in the end equal labels are equal paths.
    is_root = ids == 0
    label = _first(_equal(tokens) & _equal(is_root))
    reached = is_root
    depths = jnp.where(is_root, 0, 1)
    jumps = _jumps(parent, depth)
    for jump in jumps:
        label = _first(_equal(label) & _equal(_take(label, jump)))
        reached |= _take(reached, jump)
        depths += _take(depths, jump)
    node = reached & (depths <= depth) & (label == ids)

    same = _equal(label)
    best = jnp.max(jnp.where(same, scores[:, :, None], -jnp.inf), axis=1)
    source = _take(source, _first(same & (scores[:, :, None] == best[:, None, :])))
    for jump in jumps:
        best = jnp.minimum(best, _take(best, jump))

    key = jnp.where(node, depths * count + ids, jnp.iinfo(jnp.int32).max)
    rank = jnp.sum(key[:, :, None] < key[:, None, :], axis=1, dtype=jnp.int32)
    order = _invert(rank, node, listed + 1)
    fields = (tokens, _take(rank, _take(label, parent)), depths, best, source)
    tree = _canonical(*(_take(x, order) for x in fields), jnp.sum(node, axis=1, dtype=jnp.int32))
    return select(tree, budget)


def from_paths(
    roots: Int[Array, " B"],
    paths: Int[Array, "B R D"],
    lengths: Int[Array, "B R"],
    scores: Float[Array, "B R D"],
    source: int | Int[Array, "B R D"],
    budget: int,
) -> Tree:
    """R continuations of at most D tokens as a trie; shared prefixes become one, earlier rows win ties.

    Args:
      roots: tokens of the roots.
      paths: tokens of the continuations.
      lengths: how many tokens of each row count.
      scores: log-probability of the path up to each token.
      source: who proposed them.
      budget: node axis of the result, root included.
    """
    batch, _, depth = paths.shape
    column = jnp.arange(depth, dtype=jnp.int32)
    flat = lambda x: jnp.broadcast_to(x, paths.shape).reshape(batch, -1)
    parents = jnp.where(
        column == 0, -1, jnp.arange(paths[0].size, dtype=jnp.int32).reshape(paths.shape[1:]) - 1
    )
    source = jnp.asarray(source, jnp.int8)
    valid = column < lengths[:, :, None]
    return assemble(roots, *map(flat, (parents, paths, scores, source, valid)), budget, depth)


def merge(a: Tree, b: Tree, budget: int) -> Tree:
    """The union of two trees on the same roots, :func:`select`-ed to ``budget``; a's nodes come first.

    Where one tree is empty the result is the other one.
    """
    roots = jnp.where(a.size > 0, a.tokens[:, 0], b.tokens[:, 0])
    shift = (
        jnp.where(a.parents > 0, a.parents - 1, -1),
        jnp.where(b.parents > 0, b.parents + a.budget - 2, -1),
    )
    join = lambda x, y: jnp.concatenate([x[:, 1:], y[:, 1:]], axis=1)
    fields = (join(getattr(a, f), getattr(b, f)) for f in ("tokens", "scores", "source", "live"))
    depth = max(a.budget, b.budget) - 1
    tree = assemble(roots, join(*shift), *fields, budget, depth)
    return compact(tree, ((a.size > 0) | (b.size > 0))[:, None] & tree.live)


# Level by level.

Expand = Callable[[Any, Frontier], tuple[tuple[Array, Array], Any]]


def grow(
    expand: Expand,
    carry: Any,
    roots: Int[Array, " B"],
    depth: int,
    width: int,
    keep: int,
    keep_growing: Callable[[Array, Array], Array] | None = None,
) -> tuple[Tree, Any]:
    """Grows trees level by level.

    The best ``keep`` candidates of a level become nodes, and the best ``width`` of those the next frontier (ties:
    lower slot, then lower candidate). A tree of the result has at most ``1 + depth * keep`` nodes.

    Args:
      expand: ``expand(carry, frontier) -> (tokens i32[B, q, W], logps f32[B, q, W]), carry``: W candidate children of
        each frontier node and the log-probabilities of their edges (-inf or NaN: no candidate; positive counts as 0).
        The frontier has q = ``width`` slots at every level; at the first only slot 0, the root, is valid.
      carry: any pytree.
      roots: tokens of the roots.
      depth: levels below the root.
      width: slots of the frontier.
      keep: nodes recorded a level, at most q * W.
      keep_growing: ``keep_growing(level i32[], scores f32[B, q]) -> bool[B]``, asked before each level (level 0 is the
        root's) with the scores of the frontier to be expanded. A row that stops has an invalid frontier from then on;
        once no row grows, ``expand`` is not called any more.

    Returns:
      The trees, and the last carry.

    Raises:
      ValueError: ``keep`` is more than the candidates of a level.
    """

    def step(state):
        level, frontier, nodes, carry = state
        (tokens, logps), carry = expand(carry, frontier)
        batch, _, fan = tokens.shape
        if not 1 <= keep <= width * fan:
            raise ValueError(
                f"keep must be from 1 to width * candidates = {width * fan}, got {keep}"
            )
        edges = jnp.where(logps > -jnp.inf, jnp.minimum(logps.astype(jnp.float32), 0.0), -jnp.inf)
        paths = frontier.scores[:, :, None] + edges
        scores, best = lax.top_k(paths.reshape(batch, -1), keep)
        tokens = _take(tokens.reshape(batch, -1).astype(jnp.int32), best)
        slots = best // fan
        start = 1 + level * keep
        new = (tokens, _take(frontier.nodes, slots), scores)
        nodes = tuple(lax.dynamic_update_slice_in_dim(x, y, start, 1) for x, y in zip(nodes, new))
        ids = jnp.broadcast_to(start + jnp.arange(keep, dtype=jnp.int32), best.shape)
        frontier = _frontier(level + 1, width, tokens, ids, slots, scores, keep_growing)
        return level + 1, frontier, nodes, carry

    tree = root_only(roots, 1 + depth * keep)
    level, zero = jnp.int32(0), jnp.zeros_like(tree.tokens[:, :1])
    frontier = _frontier(
        level, width, tree.tokens[:, :1], zero, zero, zero.astype(jnp.float32), keep_growing
    )
    state = level, frontier, (tree.tokens, tree.parents, tree.scores), carry
    if keep_growing is None:
        state, _ = lax.scan(lambda state, _: (step(state), None), state, length=depth)
    else:
        state = lax.while_loop(
            lambda state: (state[0] < depth) & jnp.any(state[1].valid), step, state
        )
    _, _, (tokens, parents, scores), carry = state
    depths = jnp.broadcast_to(
        (jnp.arange(tree.budget, dtype=jnp.int32) + keep - 1) // keep, tokens.shape
    )
    full = jnp.full_like(tree.size, tree.budget)
    return compact(
        Tree(tokens, parents, depths, scores, tree.source, full), scores > -jnp.inf
    ), carry


def _frontier(level, width, tokens, nodes, slots, scores, keep_growing):
    """The first ``width`` of the nodes, those of rows that grow."""
    fit = lambda x, fill: jnp.pad(
        x[:, :width], [(0, 0), (0, max(0, width - x.shape[1]))], constant_values=fill
    )
    scores = fit(scores, -jnp.inf)
    if keep_growing is not None:
        scores = jnp.where(keep_growing(level, scores)[:, None], scores, -jnp.inf)
    valid = scores > -jnp.inf
    tokens, nodes, slots, depths = (
        jnp.where(valid, x, 0) for x in (fit(tokens, 0), fit(nodes, 0), fit(slots, 0), level)
    )
    return Frontier(tokens, nodes, slots, depths, scores, valid)


# Checking.


def check(tree: Tree) -> None:
    """Checks on the host all that a Tree promises, canonical padding and unique siblings included.

    Raises:
      ValueError: naming the row, the node and what is wrong with it.
    """
    arrays = {f.name: np.asarray(getattr(tree, f.name)) for f in dataclasses.fields(tree)}
    tokens = arrays["tokens"]
    if tokens.ndim != 2 or tokens.shape[1] < 1:
        raise ValueError(f"tokens must have shape [B, N] with N >= 1, got {tokens.shape}")
    dtypes = dict(
        tokens="int32",
        parents="int32",
        depths="int32",
        scores="float32",
        source="int8",
        size="int32",
    )
    for name, dtype in dtypes.items():
        shape = tokens.shape[:1] if name == "size" else tokens.shape
        if arrays[name].shape != shape or arrays[name].dtype != dtype:
            got = f"{arrays[name].dtype}{list(arrays[name].shape)}"
            raise ValueError(f"{name} must be {dtype}{list(shape)}, got {got}")
    for row in range(tokens.shape[0]):
        size = int(arrays["size"][row])
        if not 0 <= size <= tokens.shape[1]:
            raise ValueError(f"row {row}: size must be from 0 to {tokens.shape[1]}, got {size}")
        fields = [
            arrays[name][row].tolist()
            for name in ("tokens", "parents", "depths", "scores", "source")
        ]
        seen = set()
        for node, values in enumerate(zip(*fields)):
            if problem := _problem(node, size, values, fields, seen):
                raise ValueError(f"row {row}, node {node}: {problem}")


def _problem(node, size, values, fields, seen):
    """What is wrong with one node, or None."""
    token, parent, depth, score, source = values
    _, _, depths, scores, _ = fields
    if node >= size:
        return (
            None
            if values == (0, -1, 0, -float("inf"), 0)
            else f"padding is not canonical: {values}"
        )
    if token < 0:
        return f"token {token} is negative"
    if not 0 <= source < len(SOURCES):
        return f"source {source} is unknown"
    if node == 0:
        root = (parent, depth, score)
        return (
            None
            if root == (-1, 0, 0.0)
            else f"(parent, depth, score) must be (-1, 0, 0.0) at the root, not {root}"
        )
    if not 0 <= parent < node:
        return f"parent {parent} is not an earlier node"
    if depth != depths[parent] + 1:
        return f"depth {depth} does not follow its parent's {depths[parent]}"
    if not -float("inf") < score <= scores[parent]:
        return f"score {score} is not finite or above its parent's {scores[parent]}"
    if (parent, token) in seen:
        return f"token {token} is already a child of node {parent}"
    seen.add((parent, token))
    return None


# Helpers. Their indices are in bounds by construction: nothing from padding becomes an index.


def _take(x, index):
    """``x[b, index[b, i]]`` at [b, i]."""
    return jnp.take_along_axis(x, index, axis=1, mode="promise_in_bounds")


def _equal(x):
    return x[:, :, None] == x[:, None, :]


def _first(same):
    """For each column i of bool[B, n, n] the first row j that is True; n - 1 where there is none."""
    count = same.shape[1]
    return jnp.min(jnp.where(same, jnp.arange(count, dtype=jnp.int32)[:, None], count - 1), axis=1)


def _parent_or_self(tree):
    """Parent indices safe to gather with: a root and padding point to themselves."""
    return jnp.where(
        tree.live, jnp.maximum(tree.parents, 0), jnp.arange(tree.budget, dtype=jnp.int32)
    )


def _jumps(parents, depth):
    """The ancestors 1, 2, 4, ... steps up: following all of them leads ``depth`` steps up or more."""
    jumps = []
    for _ in range(depth.bit_length()):
        jumps.append(parents)
        parents = _take(parents, parents)
    return jumps


def _invert(rank, kept, budget):
    """i32[B, budget]: the kept element of each rank, 0 where there is none."""
    ids = jnp.arange(rank.shape[1], dtype=jnp.int32)
    put = lambda target: jnp.zeros(budget, jnp.int32).at[target].set(ids, mode="drop")
    return jax.vmap(put)(jnp.where(kept, rank, budget))


def _canonical(tokens, parents, depths, scores, source, size):
    """A Tree with the right dtypes, the root's fixed values, and canonical padding."""
    slot = jnp.arange(tokens.shape[1])
    live = slot < size[:, None]
    fill = lambda x, padding, dtype: jnp.where(live, x, padding).astype(dtype)
    return Tree(
        fill(tokens, 0, jnp.int32),
        fill(jnp.where(slot == 0, -1, parents), -1, jnp.int32),
        fill(depths, 0, jnp.int32),
        fill(scores, -jnp.inf, jnp.float32),
        fill(source, 0, jnp.int8),
        size,
    )
