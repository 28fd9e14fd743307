"""Rejection rules by exact enumeration, against walks in plain Python, and three rules that are wrong."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from scipy import stats

from jspec.acceptance import accept
from jspec.rejection import draw_siblings, sequoia, tokens_of, traversal
from jspec.tree import Tree
from tests.test_acceptance import continuations, random_target
from tests.test_tree import poison, tree_of

VOCAB = 4
RULES = {"sequoia": sequoia, "traversal": traversal}
SHAPES = {  # parents; siblings stand in the order drawn
    "chain": (-1, 0, 1),
    "star": (-1, 0, 0, 0),
    "two by two": (-1, 0, 0, 1, 1, 2, 2),
    "lopsided": (-1, 0, 0, 1, 1, 3),
}


@functools.cache
def jitted(rule):
    return jax.jit(rule, static_argnums=4)


def depths_of(shape):
    depths = []
    for parent in shape:
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
    return depths


def all_draws(shape, draft):
    """Every way to draw the tree's tokens: tokens and texts [T, N], and the chance of each."""
    inner = [(v, shape.count(v)) for v in range(len(shape)) if v in shape]
    orders = [list(itertools.permutations(range(VOCAB), fan)) for _, fan in inner]
    count = int(np.prod([len(x) for x in orders]))
    tokens, texts = np.zeros((2, count, len(shape)), int)
    chance = np.ones(count)
    for picked, (v, fan) in zip(
        np.array(list(itertools.product(*map(range, map(len, orders))))).T, inner
    ):
        drawn = np.array(list(itertools.permutations(range(VOCAB), fan)))[picked]
        q = laws_at(draft, shape, texts)[:, v].copy()
        for child, token in zip(np.flatnonzero(np.array(shape) == v), drawn.T):
            tokens[:, child] = token
            texts[:, child] = texts[:, v] * VOCAB + token
            left = q.sum(axis=1)
            mine = q[np.arange(count), token]
            chance *= np.divide(mine, left, out=np.zeros(count), where=left > 0)
            q[np.arange(count), token] = 0
    return tokens, texts, chance


def laws_at(table, shape, texts):
    """f64[T, N, V]: the law after each node."""
    return np.stack([table[d][texts[:, i]] for i, d in enumerate(depths_of(shape))], axis=1)


def law_of_text(rule, shape, target, draft, chance=None, law_after=None):
    """f64[V**length] and the tokens expected: one round on every tree with every fall of the coins, then the target.

    ``chance`` of each tree: other than drawn from the draft. ``law_after(found, laws)``: another law of the bonus.
    """
    length, nodes = max(depths_of(shape)) + 1, len(shape)
    tokens, texts, drawn = all_draws(shape, draft)
    chance = drawn if chance is None else chance(tokens, texts)
    coins = np.array(list(itertools.product((0.0, 1.0), repeat=nodes - 1)))
    trees, falls = len(tokens), len(coins)
    coins = np.tile(np.pad(coins, [(0, 0), (1, 0)]), (trees, 1))

    def rows(x):
        return np.repeat(x, falls, axis=0)

    def fixed(x, dtype=np.int32):
        return np.broadcast_to(np.asarray(x, dtype), (trees * falls, nodes))

    p, q = rows(laws_at(target, shape, texts)), rows(laws_at(draft, shape, texts))
    with jax.enable_x64(True):
        tree = Tree(
            tokens=jnp.asarray(rows(tokens), jnp.int32),
            parents=jnp.asarray(fixed(shape)),
            depths=jnp.asarray(fixed(depths_of(shape))),
            scores=jnp.asarray(fixed(0, np.float32)),
            source=jnp.asarray(fixed(0, np.int8)),
            size=jnp.full(trees * falls, nodes, jnp.int32),
        )
        found = jitted(rule)(tree, jnp.asarray(p), jnp.asarray(q), jnp.asarray(coins), length - 1)
        path, count, law, chances = map(np.asarray, found)
    assert law.dtype == np.float64 and (chances[:, 0] == -1).all()
    fell = np.where(chances < 0, 0.5, np.where(coins == 0, chances, 1 - chances))
    weight = rows(chance) * fell[:, 1:].prod(axis=1)
    if law_after is not None:
        law = law_after(path[np.arange(len(path)), count - 1], p)
    last = path[np.arange(len(path)), count - 1]
    texts = rows(texts)[np.arange(len(path)), last]
    out, after = np.zeros(VOCAB**length), continuations(target)
    for n in np.unique(count):
        mine = count == n
        text = texts[mine, None] * VOCAB + np.arange(VOCAB)
        each = weight[mine, None] * law[mine]
        sums = np.bincount(text.ravel(), each.ravel(), VOCAB**n)
        out += np.repeat(sums, VOCAB ** (length - n)) * after[n]
    return out, float((weight * count).sum())


def by_recursion(shape, target, draft, normalise=True):
    """What ``law_of_text`` says of Sequoia's rule, without any tree: tokens are drawn when they are tried."""
    length = max(depths_of(shape)) + 1
    out, after, expected = np.zeros(VOCAB**length), continuations(target), [0.0]

    def visit(node, depth, text, weight):
        p, q = target[depth][text], draft[depth][text]
        children = [i for i, parent in enumerate(shape) if parent == node]
        tries(children, depth, text, weight, p, q, q)

    def tries(children, depth, text, weight, p, left, q):
        if weight == 0:
            return
        if not children or left.sum() == 0:
            span = VOCAB ** (length - depth - 1)
            at = text * VOCAB * span
            out[at : at + VOCAB * span] += (
                weight * np.repeat(p, span) * after[depth + 1][at : at + VOCAB * span]
            )
            expected[0] += weight * (depth + 1)
            return
        for x in np.flatnonzero(left):
            drawn = weight * left[x] / left.sum()
            chance = min(1.0, p[x] / q[x])
            visit(children[0], depth + 1, text * VOCAB + x, drawn * chance)
            mass = np.maximum(p - q, 0)
            rest = mass / mass.sum() if mass.sum() > 0 else p
            struck = np.where(np.arange(VOCAB) == x, 0, left)
            rule = struck / max(struck.sum(), 1e-300) if normalise else q
            tries(children[1:], depth, text, drawn * (1 - chance), rest, struck, rule)

    visit(0, 0, 0, 1.0)
    return out, expected[0]


def laws(seed, shape, zeros=False, error=0.6):
    """A target and a drafter that is wrong by so much."""
    rng, length = np.random.default_rng(seed), max(depths_of(shape)) + 1
    target = random_target(rng, VOCAB, length, zeros)
    other = random_target(rng, VOCAB, length, zeros)
    return target, [(1 - error) * a + error * b for a, b in zip(target, other)]


def distance(a, b):
    return np.abs(a - b).sum() / 2


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rule", RULES)
def test_the_text_has_the_targets_law(rule, shape):
    shape = SHAPES[shape]
    for seed, zeros in ((0, False), (1, True)):
        target, draft = laws(seed, shape, zeros)
        law, expected = law_of_text(RULES[rule], shape, target, draft)
        assert np.abs(law - continuations(target)[0]).max() < 1e-12
        own, tokens = by_recursion(shape, target, draft)
        assert np.abs(own - law).max() < 1e-12
        if rule == "sequoia":
            assert expected == pytest.approx(tokens, abs=1e-12)
        else:
            assert expected >= tokens - 1e-12


def test_traversal_of_a_chain_is_block_verification():
    """Sun et al., ICLR 2025: the longest prefix i whose coin is below h_i is accepted."""
    shape = SHAPES["chain"]
    target, draft = laws(2, shape)
    _, mine = law_of_text(traversal, shape, target, draft)
    tokens, texts, chance = all_draws(shape, draft)
    p, q = (laws_at(x, shape, texts) for x in (target, draft))
    row, want = np.arange(len(tokens)), 1.0
    w1 = np.minimum(1, p[row, 0, tokens[:, 1]] / q[row, 0, tokens[:, 1]])
    w2 = np.minimum(1, w1 * p[row, 1, tokens[:, 2]] / q[row, 1, tokens[:, 2]])
    mass = np.maximum(w1[:, None] * p[:, 1] - q[:, 1], 0).sum(axis=1)
    h1 = np.where(w1 >= 1, 1, mass / np.maximum(mass + 1 - w1, 1e-300))
    want += (chance * (w2 + (1 - (1 - h1) * (1 - w2)))).sum()
    assert mine == pytest.approx(want, abs=1e-12)
    assert mine > law_of_text(sequoia, shape, target, draft)[1] + 1e-3


@pytest.mark.parametrize("rule", RULES)
def test_a_perfect_drafter_is_accepted_whole(rule):
    shape = SHAPES["two by two"]
    target, _ = laws(3, shape)
    law, expected = law_of_text(RULES[rule], shape, target, target)
    assert np.abs(law - continuations(target)[0]).max() < 1e-12
    assert expected == pytest.approx(3, abs=1e-12)


# Controls: each must fail the test above.


@pytest.mark.parametrize("rule", RULES)
def test_likeliest_children_with_the_drafters_ratio_are_not_exact(rule):
    shape = SHAPES["two by two"]
    target, draft = laws(4, shape)

    def likeliest(tokens, texts):
        q = laws_at(draft, shape, texts)
        best = np.argsort(-q, axis=2)[:, :, :2]
        pairs = tokens[:, 1:].reshape(-1, 3, 2)
        return (pairs == best[:, :3]).all(axis=(1, 2)).astype(float)

    law, _ = law_of_text(RULES[rule], shape, target, draft, chance=likeliest)
    assert law.sum() == pytest.approx(1)
    assert distance(law, continuations(target)[0]) > 0.1


def test_a_drafters_law_that_keeps_what_was_refused_is_not_exact():
    shape = SHAPES["two by two"]
    target, draft = laws(5, shape)
    law, _ = by_recursion(shape, target, draft, normalise=False)
    assert law.sum() == pytest.approx(1)
    assert distance(law, continuations(target)[0]) > 1e-3


@pytest.mark.parametrize("rule", RULES)
def test_a_bonus_drawn_anew_from_the_target_is_not_exact(rule):
    shape = SHAPES["chain"]
    target, draft = laws(6, shape)

    def anew(last, p):
        return p[np.arange(len(p)), last]

    law, _ = law_of_text(RULES[rule], shape, target, draft, law_after=anew)
    assert law.sum() == pytest.approx(1)
    assert distance(law, continuations(target)[0]) > 0.01


@pytest.mark.parametrize("rule", RULES)
def test_children_chosen_among_those_drawn_are_not_exact(rule):
    """Of three drawn, the two that the drafter likes best: what ``select`` would do."""
    shape = (-1, 0, 0)
    target, draft = laws(7, shape)
    q = draft[0][0]

    def chosen(tokens, texts):
        found = np.zeros(len(tokens))
        for triple in itertools.permutations(range(VOCAB), 3):
            a, b, _ = triple
            chance = q[list(triple)].prod() / (1 - q[a]) / (1 - q[a] - q[b])
            pair = [x for x in triple if x != min(triple, key=lambda x: q[x])]
            found += chance * (tokens[:, 1:] == pair).all(axis=1)
        return found

    law, _ = law_of_text(RULES[rule], shape, target, draft, chance=chosen)
    assert law.sum() == pytest.approx(1)
    assert distance(law, continuations(target)[0]) > 1e-3


# Walks, row by row.


def residual(p, q):
    mass = np.maximum(p - q, 0)
    return mass / mass.sum() if mass.sum() > 0 else p


def strike(q, token):
    left = np.where(np.arange(len(q)) == token, 0, q)
    return left / left.sum() if left.sum() > 0 else left


def walk_down(nodes, p, q, coins):
    """Sequoia's rule: the accepted path and the law of the bonus."""
    here, path = 0, [0]
    law, drawn, child = p[0], q[0], 1
    while child < len(nodes):
        if nodes[child][1] == here:
            x = nodes[child][0]
            if drawn[x] > 0 and coins[child] < min(1, law[x] / drawn[x]):
                here, law, drawn = child, p[child], q[child]
                path.append(child)
            elif drawn[x] > 0:
                law, drawn = residual(law, drawn), strike(drawn, x)
        child += 1
    return path, law


def walk_up(nodes, p, q, coins):
    """Traversal verification, by recursion: ``visit`` returns an accepted (path, law), or None."""
    p, q, w = list(p), list(q), {0: 1.0}

    def visit(node, path):
        for child in range(1, len(nodes)):
            if nodes[child][1] != node:
                continue
            x = nodes[child][0]
            w[child] = min(1, w[node] * p[node][x] / q[node][x]) if q[node][x] > 0 else 0.0
            if (found := visit(child, [*path, child])) is not None:
                return found
            if q[node][x] > 0:
                mass = np.maximum(w[node] * p[node] - q[node], 0)
                if w[node] < 1:
                    w[node] = mass.sum() / (mass.sum() + 1 - w[node])
                if mass.sum() > 0:
                    p[node] = mass / mass.sum()
                q[node] = strike(q[node], x)
        return (path, p[node]) if node == 0 or coins[node] < w[node] else None

    return visit(0, [0])


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_is_its_walk(rule):
    """On trees of all shapes, whatever stands in the padding; and ``accept`` goes the same way along ``tokens_of``."""
    rng, budget, vocab = np.random.default_rng(8), 12, 6
    walk = {"sequoia": walk_down, "traversal": walk_up}[rule]
    run, counts = jitted(RULES[rule]), set()
    for _ in range(3):
        rows = oracles.random_rows(rng, 32, budget, vocab=4)
        rows = [[(node[0] % vocab, *node[1:]) for node in nodes] for nodes in rows]
        rows = [nodes if unique(nodes) else nodes[:1] for nodes in rows]
        tree = poison(tree_of(rows, budget), rng)
        p = rng.dirichlet(np.full(vocab, 0.5), (32, budget)).astype(np.float32)
        q = (0.7 * p + 0.3 * rng.dirichlet(np.ones(vocab), (32, budget))).astype(np.float32)
        coins = rng.random((32, budget)).astype(np.float32)
        dead = np.arange(budget) >= np.array([len(nodes) for nodes in rows])[:, None]
        poisoned = [np.where(dead[:, :, None], np.nan, x) for x in (p, q)]
        found = run(tree, *map(jnp.asarray, poisoned), jnp.asarray(coins), budget - 1)
        bonus = np.argmax(np.where(np.isnan(found.law), 0, found.law), axis=1).astype(np.int32)
        again = accept(tree, tokens_of(tree, found, jnp.asarray(bonus)), budget - 1)
        np.testing.assert_array_equal(again[0], found.path)
        np.testing.assert_array_equal(again[1], found.count)
        for b, nodes in enumerate(rows):
            if not nodes:
                assert int(found.count[b]) == 0 and (found.path[b] == -1).all()
                continue
            path, law = walk(nodes, p[b], q[b], coins[b])
            assert found.path[b].tolist() == path + [-1] * (budget - len(path))
            assert int(found.count[b]) == len(path)
            np.testing.assert_allclose(found.law[b], law, atol=1e-5)
            counts.add(len(path))
    assert len(counts) > 3


def unique(nodes):
    return len({node[:2] for node in nodes[1:]}) == len(nodes[1:])


def test_siblings_are_drawn_one_after_the_other_without_replacement():
    law, draws = np.array([0.45, 0.3, 0.2, 0.05]), 40_000
    logits = jnp.broadcast_to(jnp.log(law).astype(jnp.float32), (draws, VOCAB))
    tokens, logps = jax.jit(draw_siblings, static_argnums=2)(jax.random.key(0), logits, 2)
    np.testing.assert_allclose(logps, np.log(law)[np.asarray(tokens)], atol=1e-5)
    pairs = list(itertools.permutations(range(VOCAB), 2))
    want = np.array([law[a] * law[b] / (1 - law[a]) for a, b in pairs])
    seen = np.bincount(np.asarray(tokens) @ [VOCAB, 1], minlength=VOCAB**2)
    seen = seen[[a * VOCAB + b for a, b in pairs]]
    assert seen.sum() == draws
    assert stats.chisquare(seen, want * draws).pvalue > 1e-9
    other = np.array([want[pairs.index((b, a))] for a, b in pairs])
    assert stats.chisquare(seen, other * draws).pvalue < 1e-9
    struck = jnp.array([0.0, -jnp.inf, 1.0])
    assert set(np.asarray(draw_siblings(jax.random.key(1), struck, 2)[0]).tolist()) == {0, 2}
