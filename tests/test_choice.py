"""The choice of nodes, against brute force over all trees and against the published loop in plain Python."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.choice import choose_bucket, choose_marginal
from jspec.cost.table import make_cost
from jspec.tree import Tree
from tests.oracles import arrays_of, random_row


@jax.jit
def choose(chances, active, buckets, seconds, rate=None):
    return choose_bucket(chances, active, jnp.asarray(buckets, jnp.float32), seconds, rate)


def forest(seed, sizes, budget):
    """Trees of these sizes and a chance for each node, never above its parent's, with ties."""
    rng = np.random.default_rng(seed)
    rows = [random_row(rng, n, "any") for n in sizes]
    tree = Tree(**{k: jnp.asarray(v) for k, v in arrays_of(rows, budget).items()})
    chances = np.zeros((len(sizes), budget), np.float32)
    for row, nodes in enumerate(rows):
        for i, node in enumerate(nodes[1:], 1):
            above = chances[row, node[1]] if node[1] else 1.0
            chances[row, i] = above * rng.choice([1.0, 0.75, 0.5, 0.25])
    return tree, rows, chances


def closed_subsets(rows):
    """All sets of drafted nodes, as (row, node), that hold each node's parent."""
    nodes = [(r, i) for r, row in enumerate(rows) for i in range(1, len(row))]
    for count in range(len(nodes) + 1):
        for chosen in itertools.combinations(nodes, count):
            inside = set(chosen)
            if all(rows[r][i][1] == 0 or (r, rows[r][i][1]) in inside for r, i in chosen):
                yield chosen


@pytest.mark.parametrize("buckets", [(1, 2, 4, 8, 16), (3, 5, 16), (16,)])
@pytest.mark.parametrize("rate", [None, 0.0, 1.0, 5.0])
@pytest.mark.parametrize("seed", range(6))
def test_no_tree_yields_more(seed, rate, buckets):
    _, rows, chances = forest(seed, [5, 4, 0], 5)
    active = jnp.asarray([True, True, False])
    buckets = (*(b for b in buckets if b < 15), 15)
    rng = np.random.default_rng(100 + seed)
    seconds = np.cumsum(rng.random(len(buckets))).astype(np.float32)

    def part(chosen):
        bucket = next(k for k, b in enumerate(buckets) if b >= 2 + len(chosen))
        return 2 + sum(chances[at] for at in chosen), seconds[bucket]

    def value(chosen):
        tokens, spent = part(chosen)
        return tokens / spent if rate is None else tokens - rate * spent

    subsets = list(closed_subsets(rows))
    choice = choose(jnp.asarray(chances), active, buckets, jnp.asarray(seconds), rate)
    mine = list(zip(*np.nonzero(np.asarray(choice.keep))))
    assert value(mine) == pytest.approx(max(map(value, subsets)), rel=1e-5)
    fastest = max(tokens / spent for tokens, spent in map(part, subsets))
    assert float(choice.speed) == pytest.approx(fastest, rel=1e-5)
    assert all(rows[r][i][1] == 0 or (r, rows[r][i][1]) in mine for r, i in mine)
    assert 2 + len(mine) <= buckets[int(choice.bucket)]
    possible = int((chances > 0).sum())
    assert len(mine) == min(buckets[int(choice.bucket)] - 2, possible)  # it is filled


def test_one_threshold_for_all_rows_and_ties_in_order():
    chances = jnp.asarray([[0, 0.5, 0.25, 0], [0, 0.9, 0.5, 0.5], [0, 0.99, 0.99, 0.99]])
    active = jnp.asarray([True, True, False])
    seconds = jnp.asarray([9.0, 1.0, 9.0])
    choice = choose(chances, active, (2, 5, 12), seconds)
    assert int(choice.bucket) == 1
    want = [[False, True, False, False], [False, True, True, False], [False] * 4]
    assert choice.keep.tolist() == want


def test_the_rate_of_the_whole_beats_that_of_each_round():
    """Rounds of two kinds, half of each: by the rate that they come to, together they yield more than by their own."""
    kinds = [jnp.asarray([[0, 0.9, 0.8, 0.7]]), jnp.asarray([[0, 0.5, 0.1, 0.1]])]
    seconds, active = jnp.asarray([1.2, 1.6, 2.3]), jnp.ones(1, bool)

    def whole(rate):
        choices = [choose(chances, active, (1, 2, 4), seconds, rate) for chances in kinds]
        tokens = sum(float(1 + jnp.where(c.keep, x, 0).sum()) for x, c in zip(kinds, choices))
        return tokens / sum(float(seconds[c.bucket]) for c in choices)

    rates = [whole(None)]
    for _ in range(4):
        rates.append(whole(rates[-1]))
    assert rates[-1] == rates[-2] > rates[0]


def test_roots_always_have_room():
    chances = jnp.asarray([[0, 0.1], [0, 0.1], [0, 0.1]])
    active = jnp.ones(3, bool)
    seconds = jnp.asarray([0.1, 1.0, 5.0, 9.0])
    choice = choose(chances, active, (2, 3, 4, 6), seconds)
    assert int(choice.bucket) == 1 and not choice.keep.any()  # 2 rows hold no 3 roots
    assert float(choice.speed) == pytest.approx(3.0)
    nothing = choose(jnp.zeros((3, 2)), active, (2, 3, 4, 6), seconds, 0.0)
    assert not nothing.keep.any()
    asleep = choose(chances, jnp.zeros(3, bool), (2, 3, 4, 6), seconds)
    assert not asleep.keep.any()


def published(rows, chances, cost, plain, alpha, mean_paths):
    """The loop of the paper for one tree: level by level, the likeliest first."""
    weight, gamma, delta, rho = (float(x) for x in cost.fit)
    kept, n, length = {0}, 1, 1.0
    depths = [node[2] for node in rows]
    for level in range(1, max(depths) + 1):
        parents = {i for i in kept if depths[i] == level - 1}
        found = [i for i in range(len(rows)) if depths[i] == level and rows[i][1] in parents]
        for i in sorted(found, key=lambda i: (-chances[i], i)):
            inner = {rows[j][1] for j in kept if j}
            paths = len(kept - inner) if mean_paths else 1
            gain = chances[i] / paths
            seconds = weight * n + gamma * (math.exp(delta * n**rho) - 1)
            slope = weight + gamma * delta * rho * n ** (rho - 1) * math.exp(delta * n**rho)
            if alpha * plain * gain / slope - plain * length / seconds > 0:
                kept.add(i)
                n, length = n + 1, length + gain
    return kept - {0}


@pytest.mark.parametrize("mean_paths", [True, False])
@pytest.mark.parametrize("alpha", [0.5, 0.8, 1.0])
def test_the_published_rule(alpha, mean_paths):
    sizes, seen = set(), 0
    for seed in range(12):
        rng = np.random.default_rng(seed)
        fit = (0.001 * rng.random(), 0.05, 0.3 + 0.3 * rng.random(), 0.3 * rng.random())
        cost = make_cost([1, 2], [0.03, 0.04], fit=fit)
        tree, rows, chances = forest(seed, [12], 12)
        chances *= np.float32(0.93)  # no ties with what costs compare to
        plain = jnp.float32(0.03)
        args = (tree, jnp.asarray(chances), jnp.asarray([True]), cost, plain, alpha, mean_paths)
        keep = np.asarray(choose_marginal(*args))[0]
        want = published(rows[0], chances[0], cost, 0.03, alpha, mean_paths)
        assert set(np.flatnonzero(keep).tolist()) == want
        sizes.add(len(want))
        seen += len(want)
    assert len(sizes) > 2 and seen > 5


def test_the_published_rule_keeps_nothing_of_finished_rows():
    tree, _, chances = forest(3, [6, 6], 6)
    cost = make_cost([1, 2], [0.03, 0.04], fit=(1e-4, 0.05, 0.5, 0.05))
    args = (cost, jnp.float32(0.03), 1.0, False)
    both = choose_marginal(tree, jnp.asarray(chances), jnp.asarray([True, True]), *args)
    one = choose_marginal(tree, jnp.asarray(chances), jnp.asarray([True, False]), *args)
    assert both.any(axis=1).all()
    assert one[0].any() and not one[1].any()
