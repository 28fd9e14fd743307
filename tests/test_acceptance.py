"""The match rule against a walk in plain Python, and the law of the text it lets through."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jspec.acceptance import accept
from jspec.sampling import Sampling, draw, position_noise
from jspec.tree import Tree
from tests import oracles
from tests.test_tree import poison, tree_of

accept = jax.jit(accept, static_argnums=2)
draw = jax.jit(draw, static_argnums=0)


def walk(nodes, tokens, depth):
    """Accepted node ids of one row."""
    path = [0] if nodes else []
    while path and len(path) <= depth:
        here = path[-1]
        children = [i for i, node in enumerate(nodes) if i and node[1] == here]
        match = [i for i in children if nodes[i][0] == tokens[here]]
        if not match:
            break
        path.append(match[0])
    return path


def target_tokens(rng, nodes, budget, habit):
    """What the target draws at each slot: a child's token, one that is no child's, or a mix."""
    tokens = rng.choice([0, 1, 2, 7], budget)  # 7 stands in the padding
    for i in range(len(nodes)):
        children = [node[0] for node in nodes[1:] if node[1] == i]
        if children and rng.random() < {"all": 1.0, "most": 0.8, "none": 0.0}[habit]:
            tokens[i] = rng.choice(children)
        elif habit == "none":
            tokens[i] = 10**6
    return tokens


@pytest.mark.parametrize("budget", [1, 2, 17, 64])
def test_accept_is_the_walk(budget):
    lengths = set()
    for turn, habit in itertools.product(range(4), ("all", "most", "none")):
        rng = np.random.default_rng(turn)
        # Few tokens: the same one stands under many parents, and where it is no child.
        rows = oracles.random_rows(rng, 64, budget, vocab=3)
        tree = poison(tree_of(rows, budget), rng)
        tokens = np.stack([target_tokens(rng, nodes, budget, habit) for nodes in rows])
        for depth in (0, 2, budget):
            path, count = accept(tree, tokens.astype(np.int32), depth)
            want = [walk(nodes, t, depth) for nodes, t in zip(rows, tokens)]
            assert path.shape == (64, depth + 1)
            assert path.tolist() == [p + [-1] * (depth + 1 - len(p)) for p in want]
            assert count.tolist() == [len(p) for p in want]
            lengths.update(count.tolist())
    assert lengths.issuperset(range(min(budget, 10) + 1))


# The law of accepted text, by enumeration. Texts of n tokens over V are numbered as base-V numbers.

VOCAB = 3
TWO_BY_TWO = [(), (1,), (3,), (1, 0), (1, 2), (3, 1), (3, 3)]  # over 4 tokens


def shapes(nodes):
    """Every tree of so many nodes over the vocabulary, as lists of paths from the root."""
    found = {frozenset([()])}
    for _ in range(nodes - 1):
        found = {
            tree | {(*path, token)}
            for tree in found
            for path in tree
            for token in range(VOCAB)
            if (*path, token) not in tree
        }
    return [sorted(tree, key=lambda path: (len(path), path)) for tree in found]


def random_target(rng, vocab, length, zeros):
    """``target[n]``: law of the next token after each text of n tokens, f64[V**n, V]."""
    target = []
    for n in range(length):
        weights = rng.random((vocab**n, vocab)) + 0.1
        if zeros:
            struck = rng.integers(2 * vocab, size=(vocab**n, 1)) == np.arange(vocab)
            weights[struck] = 0
        target.append(weights / weights.sum(axis=1, keepdims=True))
    return target


def continuations(target):
    """``out[n][text]``: probability of the text of full length, given its first n tokens."""
    vocab, length = target[0].shape[1], len(target)
    out = [np.ones(vocab**length)]
    for n in reversed(range(length)):
        out.append(np.repeat(target[n].ravel(), vocab ** (length - n - 1)) * out[-1])
    return out[::-1]


def arrays_of(trees, vocab):
    """Paths as the fields of a Tree, and each node's text as a number."""
    rows, numbers = [], []
    for paths in trees:
        index = {path: i for i, path in enumerate(paths)}
        rows.append(
            [(p[-1], index[p[:-1]], len(p), -len(p), 0) if p else (0, -1, 0, 0, 0) for p in paths]
        )
        numbers.append([sum(t * vocab**i for i, t in enumerate(p[::-1])) for p in paths])
    return oracles.arrays_of(rows, len(trees[0])), np.array(numbers)


def law_of_text(trees, target, rule=None, draws=1):
    """f64[trees, V**length]: one round on each tree, then the target alone to the full length.

    All ``draws`` tokens at all nodes are enumerated; ``rule(trees, draws)`` makes a node's token of them (default: the
    first).
    """
    length, vocab = len(target), target[0].shape[1]
    fields, numbers = arrays_of(trees, vocab)
    count, nodes = numbers.shape
    spins = np.array(list(itertools.product(range(vocab), repeat=nodes * draws)), np.int32)
    spins = spins.reshape(1, -1, nodes, draws)
    chance = np.ones((count, spins.shape[1]))
    for i, r in itertools.product(range(nodes), range(draws)):
        laws = np.stack([target[len(t[i])][numbers[j, i]] for j, t in enumerate(trees)])
        chance *= laws[:, spins[0, :, i, r]]
    tokens = rule(trees, spins) if rule else spins[..., 0]
    tokens = np.broadcast_to(tokens, (count, *spins.shape[1:3])).reshape(-1, nodes)
    tree = Tree(**{name: np.repeat(x, spins.shape[1], axis=0) for name, x in fields.items()})
    path, accepted = (np.asarray(x) for x in accept(tree, tokens, length - 1))
    emitted = np.take_along_axis(tokens, np.maximum(path, 0), axis=1)
    which = np.repeat(np.arange(count), spins.shape[1])
    out, after = np.zeros((count, vocab**length)), continuations(target)
    for n in np.unique(accepted):
        mine = accepted == n
        text = emitted[mine, :n] @ vocab ** np.arange(n)[::-1]
        weight = np.bincount(which[mine] * vocab**n + text, chance.ravel()[mine], count * vocab**n)
        out += np.repeat(weight.reshape(count, -1), vocab ** (length - n), axis=1) * after[n]
    return out


@pytest.mark.parametrize("nodes", [1, 2, 3, 4, 5, 6])
def test_accepted_text_has_the_targets_law_on_every_tree(nodes):
    target = random_target(np.random.default_rng(nodes), VOCAB, nodes, zeros=True)
    ours = law_of_text(shapes(nodes), target)
    assert len(ours) == [1, 3, 12, 55, 273, 1428][nodes - 1]
    assert np.abs(ours - continuations(target)[0]).max() < 1e-9


def test_accepted_text_has_the_targets_law_on_two_by_two():
    target = random_target(np.random.default_rng(0), 4, 3, zeros=True)
    ours = law_of_text([TWO_BY_TWO], target)
    assert np.abs(ours - continuations(target)[0]).max() < 1e-9


def second_chance(trees, draws):
    """A rule that is not lossless: where the first draw is no child, draw again."""
    child = np.zeros((len(trees), len(trees[0]), VOCAB), bool)
    for tree, paths in enumerate(trees):
        for path in paths[1:]:
            child[tree, paths.index(path[:-1]), path[-1]] = True
    first, second = draws[..., 0], draws[..., 1]
    nodes = np.arange(len(trees[0]))
    return np.where(child[np.arange(len(trees))[:, None, None], nodes, first], first, second)


@pytest.mark.parametrize("nodes", [2, 3])
def test_a_second_chance_is_seen(nodes):
    """The control: a wrong rule fails the test above, on every tree that leaves anything to chance."""
    target = random_target(np.random.default_rng(nodes), VOCAB, nodes, zeros=False)
    ours = law_of_text(trees := shapes(nodes), target, second_chance, draws=2)
    np.testing.assert_allclose(ours.sum(axis=1), 1)
    wrong = np.abs(ours - continuations(target)[0]).max(axis=1) > 1e-3
    assert len(wrong) == len(trees)
    assert wrong.all()


def test_shared_noise_gives_the_targets_law():
    """All nodes of a depth draw with the same noise, and still the text has the target's law."""
    vocab, batch, sampling = 4, 60_000, Sampling(0.8)
    target = random_target(np.random.default_rng(0), vocab, 3, zeros=False)
    fields, [numbers] = arrays_of([TWO_BY_TWO], vocab)
    tree = Tree(**{name: np.repeat(x, batch, axis=0) for name, x in fields.items()})
    places = jnp.broadcast_to(jnp.arange(3), (batch, 3))
    noise = np.asarray(position_noise(jax.random.key(0), jnp.arange(batch), places, vocab))

    def drawn(depth, text):  # the token after texts of ``depth`` tokens
        logits = sampling.temperature * np.log(target[depth][text]).astype(np.float32)
        return np.asarray(draw(sampling, logits.T, noise[:, depth].T))

    at = zip(map(len, TWO_BY_TWO), numbers)
    tokens = np.stack([drawn(depth, np.full(batch, text)) for depth, text in at], axis=1)
    path, count = (np.asarray(x) for x in accept(tree, tokens, 2))
    alone = np.zeros((batch, 0), np.int32)  # autoregressively
    for depth in range(3):
        text = alone @ vocab ** np.arange(depth)[::-1]
        alone = np.concatenate([alone, drawn(depth, text)[:, None]], axis=1)
    emitted = np.take_along_axis(tokens, np.maximum(path, 0), axis=1)
    live = np.arange(3) < count[:, None]
    np.testing.assert_array_equal(emitted[live], alone[live])
    assert np.unique(count).tolist() == [1, 2, 3]
    counts = np.bincount(alone @ vocab ** np.arange(3)[::-1], minlength=vocab**3)
    law = continuations(target)[0]
    assert stats.chisquare(counts, law * batch).pvalue > 1e-9
    assert stats.chisquare(counts, np.full(vocab**3, batch / vocab**3)).pvalue < 1e-9
