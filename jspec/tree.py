"""The one tree type of the project, and its primitives.

A :class:`Tree` holds a batch of draft trees in arrays of static shape: contents change from round
to round, shapes do not, so nothing recompiles. Every function here is pure, batched and jit-able,
breaks ties towards the lower index, and lets nothing that stands in padding (NaN, wild indices)
change its result. Two facts carry the code: a parent's index is lower than its child's, so the
first k nodes are a tree; and scores never increase along a path, so the best k nodes are one too.
"""

import dataclasses
import math
import typing

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

HEAD = 0
RETRIEVED = 1
SOURCES = ("head", "retrieved")  # their names, for reports


@typing.no_type_check  # JAX rebuilds pytrees with leaves that are not arrays of these shapes
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tree:
    """B draft trees of at most N nodes each, real nodes first, then padding.

    Attributes:
      tokens: i32[B, N]; node 0 is the root, the last known token. Padding: 0.
      parents: i32[B, N], each lower than its child; -1 for the root and for padding.
      depths: i32[B, N]; root 0. Padding: 0.
      scores: f32[B, N], the drafter's log-probability of the path from the root (root 0), never
        increasing along a path. Padding: -inf.
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
        """bool[B, N]: True for real nodes."""
        return jnp.arange(self.budget) < self.size[:, None]

    def draw(self, row=0, text=None, path=None):
        """One row as text for the terminal: :func:`jspec.picture.draw_text`."""
        from jspec.picture import draw_text

        return draw_text(self, row, text, path)

    def _repr_html_(self):
        from jspec.picture import draw_svg

        traced = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(self))
        return None if traced else draw_svg(self)


def root_only(roots: Int[Array, " B"], budget: int = 1) -> Tree:
    """Trees that are a root alone, padded to ``budget`` nodes."""
    zeros = jnp.zeros((roots.shape[0], budget), jnp.int32)
    tokens = zeros + roots[:, None]
    return canonical(Tree(tokens, zeros, zeros, zeros, zeros, jnp.ones_like(zeros[:, 0])))


# Ancestors, bits, positions.


def pack_bits(bits: Bool[Array, "*batch M"]) -> Int[Array, "*batch W"]:
    """Booleans as W = ceil(M / 32) i32 words; bit j is bit ``j % 32`` of word ``j // 32``."""
    padded = jnp.pad(bits, [(0, 0)] * (bits.ndim - 1) + [(0, -bits.shape[-1] % 32)])
    lanes = padded.reshape(*bits.shape[:-1], -1, 32).astype(jnp.uint32)
    words = jnp.sum(lanes << jnp.arange(32, dtype=jnp.uint32), axis=-1, dtype=jnp.uint32)
    return lax.bitcast_convert_type(words, jnp.int32)


def unpack_bits(words: Int[Array, "*batch W"], count: int) -> Bool[Array, "*batch M"]:
    """The first M = ``count`` booleans that :func:`pack_bits` packed."""
    bits = (words[..., None] >> jnp.arange(32, dtype=jnp.int32)) & 1
    return bits.reshape(*words.shape[:-1], -1)[..., :count].astype(bool)


def visibility(tree: Tree) -> Int[Array, "B N W"]:
    """:func:`ancestors` as packed bits: the nodes each node attends to, W = ceil(N / 32)."""
    words = pack_bits(jnp.eye(tree.budget, dtype=bool) & tree.live[:, :, None])

    def step(_, carry):
        words, jump = carry
        return words | take(words, jump[:, :, None]), take(jump, jump)

    # A loop, since XLA would compute unrolled steps anew for every use: 2 to the power of their number.
    steps = (tree.budget - 1).bit_length()
    words, _ = lax.fori_loop(0, steps, step, (words, _parent_or_self(tree)))
    return words


def ancestors(tree: Tree) -> Bool[Array, "B N N"]:
    """At [b, i, j]: is j an ancestor of i, or i itself? Padding rows are all False."""
    return unpack_bits(visibility(tree), tree.budget)


def positions(tree: Tree, lengths: Int[Array, " B"]) -> Int[Array, "B N"]:
    """Position of each node: ``lengths`` (cached tokens) + depth. Padding stands at ``lengths``."""
    return lengths[:, None] + jnp.where(tree.live, tree.depths, 0)


# Fewer nodes.


def reached(tree: Tree, ok: Bool[Array, "B N"]) -> Bool[Array, "B N"]:
    """The nodes that are ok themselves, and all above them too."""
    for jump in _jumps(_parent_or_self(tree), tree.budget - 1):
        ok &= take(ok, jump)
    return ok


def compact(tree: Tree, keep: Bool[Array, "B N"], budget: int | None = None) -> Tree:
    """Drops the nodes that are not kept, with all their descendants; renumbers the rest in order.

    Args:
      tree: B trees of N nodes.
      keep: the nodes to keep; without its root a tree becomes empty.
      budget: node axis of the result (default N); what does not fit is dropped from the end.
    """
    budget = tree.budget if budget is None else budget
    parents, kept = _parent_or_self(tree), reached(tree, keep & tree.live)
    rank = jnp.cumsum(kept, axis=1, dtype=jnp.int32) - 1  # a kept node's new index
    return _reorder(tree, take(rank, parents), kept, rank, budget)


def select(tree: Tree, budget: int, depth_penalty: int | float | Float[Array, ""] = 0.0) -> Tree:
    """The best ``budget`` nodes by ``score - depth_penalty * depth``, root included, in order.

    This key never increases along a path and ties go to the lower index, so ancestors come along.

    Raises:
      ValueError: ``depth_penalty``, where it is a Python number, is negative or not finite.
    """
    if isinstance(depth_penalty, int | float) and not 0 <= depth_penalty < math.inf:
        raise ValueError(f"depth_penalty must be finite and >= 0, got {depth_penalty}")
    keep = tree.live
    if budget < tree.budget:
        key = jnp.where(keep, tree.scores - depth_penalty * tree.depths, -jnp.inf)
        keep &= ranks(key) < budget
    return compact(tree, keep, budget)


def ranks(keys: Float[Array, "B N"]) -> Int[Array, "B N"]:
    """How many entries of a row come before each: higher ones, and equal ones of lower index."""
    slot = jnp.arange(keys.shape[1])
    before = (keys[:, :, None] > keys[:, None, :]) | (_equal(keys) & (slot[:, None] < slot))
    return jnp.sum(before, axis=1, dtype=jnp.int32)


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
    order: Float[Array, "B M"] | None = None,
) -> Tree:
    """A tree from candidates in any order: merged, sorted, and :func:`select`-ed to ``budget``.

    Candidates with the same token under the same parent become one node, transitively, with the
    highest of their scores and that candidate's source (ties: lower index). Nodes are ordered by
    depth, then by their first candidate's index. Scores are clamped to the parent's. A candidate
    is dropped when it is not valid, its score is NaN or -inf, its parent is out of range or
    dropped, or it is in a cycle or deeper than ``depth``.

    Args:
      roots: tokens of the roots.
      parents: index of each candidate's parent in this list, -1 for the root.
      tokens: the candidates' tokens.
      scores: log-probabilities of their paths.
      source: who proposed them.
      valid: False for padding.
      budget: node axis of the result, root included.
      depth: the deepest node kept (default M); the cost grows with its logarithm.
      order: finite; stands in for the scores wherever candidates are compared, clamped as those are.
    """
    batch, listed = parents.shape
    depth = listed if depth is None else depth
    count = listed + 2  # element 0: the root; the last: a sink that dropped candidates point to

    def around(first, middle, last):
        first, last = (jnp.broadcast_to(x, batch).astype(middle.dtype) for x in (first, last))
        return jnp.concatenate([first[:, None], middle, last[:, None]], axis=1)

    ok = valid & (parents >= -1) & (parents < listed) & (scores > -jnp.inf)
    parents = around(0, jnp.where(ok, parents + 1, count - 1).astype(jnp.int32), count - 1)
    tokens = around(roots, tokens, 0)
    order = scores if order is None else order
    keys, scores = (around(0, x.astype(jnp.float32), -jnp.inf) for x in (order, scores))
    source = around(0, source, 0)
    ids = jnp.broadcast_to(jnp.arange(count, dtype=jnp.int32), (batch, count))

    # Label each element with the first one whose last 2^r tokens of path are the same, for r = 0,
    # 1, ... What is kept reaches the root within those tokens, and what is in a cycle or below the
    # sink does not, so in the end equal labels of kept elements are equal paths.
    reached = ids == 0
    depths = jnp.where(reached, 0, 1)
    label = _first(_equal(tokens) & _equal(reached))
    jumps = _jumps(parents, depth)
    for jump in jumps:
        label = _first(_equal(label) & _equal(take(label, jump)))
        reached |= take(reached, jump)
        depths += take(depths, jump)
    node = reached & (depths <= depth) & (label == ids)

    same = _equal(label)
    best = jnp.max(jnp.where(same, keys[:, :, None], -jnp.inf), axis=1)
    first = _first(same & (keys[:, :, None] == best[:, None, :]))
    scores, source = take(scores, first), take(source, first)
    for jump in jumps:
        scores = jnp.minimum(scores, take(scores, jump))
        best = jnp.minimum(best, take(best, jump))

    place = jnp.where(node, depths * count + ids, jnp.iinfo(jnp.int32).max)
    rank = jnp.sum(place[:, :, None] < place[:, None, :], axis=1, dtype=jnp.int32)
    parents = take(rank, take(label, parents))

    def sort(values):
        unsorted = Tree(tokens, parents, depths, values, source, None)
        return _reorder(unsorted, parents, node, rank, listed + 1)

    return compact(sort(scores), ranks(sort(best).scores) < budget, budget)


def from_paths(
    roots: Int[Array, " B"],
    paths: Int[Array, "B R D"],
    lengths: Int[Array, "B R"],
    scores: Float[Array, "B R D"],
    source: int | Int[Array, "..."],
    budget: int,
) -> Tree:
    """R continuations of at most D tokens as a trie; where scores tie, earlier rows win.

    Args:
      roots: tokens of the roots.
      paths: tokens of the continuations.
      lengths: how many tokens of each continuation count.
      scores: log-probability of the path up to each token.
      source: who proposed them; broadcast to [B, R, D].
      budget: node axis of the result, root included.
    """
    batch, rows, depth = paths.shape
    column = jnp.arange(depth, dtype=jnp.int32)
    parents = jnp.where(column == 0, -1, jnp.arange(rows)[:, None] * depth + column - 1)
    valid = column < lengths[:, :, None]
    lists = (parents, paths, scores, jnp.asarray(source, jnp.int8), valid)
    flat = (jnp.broadcast_to(x, paths.shape).reshape(batch, -1) for x in lists)
    return assemble(roots, *flat, budget, depth)


def merge(a: Tree, b: Tree, budget: int) -> Tree:
    """The union of two trees on the same roots, :func:`select`-ed to ``budget``; a's nodes first.

    Where one tree is empty, the result is the other one.
    """
    parents = (  # node j of a is candidate j - 1, node j of b comes after all of those
        jnp.where(a.parents > 0, a.parents - 1, -1),
        jnp.where(b.parents > 0, b.parents + a.budget - 2, -1),
    )
    names = ("tokens", "scores", "source", "live")
    pairs = [parents] + [(getattr(a, name), getattr(b, name)) for name in names]
    lists = (jnp.concatenate([x[:, 1:], y[:, 1:]], axis=1) for x, y in pairs)
    roots = jnp.where(a.size > 0, a.tokens[:, 0], b.tokens[:, 0])
    tree = assemble(roots, *lists, budget, max(a.budget, b.budget) - 1)
    size = jnp.where((a.size > 0) | (b.size > 0), tree.size, 0)
    return canonical(dataclasses.replace(tree, size=size))


# For builders of one's own.


def check(tree: Tree) -> None:
    """Checks on the host all that a Tree promises, unique siblings and canonical padding included.

    Raises:
      ValueError: naming the field, or the row and the node, and what is wrong there.
    """
    if np.ndim(tree.tokens) != 2 or tree.budget < 1:
        raise ValueError(f"tokens must be i32[B, N] with N >= 1, got {np.shape(tree.tokens)}")
    for field in dataclasses.fields(tree):
        x = getattr(tree, field.name)
        dtype = {"scores": "float32", "source": "int8"}.get(field.name, "int32")
        shape = tree.tokens.shape[: 1 if field.name == "size" else 2]
        if x.dtype != dtype or x.shape != shape:
            raise ValueError(f"{field.name} must be {dtype}{shape}, got {x.dtype}{x.shape}")
    rows = zip(*(np.asarray(x).tolist() for x in jax.tree.leaves(tree)))
    for row, (*fields, size) in enumerate(rows):
        if not 0 <= size <= tree.budget:
            raise ValueError(f"row {row}: size must be from 0 to {tree.budget}, got {size}")
        nodes = list(zip(*fields))
        for i, node in enumerate(nodes):
            if wrong := _padding_fault(node) if i >= size else _node_fault(nodes[: i + 1]):
                raise ValueError(f"row {row}, node {i}: {wrong}")


def _padding_fault(node):
    blank = (0, -1, 0, -math.inf, 0)
    return None if node == blank else f"padding must be {blank}, got {node}"


def _node_fault(nodes):
    """What is wrong with the last of these nodes, or None."""
    *before, (token, parent, depth, score, source) = nodes
    if token < 0 or source < 0:
        return f"token {token} and source {source} must not be negative"
    if not before:
        root = (parent, depth, score)
        return (
            None if root == (-1, 0, 0) else f"parent, depth, score of a root: -1, 0, 0, not {root}"
        )
    if not 0 <= parent < len(before):
        return f"parent {parent} is not an earlier node"
    if depth != before[parent][2] + 1:
        return f"depth {depth} is not one more than its parent's {before[parent][2]}"
    if not -math.inf < score <= before[parent][3]:
        return f"score {score} is not finite or above its parent's {before[parent][3]}"
    if any(other[:2] == (token, parent) for other in before[1:]):
        return f"token {token} is already a child of node {parent}"
    return None


# Helpers. Indices are in bounds by construction: what stands in padding never becomes one.


def take(x: Array, index: Int[Array, "B M *rest"]) -> Array:
    """``x[b, index[b, i]]`` at [b, i]."""
    return jnp.take_along_axis(x, index, axis=1, mode="promise_in_bounds")


def _equal(x):
    """bool[B, n, n]: which pairs are equal."""
    return x[:, :, None] == x[:, None, :]


def _first(pairs):
    """i32[B, n]: for each i the lowest j where bool[B, n, n] is True at [j, i]; else n - 1."""
    last = pairs.shape[1] - 1
    return jnp.min(jnp.where(pairs, jnp.arange(last + 1, dtype=jnp.int32)[:, None], last), axis=1)


def _parent_or_self(tree):
    """Parents as safe indices: a root and padding point to themselves."""
    ids = jnp.arange(tree.budget, dtype=jnp.int32)
    return jnp.where(tree.live, jnp.maximum(tree.parents, 0), ids)


def _jumps(parents, depth):
    """The ancestors 1, 2, 4, ... steps up; to follow all of these is at least ``depth`` steps."""
    jumps = []
    for _ in range(depth.bit_length()):
        jumps.append(parents)
        parents = take(parents, parents)
    return jumps


def _reorder(tree, parents, kept, rank, budget):
    """The kept nodes, sorted by rank (0, 1, ...), with these parents."""
    ids = jnp.arange(rank.shape[1], dtype=jnp.int32)
    target = jnp.where(kept, rank, budget)
    blank = jnp.zeros(budget, jnp.int32)
    order = jax.vmap(lambda target: blank.at[target].set(ids, mode="drop"))(target)
    fields = (tree.tokens, parents, tree.depths, tree.scores, tree.source)
    size = jnp.minimum(jnp.sum(kept, axis=1, dtype=jnp.int32), budget)
    return canonical(Tree(*(take(x, order) for x in fields), size))


def canonical(tree: Tree) -> Tree:
    """The tree with the types, the root's parent and the padding as they must be."""
    slot = jnp.arange(tree.budget)
    live = tree.live
    return Tree(
        jnp.where(live, tree.tokens, 0).astype(jnp.int32),
        jnp.where(live & (slot > 0), tree.parents, -1).astype(jnp.int32),
        jnp.where(live, tree.depths, 0).astype(jnp.int32),
        jnp.where(live, tree.scores, -jnp.inf).astype(jnp.float32),
        jnp.where(live, tree.source, 0).astype(jnp.int8),
        tree.size,
    )
