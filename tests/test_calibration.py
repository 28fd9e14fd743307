"""Counts of edges, their isotonic estimates, and products along paths, against plain Python."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.calibration import (
    DEPTHS,
    KEPT,
    KNOTS,
    WEIGHT,
    Calibration,
    along_paths,
    calibrated,
    depth_bin,
    edge_values,
    estimates,
    learn,
    no_calibration,
    standing,
)
from jspec.tree import HEAD, RETRIEVED, Tree
from tests.oracles import arrays_of, random_rows, rows_of


def trees(seed, batch=6, budget=12):
    rows = random_rows(np.random.default_rng(seed), batch, budget, "real", vocab=4)
    return Tree(**{k: jnp.asarray(v) for k, v in arrays_of(rows, budget).items()})


def edge(nodes, i):
    return float(np.exp(np.float32(nodes[i][3]) - np.float32(nodes[nodes[i][1]][3])))


def walk(rng, nodes):
    """A random accepted path: from the root down, stopping anywhere."""
    path = [0] if nodes else []
    while path and rng.random() < 0.8:
        children = [i for i, node in enumerate(nodes) if node[1] == path[-1]]
        if not children:
            break
        path.append(int(rng.choice(children)))
    return path


def shares(value):
    """How much of an edge each knot has: linear interpolation, flat beyond the ends."""
    return np.array([np.interp(value, KNOTS, one) for one in np.eye(len(KNOTS))])


def counted_by_hand(tree, paths, counted):
    tried, hit = np.zeros((2, *no_calibration().tried.shape))
    for nodes, path, use in zip(rows_of(tree), paths, counted):
        for i, node in enumerate(nodes):
            if use and i and node[1] in path:
                depth, share = sum(node[2] >= d for d in DEPTHS), shares(edge(nodes, i))
                tried[node[4], depth] += share
                hit[node[4], depth] += share * (i in path)
    return tried, hit


def said(tree, paths, width):
    """The tokens that a target said which took these paths, a bonus token at the end, and how many."""
    tokens = [[int(tree.tokens[row, i]) for i in path[1:]] + [99] for row, path in enumerate(paths)]
    counts = jnp.asarray([len(path) for path in paths])  # a row without a root says nothing
    return jnp.asarray([one + [-1] * (width - len(one)) for one in tokens]), counts


@pytest.mark.parametrize("seed", range(5))
def test_counts_are_exact(seed):
    rng, tree = np.random.default_rng(seed), trees(seed)
    paths = [walk(rng, nodes) for nodes in rows_of(tree)]
    counted = rng.random(tree.batch) < 0.7
    got = learn(no_calibration(), tree, *said(tree, paths, tree.budget), jnp.asarray(counted))
    tried, hit = counted_by_hand(tree, paths, counted)
    assert tried.sum() > 5
    np.testing.assert_allclose(got.tried, tried, atol=1e-4)
    np.testing.assert_allclose(got.hit, hit, atol=1e-4)
    twice = learn(got, tree, *said(tree, paths, tree.budget), jnp.asarray(counted))
    np.testing.assert_allclose(twice.tried, 2 * tried, atol=2e-4)


@pytest.mark.parametrize("value", [0.004, 0.02, 0.1, 0.5, 0.61, 0.9, 0.95, 0.99, 1.0])
@pytest.mark.parametrize("hit", [False, True])
@pytest.mark.parametrize("source", [HEAD, RETRIEVED])
def test_what_always_happens_is_read_so_wherever_an_edge_lies(value, hit, source):
    nodes = [(1, -1, 0, 0.0, 0), (2, 0, 1, float(np.log(value)), source)]
    tree = Tree(**{k: jnp.asarray(v) for k, v in arrays_of([nodes], 2).items()})
    state, step, one = no_calibration(), jax.jit(learn), jnp.asarray([1])
    for _ in range(60):
        state = step(state, tree, jnp.asarray([[2 if hit else 3]]), one, one > 0)
    table, edge = estimates(state, 0.8), (jnp.asarray([value]), jnp.asarray([1]))
    read, other = (calibrated(table, *edge, jnp.asarray([x])) for x in (source, 1 - source))
    np.testing.assert_array_equal(
        other, calibrated(estimates(no_calibration(), 0.8), *edge)
    )  # nothing was said of it
    bound = min(1, value / KNOTS[0])  # below the first knot a reading falls off to 0
    assert (read[0] > 0.9 * bound) if hit else (read[0] < 0.05), read


def test_a_knot_remembers_so_many_edges():
    nodes = [(1, -1, 0, 0.0, 0), (2, 0, 1, float(np.log(KNOTS[9])), 0)]
    tree = Tree(**{k: jnp.asarray(v) for k, v in arrays_of([nodes], 2).items()})
    state, step, one = no_calibration(), jax.jit(learn), jnp.asarray([1])
    for _ in range(300):
        state = step(state, tree, jnp.asarray([[3]]), one, one > 0)
    assert state.tried.max() == KEPT and state.hit.max() == 0
    for _ in range(300):
        state = step(state, tree, jnp.asarray([[2]]), one, one > 0)
    assert state.tried.max() == KEPT
    want = 1 - (KEPT / (KEPT + 1)) ** 300  # the old ones faded
    assert float(state.hit.max()) / KEPT == pytest.approx(want, abs=1e-3)


def test_what_stands_in_padding_or_in_a_poisoned_row_changes_nothing():
    tree = trees(1)
    rng = np.random.default_rng(1)
    words, counts = said(tree, [walk(rng, nodes) for nodes in rows_of(tree)], tree.budget)
    counted = jnp.arange(tree.batch) != 3
    want = learn(no_calibration(), tree, words, counts, counted)
    wild = jnp.where(tree.live & counted[:, None], tree.scores, jnp.nan)
    poisoned = Tree(tree.tokens, tree.parents, tree.depths, wild, tree.source, tree.size)
    beyond = jnp.arange(tree.budget) >= counts[:, None]
    words = jnp.where(
        beyond | ~counted[:, None], tree.tokens, words
    )  # tokens that are in the trees
    got = learn(no_calibration(), poisoned, words, counts, counted)
    for a, b in zip(want, got):
        np.testing.assert_array_equal(a, b)
    assert np.isfinite(edge_values(poisoned)).all()
    np.testing.assert_array_equal(edge_values(poisoned)[0], edge_values(tree)[0])


@pytest.mark.parametrize("alpha", [0.3, 0.8, 1.0])
def test_at_the_start_an_edge_is_worth_alpha(alpha):
    table = estimates(no_calibration(), alpha)
    np.testing.assert_allclose(table, alpha * np.broadcast_to(KNOTS, table.shape), rtol=1e-5)
    edges = jnp.linspace(0, 1, 201)
    for depth in (1, 2, 5, 30):
        got = calibrated(table, edges, jnp.full(edges.shape, depth))
        np.testing.assert_allclose(got, alpha * np.minimum(edges, KNOTS[-1]), atol=1e-6)


def isotonic(values, weights):
    """Pool adjacent violators."""
    blocks = []
    for value, weight in zip(values, weights):
        blocks.append([value * weight, weight, 1])
        while len(blocks) > 1 and blocks[-2][0] / blocks[-2][1] > blocks[-1][0] / blocks[-1][1]:
            last = blocks.pop()
            blocks[-1] = [a + b for a, b in zip(blocks[-1], last)]
    return [total / weight for total, weight, n in blocks for _ in range(n)]


@pytest.mark.parametrize("seed", range(4))
def test_estimates_are_the_isotonic_regression_of_shrunk_rates(seed):
    rng = np.random.default_rng(seed)
    shape = no_calibration().tried.shape
    tried = rng.integers(0, 40, shape) * rng.integers(0, 2, shape)
    hit = rng.binomial(tried, rng.random(tried.shape))
    prior = 0.8 * np.asarray(KNOTS)
    seen, right = (x.sum(axis=1, keepdims=True) for x in (tried, hit))
    pooled = (right + WEIGHT * prior) / (seen + WEIGHT)
    each = (hit + WEIGHT * pooled) / (tried + WEIGHT)
    want = [
        [isotonic(row, weight + 1e-3) for row, weight in zip(*both)] for both in zip(each, tried)
    ]
    counts = Calibration(jnp.asarray(tried, jnp.float32), jnp.asarray(hit, jnp.float32))
    got = estimates(counts, 0.8)
    np.testing.assert_allclose(got, want, rtol=2e-3, atol=2e-4)
    edges = jnp.sort(jnp.asarray(rng.random(500), jnp.float32))
    for depth in (1, 3, 20):
        where = jnp.full(edges.shape, depth), jnp.full(edges.shape, seed % 2)
        line = np.asarray(calibrated(got, edges, *where))
        assert (np.diff(line) >= -1e-6).all() and line[0] >= 0 and line[-1] <= 1


def test_depth_bins():
    depths = jnp.arange(1, 12)
    want = [sum(d >= first for first in DEPTHS) for d in range(1, 12)]
    assert depth_bin(depths).tolist() == want
    assert want[0] == 0 and want[-1] == len(DEPTHS)


@pytest.mark.parametrize("seed", range(3))
def test_products_along_paths(seed):
    tree = trees(seed)
    values = np.random.default_rng(seed).random(tree.tokens.shape).astype(np.float32)
    values[0, 1:3] = 1.0
    got = along_paths(tree, jnp.asarray(values), tree.budget)
    for row, nodes in enumerate(rows_of(tree)):
        paths = []
        for i, node in enumerate(nodes):
            paths.append(paths[node[1]] * values[row, i] if i else np.float32(1))
        np.testing.assert_array_equal(got[row, : len(nodes)], paths)
        assert not got[row, len(nodes) :].any()


@pytest.mark.parametrize("seed", range(4))
def test_what_stands_in_the_text(seed):
    """The drafted nodes that the text goes through, beyond what was verified too."""
    rng, tree = np.random.default_rng(seed), trees(seed)
    words = rng.integers(0, 4, (tree.batch, 9)).astype(np.int32)
    counts = rng.integers(0, 8, tree.batch).astype(np.int32)
    stands, known = standing(tree, jnp.asarray(words), jnp.asarray(counts))
    for row, nodes in enumerate(rows_of(tree)):
        right, asked = set(), set()
        for i, (token, parent, depth, *_) in enumerate(nodes):
            if i and parent in right and depth <= counts[row]:
                asked.add(i)
            if not i or (i in asked and token == words[row, depth - 1]):
                right.add(i)
        assert set(np.flatnonzero(stands[row])) == right
        assert set(np.flatnonzero(known[row])) == asked
