"""The builders against heaps in plain Python, on tables full of ties, duplicates and holes."""

import functools
import heapq
import itertools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jspec.growth import grow
from jspec.tables import best_first_tree, chain_tree, exact_tree
from jspec.tree import check, select

BUILDERS = (chain_tree, best_first_tree, exact_tree)
# (budget, depth D, candidates W): budgets of 1 and 2, wide and narrow tables, no depth at all.
SHAPES = [
    (1, 3, 4),
    (2, 3, 4),
    (5, 0, 3),
    (8, 7, 1),
    (16, 3, 2),
    (17, 5, 40),
    (64, 15, 12),
]
BATCH = 16
build = jax.jit(
    lambda builder, *table, budget: builder(*table, budget), static_argnames=("builder", "budget")
)


# Oracles: each row of a table as [(token, edge), ...], best first.


def cleaned(tokens, logps):
    rows = []
    for row in zip(tokens.tolist(), logps.tolist()):
        found = [(token, min(logp, 0.0)) for token, logp in zip(*row) if logp > -math.inf]
        best = {}
        for token, edge in sorted(found, key=lambda one: -one[1]):
            best.setdefault(token, edge)
        rows.append(list(best.items()))
    return rows


def add(score, edge):
    with np.errstate(over="ignore"):
        return float(np.float32(score) + np.float32(edge))


def children(nodes, at, rows):
    """The nodes that may stand under a node, best first."""
    _, _, depth, score, _ = nodes[at]
    below = rows[depth] if depth < len(rows) else []
    new = [(token, at, depth + 1, add(score, edge), 0) for token, edge in below]
    return [node for node in new if node[3] > -math.inf]


def chain(root, rows, budget):
    nodes = [(root, -1, 0, 0.0, 0)]
    while len(nodes) < budget and (below := children(nodes, len(nodes) - 1, rows)):
        nodes.append(below[0])
    return nodes


def best_first(root, rows, budget):
    nodes, heap = [(root, -1, 0, 0.0, 0)], [(0.0, 0)]
    while heap and len(nodes) < budget:
        _, at = heapq.heappop(heap)
        for child in children(nodes, at, rows)[: budget - len(nodes)]:
            heapq.heappush(heap, (-child[3], len(nodes)))
            nodes.append(child)
    return nodes


def exact(root, rows, budget):
    nodes, heap = [(root, -1, 0, 0.0, 0)], []

    def push(parent, rank):
        for child in children(nodes, parent, rows)[rank : rank + 1]:
            heapq.heappush(heap, (-child[3], child[2], parent, rank, child))

    push(0, 0)
    while heap and len(nodes) < budget:
        _, _, parent, rank, node = heapq.heappop(heap)
        nodes.append(node)
        push(parent, rank + 1)  # its next sibling
        push(len(nodes) - 1, 0)  # its first child
    return nodes


ORACLES = {chain_tree: chain, best_first_tree: best_first, exact_tree: exact}


def random_table(rng, depth, width, kind, batch=BATCH):
    """Tokens and log-probabilities: ``ties`` are sorted eighths, ``real`` sorted reals, ``wild`` is anything."""
    shape = (batch, depth, width)
    tokens = np.argsort(rng.random((*shape[:2], width + 3)), axis=-1)[..., :width]
    logps = -rng.integers(0, 5, shape) / 8 if kind == "ties" else -3 * rng.random(shape)
    logps = -np.sort(-logps, axis=-1)
    if kind == "wild":
        tokens = rng.integers(0, 2 + width // 2, shape)
        logps = rng.choice([-math.inf, math.nan, 0.5, 0.0, -0.25, -0.5, -1.0, -3e38], shape)
    return tokens.astype(np.int32), logps.astype(np.float32)


def expect(builder, tokens, logps, budget):
    roots = np.arange(len(tokens), dtype=np.int32)
    tree = build(builder, *map(jnp.asarray, (tokens, logps, roots)), budget=budget)
    check(tree)
    assert tree.budget == budget
    rows = oracles.rows_of(tree)
    for root, t, p, nodes in zip(roots.tolist(), tokens, logps, rows):
        assert nodes == ORACLES[builder](root, cleaned(t, p), budget)
    return tree


@pytest.mark.parametrize("builder", BUILDERS)
@pytest.mark.parametrize(("budget", "depth", "width"), SHAPES)
def test_equals_a_heap(builder, budget, depth, width):
    rng = np.random.default_rng(budget + depth)
    for kind in ("ties", "real", "wild"):
        for _ in range(3):
            tree = expect(builder, *random_table(rng, depth, width, kind), budget)
            if kind != "wild":
                most = {chain_tree: depth + 1}.get(builder, sum(width**d for d in range(depth + 1)))
                assert (np.asarray(tree.size) == min(budget, most)).all()


# One shape for all that follows: D = 3, W = 4, budget 12.


@st.composite
def tables(draw):
    edge = st.sampled_from([-math.inf, math.nan, 0.0, -0.125, -0.25, -1.0])
    cell = st.tuples(st.integers(0, 4), edge)
    cells = np.array(draw(st.lists(cell, min_size=12, max_size=12))).reshape(1, 3, 4, 2)
    return cells[..., 0].astype(np.int32), cells[..., 1].astype(np.float32)


@pytest.mark.parametrize("builder", BUILDERS)
@settings(max_examples=100, deadline=None)
@given(tables())
def test_any_table(builder, table):
    expect(builder, *table, 12)


@jax.jit
def grown(tokens, logps, roots):
    """The exact tree by growing every level in full."""

    def expand(level, frontier):
        rows = [jnp.broadcast_to(x[:, level, None], (1, 11, 4)) for x in (tokens, logps)]
        return tuple(rows), level + 1

    return select(grow(expand, jnp.int32(0), roots, 3, 11, 11)[0], 12)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from(["ties", "real"]))
def test_exact_trees_hold_the_best_of_all_nodes(seed, kind):
    tokens, logps = random_table(np.random.default_rng(seed), 3, 4, kind, batch=1)
    tree = expect(exact_tree, tokens, logps, 12)
    paths = [p for d in range(4) for p in itertools.product(*logps[0, :d].tolist())]
    sums = sorted((functools.reduce(add, path, 0.0) for path in paths), reverse=True)
    assert np.asarray(tree.scores[0]).tolist() == sums[:12]
    ours, theirs = (
        sorted(oracles.paths_of(oracles.rows_of(t)[0]))
        for t in (tree, grown(tokens, logps, tree.tokens[:, 0]))
    )
    assert ours == theirs


@pytest.mark.parametrize("builder", BUILDERS)
def test_a_certain_path_is_followed_to_its_end(builder):
    """Nodes of different depths tie there."""
    tokens = np.broadcast_to(np.arange(4, dtype=np.int32), (1, 3, 4))
    tree = expect(builder, tokens, np.where(tokens == 0, 0, -1).astype(np.float32), 12)
    assert np.asarray(tree.scores[0])[np.asarray(tree.depths[0]) == 3].max() == 0


@pytest.mark.parametrize("builder", BUILDERS)
def test_rows_are_independent(builder):
    table = random_table(np.random.default_rng(1), 15, 12, "wild")
    tree = expect(builder, *table, 64)
    roots = tree.tokens[:, 0]
    turned = build(builder, *(jnp.asarray(x[::-1]) for x in (*table, roots)), budget=64)
    chex.assert_trees_all_equal(tree, jax.tree.map(lambda x: x[::-1], turned))


@pytest.mark.parametrize("builder", BUILDERS)
def test_compiles_once(builder):
    chex.clear_trace_counter()
    step = jax.jit(chex.assert_max_traces(builder, n=1), static_argnums=3)
    for kind in ("ties", "wild", "real"):
        tokens, logps = random_table(np.random.default_rng(2), 3, 4, kind, 1)
        step(tokens, logps, np.array([1], np.int32), 12)


def test_zeros_of_either_sign_are_equal():
    tokens, logps = jnp.asarray([[[5, 6]]]), jnp.asarray([[[-0.0, 0.0]]])
    for builder in BUILDERS:
        tree = builder(tokens, logps, jnp.asarray([1]), 3)
        assert tree.tokens[0, 1] == 5


@pytest.mark.parametrize("builder", BUILDERS)
@pytest.mark.parametrize("budget", [0, -1, 10**6])
def test_a_budget_that_no_tree_has(builder, budget):
    table = jnp.zeros((1, 2, 3), jnp.int32), jnp.zeros((1, 2, 3)), jnp.zeros((1,), jnp.int32)
    with pytest.raises(ValueError, match="budget must be in 1"):
        builder(*table, budget)
