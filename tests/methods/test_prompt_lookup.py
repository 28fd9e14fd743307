"""Against a search in plain Python, on ragged rows whose unused entries hold garbage."""

import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest

from jspec.methods import prompt_lookup
from jspec.methods.prompt_lookup import _DOUBT, _RANK
from jspec.tree import RETRIEVED, check, select

CAPACITY = 40
GARBAGE = np.array([-(2**31), -1, 2**31 - 1, 1])


def expected(text, budget, depth, ngram, matches):
    """The nodes for a text whose last token is the root."""
    last = len(text) - 1
    found = []
    for at in range(last):
        agreed = 0
        while agreed < min(ngram, at + 1) and text[at - agreed] == text[last - agreed]:
            agreed += 1
        if agreed:
            found.append((-agreed, -at))
    paths = []
    for rank, (agreed, at) in enumerate(sorted(found)[:matches]):
        path, score = (), rank * math.log(_RANK)
        for n in range(-agreed, -agreed + min(depth, budget - 1)):
            path += (text[-at + 1 + len(path) % (last + at)],)
            score += math.log(n / (n + _DOUBT))
            paths.append((path, score, RETRIEVED))
    return oracles.union(text[-1], paths, budget)


def absorb(method, state, texts, rng):
    """Feeds all tokens of each text but the last, in ragged pieces with garbage behind them."""
    step = jax.jit(method.absorb)
    fed = np.zeros(len(texts), int)
    while True:
        counts = [min(int(rng.integers(0, 8)), len(t) - 1 - n) for t, n in zip(texts, fed)]
        tokens = rng.choice(GARBAGE, (len(texts), 7)).astype(np.int32)
        for b, (text, n, count) in enumerate(zip(texts, fed, counts)):
            tokens[b, :count] = text[n : n + count]
        taps = jnp.full((len(texts), 7, 0, 4), jnp.nan)
        state = step({}, state, jnp.asarray(tokens), taps, jnp.array(counts, jnp.int32))
        fed += counts
        if all(n == len(t) - 1 for t, n in zip(texts, fed)):
            return state


def propose(method, texts, seed=0):
    rng = np.random.default_rng(seed)
    state = absorb(method, method.init({}, len(texts), CAPACITY, None), texts, rng)
    roots = jnp.array([t[-1] for t in texts], jnp.int32)
    tree = jax.jit(method.propose)({}, state, roots)[0].tree
    check(tree)
    return tree


def random_texts(rng, vocab):
    """Ragged, one of a single token and one that fills the cache among them."""
    lengths = [1, 2, CAPACITY + 1, *rng.integers(1, CAPACITY + 2, 9)]
    return [rng.integers(0, vocab, n).tolist() for n in lengths]


@pytest.mark.parametrize("vocab", [1, 2, 4, 15])
@pytest.mark.parametrize(
    "budget, depth, ngram, matches",
    [(1, 4, 3, 2), (4, 16, 3, 1), (4, 2, 1, 4), (16, 5, 3, 4), (64, 16, 8, 8), (64, 3, 60, 50)],
)
def test_equals_a_search_in_plain_python(vocab, budget, depth, ngram, matches):
    rng = np.random.default_rng(vocab)
    method = prompt_lookup(budget, depth, ngram, matches)
    for trial in range(4):
        texts = random_texts(rng, vocab)
        tree = propose(method, texts, trial)
        rows = [expected(t, budget, depth, ngram, matches) for t in texts]
        for text, row, nodes in zip(texts, oracles.rows_of(tree), rows):
            assert [n[:3] + n[4:] for n in row] == [n[:3] + n[4:] for n in nodes], text
            np.testing.assert_allclose([n[3] for n in row], [n[3] for n in nodes], atol=1e-4)
        assert int(tree.depths.max()) <= method.needs.depth


def test_periodic_text_goes_on():
    period = [7, 3, 9, 3]
    text = [1, 2] + period * 4
    tree = propose(prompt_lookup(13), [text])
    assert np.asarray(tree.tokens[0]).tolist() == [3] + period * 3
    assert np.asarray(tree.depths[0]).tolist() == list(range(13))


def test_longer_matches_come_first_then_later_ones():
    text = [1, 2, 50, 2, 51, 8, 2, 52, 1, 2]  # after (1, 2): 50; after 2: 52, 51 (the later first)
    tree = propose(prompt_lookup(5, depth=1), [text])
    order = np.asarray(tree.tokens[0])[np.argsort(-np.asarray(tree.scores[0]), kind="stable")]
    assert order.tolist()[:4] == [2, 50, 52, 51]
    assert select(tree, 2).tokens.tolist() == [[2, 50]]


def test_no_match_is_the_root_alone():
    tree = propose(prompt_lookup(16), [[1, 2, 3], [4], [5, 5]])
    assert tree.size.tolist() == [1, 1, 16]


def test_rows_are_independent():
    rng = np.random.default_rng(3)
    texts = random_texts(rng, 3)
    method = prompt_lookup(16)
    together = propose(method, texts)
    for b, text in enumerate(texts):
        alone = propose(method, [text], seed=b)
        chex.assert_trees_all_equal(jax.tree.map(lambda x, b=b: x[b : b + 1], together), alone)


def test_compiles_once():
    chex.clear_trace_counter()
    method = prompt_lookup(16)
    step = jax.jit(chex.assert_max_traces(method.propose, n=1))
    rng = np.random.default_rng(4)
    for _ in range(3):
        texts = random_texts(rng, 4)
        state = absorb(method, method.init({}, len(texts), CAPACITY, None), texts, rng)
        step({}, state, jnp.array([t[-1] for t in texts], jnp.int32))
    assert prompt_lookup(budget=16) is method and prompt_lookup(16, 99) is method


@pytest.mark.parametrize("name", ["budget", "depth", "ngram", "matches"])
def test_refuses_bad_arguments(name):
    with pytest.raises(ValueError, match=f"{name} must be .*, got 0"):
        prompt_lookup(**({"budget": 4} | {name: 0}))
