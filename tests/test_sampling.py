"""Filters and draws against slow references in float64, the law of the draw, and the law of accepted text."""

import itertools
import math

import jax
import numpy as np
import pytest
from scipy import stats

from jspec.sampling import Sampling, draw, position_noise, top_k, warp

inf, nan = float("inf"), float("nan")
FALSE_FAIL = 1e-9

top_k = jax.jit(top_k, static_argnums=1)
warp = jax.jit(warp, static_argnums=0)
draw = jax.jit(draw, static_argnums=0)
position_noise = jax.jit(position_noise, static_argnums=3)


@pytest.mark.parametrize(
    ("field", "bad", "good"),
    [
        ("temperature", (-1.0, -1e-9, inf, nan), (0.0, 0.5, 9.0)),
        ("top_k", (-1,), (0, 1, 10**6)),
        ("top_p", (0.0, -0.1, 1.1, nan), (1e-6, 1.0)),
        ("min_p", (-0.1, 1.1, nan), (0.0, 1.0)),
    ],
)
def test_options_out_of_range(field, bad, good):
    for value in bad:
        with pytest.raises(ValueError, match=f"{field} must be"):
            Sampling(**{field: value})
    for value in good:
        assert getattr(Sampling(**{field: value}), field) == value
    assert Sampling().greedy
    assert not Sampling(temperature=0.1).greedy


# Top-k.


def awkward_columns(rng, vocab):
    """Heavy ties, missing entries, sorted, flat and ordinary columns: f32[V, M]."""
    columns = [
        *rng.integers(0, 3, (4, vocab)),
        *np.where(rng.random((3, vocab)) < 0.9, -inf, rng.integers(0, 2, (3, vocab))),
        *np.where(rng.random((2, vocab)) < 2 / vocab, 5.0, -inf),
        *rng.normal(size=(4, vocab)),
        np.arange(vocab),
        -np.arange(vocab),
        -(np.arange(vocab) // 256),
        np.where(np.arange(vocab) == vocab - 1, 1.0, 0.0),
        np.where(np.arange(vocab) == vocab - 1, 1.0, -inf),
        np.zeros(vocab),
        np.full(vocab, -inf),
    ]
    return np.stack(columns, axis=1).astype(np.float32)


@pytest.mark.parametrize(
    ("vocab", "ks"),
    [
        (1, [1]),
        (61, [1, 8, 61]),
        (255, [255]),
        (256, [1, 3]),
        (257, [1, 2]),
        (512, [1, 2]),
        (5000, [1, 2, 4, 7, 8, 19, 20, 64]),
        (49152, [1, 8, 300]),
    ],
)
def test_top_k_is_a_stable_sort(vocab, ks):
    logits = awkward_columns(np.random.default_rng(vocab), vocab)
    order = np.argsort(-logits, axis=0, kind="stable")
    for k in ks:
        values, tokens = top_k(logits, k)
        np.testing.assert_array_equal(tokens, order[:k].T)
        np.testing.assert_array_equal(values, np.take_along_axis(logits, order[:k], axis=0).T)


# Filters.


def softmax(scores):
    weights = np.exp(scores - scores.max())
    return weights / weights.sum()


def slow_warp(sampling, logits):
    """One column: the scores, -inf where filtered, and tokens that rounding may keep or filter."""
    scores = (logits.astype(np.float32) / np.float32(sampling.temperature)).astype(np.float64)
    doubtful = np.zeros(len(scores), bool)
    if 0 < sampling.top_k < len(scores):
        scores[scores < np.sort(scores)[-sampling.top_k]] = -inf
    if sampling.top_p < 1:
        probs = softmax(scores)
        ranked = np.sort(probs)
        more = probs.sum() - np.cumsum(ranked)  # mass of what is listed after
        more = more[np.searchsorted(ranked, probs, side="right") - 1]
        scores[more >= sampling.top_p] = -inf
        doubtful |= np.abs(more - sampling.top_p) < 1e-5
    if sampling.min_p > 0:
        ratio = scores - scores.max() - math.log(sampling.min_p)
        scores[ratio < 0] = -inf
        doubtful |= (ratio != 0) & (np.abs(ratio) < 1e-5)
    return scores, doubtful


def distributions(rng, vocab):
    """Logits f32[V, M], from flat to one token alone."""
    columns = [
        *(rng.normal(size=vocab) * scale for scale in (0.01, 1, 2, 4, 10)),
        *(rng.integers(0, n, vocab) for n in (2, 3, 6)),
        -2.0 * np.log(1 + rng.permutation(vocab)),
        np.where(np.arange(vocab) == vocab // 2, 60.0, 0.0),
        np.where(np.arange(vocab) == vocab // 2, 0.0, -inf),
        np.where(rng.random(vocab) < 0.1, rng.normal(size=vocab), -inf),
        np.zeros(vocab),
    ]
    columns[-2][0] = 0.0  # at least one token
    return np.stack(columns, axis=1).astype(np.float32)


PEAKED = [4, 9, 10]

FILTERS = {
    "temperature": Sampling(0.7),
    "hot": Sampling(30.0),
    "tiny temperature": Sampling(1e-6),
    "top-k 1": Sampling(1.0, top_k=1),
    "top-k 40": Sampling(1.3, top_k=40),
    "top-k all": Sampling(1.0, top_k=10**6),
    "top-p 0.5": Sampling(1.0, top_p=0.5),
    "top-p 0.95": Sampling(0.8, top_p=0.95),
    "top-p 0.9999": Sampling(1.0, top_p=0.9999),
    "tiny temperature, top-p": Sampling(1e-6, top_p=0.9),
    "min-p 0.05": Sampling(1.0, min_p=0.05),
    "min-p 1": Sampling(1.0, min_p=1.0),
    "all": Sampling(0.9, top_k=50, top_p=0.9, min_p=0.02),
    "all, loose": Sampling(1.5, top_k=3000, top_p=0.97, min_p=0.001),
}


@pytest.mark.parametrize("name", FILTERS)
def test_filters_equal_their_definition(name):
    sampling, undecided, total = FILTERS[name], 0, 0
    logits = distributions(np.random.default_rng(0), 5000)
    # One flat column makes top-p search for every cut; the peaked ones alone are cut in a short prefix.
    for columns in (logits, logits[:, PEAKED]):
        ours = np.asarray(warp(sampling, columns))
        for mine, theirs in zip(ours.T, columns.T):
            want, doubtful = slow_warp(sampling, theirs)
            kept = np.isfinite(mine)
            assert kept.any()
            assert not ((kept != np.isfinite(want)) & ~doubtful).any()
            both = kept & np.isfinite(want)
            np.testing.assert_allclose(mine[both], want[both], rtol=1e-6)
            undecided, total = undecided + doubtful.sum(), total + len(want)
    assert undecided < 0.01 * total


def test_greedy_does_not_filter():
    logits = distributions(np.random.default_rng(0), 61)
    sampling = Sampling(0.0, top_k=1, top_p=0.1, min_p=0.9)
    np.testing.assert_array_equal(warp(sampling, logits), logits)


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [
        (0.46, [5]),
        (0.48, [3, 5]),
        (0.73, [0, 3, 5]),
        (0.85, [0, 1, 2, 3, 5]),
        (0.96, [0, 1, 2, 3, 5]),
        (0.98, [0, 1, 2, 3, 4, 5]),
    ],
)
def test_top_p_keeps_ties_at_the_cut(top_p, kept):
    with np.errstate(divide="ignore"):
        some = np.log(np.array([4, 2, 2, 8, 1, 15, 0, 0], np.float32))  # of 32
    logits = np.zeros((5000, 2), np.float32)  # the second column is flat: top-p must search
    logits[8:, 0], logits[:8, 0] = -inf, some
    for columns in (logits[:8, :1], logits):
        ours = warp(Sampling(1.0, top_p=top_p), columns)
        assert np.flatnonzero(np.isfinite(ours[:, 0])).tolist() == kept


# Draws.


def noise_for(seed, prompts, positions, vocab):
    """[V, prompts * positions], the positions of a prompt side by side."""
    where = np.broadcast_to(np.arange(positions, dtype=np.int32), (prompts, positions))
    key = jax.random.key(seed)
    noise = position_noise(key, np.arange(prompts, dtype=np.int32), where, vocab)
    return noise.reshape(-1, vocab).T


def p_value(counts, law):
    """Of a chi-square test; a token of law 0 must not occur."""
    counts, law = counts.ravel(), law.ravel()
    if counts[law == 0].any():
        return 0.0
    counts, law = counts[law > 0], law[law > 0]
    assert (law * counts.sum()).min() > 5
    return stats.chisquare(counts, law / law.sum() * counts.sum()).pvalue if len(law) > 1 else 1.0


LOGITS = np.log(np.array([0.05, 0.3, 0.08, 0.2, 0.2, 0.1, 0.07], np.float32))


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(1.0),
        Sampling(0.7),
        Sampling(1.0, top_p=0.65),
        Sampling(2.0, min_p=0.5),
        Sampling(1.5, top_k=5, top_p=0.8, min_p=0.3),
    ],
    ids=str,
)
def test_the_draw_has_the_filtered_law(sampling):
    prompts, positions, vocab = 400, 200, len(LOGITS)
    noise = noise_for(7, prompts, positions, vocab)
    columns = np.repeat(LOGITS[:, None], noise.shape[1], axis=1)
    tokens = np.asarray(draw(sampling, columns, noise)).reshape(prompts, positions)
    law = softmax(slow_warp(sampling, LOGITS)[0])
    counts = np.bincount(tokens.ravel(), minlength=vocab)
    assert p_value(counts, law) > FALSE_FAIL
    for first, second in [(tokens[:, :-1], tokens[:, 1:]), (tokens[:-1], tokens[1:])]:
        pairs = np.bincount((first * vocab + second).ravel(), minlength=vocab**2)
        assert p_value(pairs, np.outer(law, law)) > FALSE_FAIL
    near = softmax(LOGITS / (1.3 * sampling.temperature) + np.where(law > 0, 0, -inf))
    assert p_value(counts, near) < FALSE_FAIL  # so small a difference would be seen


def test_noise_is_a_function_of_seed_prompt_and_position():
    key, vocab = jax.random.key(5), 61
    prompts = np.array([9, 0, 3, 9], np.int32)
    positions = np.array([[4, 5, 6], [0, 9, 1000], [9, 3, 4], [6, 4, 70000]], np.int32)
    noise = np.asarray(position_noise(key, prompts, positions, vocab))
    seen = {}
    for i, j in itertools.product(range(4), range(3)):
        alone = position_noise(key, prompts[i : i + 1], positions[i : i + 1, j : j + 1], vocab)
        np.testing.assert_array_equal(noise[i, j], alone[0, 0])
        before = seen.setdefault((prompts[i], positions[i, j]), noise[i, j])
        np.testing.assert_array_equal(noise[i, j], before)
    assert len(seen) == len({x.tobytes() for x in seen.values()}) == 10
    other = np.asarray(position_noise(jax.random.key(6), prompts, positions, vocab))
    assert not (noise == other).any()


def test_a_draw_is_the_same_alone_and_in_a_batch():
    vocab, sampling = 1000, FILTERS["all"]
    logits = distributions(np.random.default_rng(3), vocab)
    noise = noise_for(0, 1, logits.shape[1], vocab)
    alone = [draw(sampling, logits[:, [m]], noise[:, [m]])[0] for m in range(logits.shape[1])]
    np.testing.assert_array_equal(draw(sampling, logits, noise), alone)


@pytest.mark.parametrize("vocab", [61, 300, 70_000])
def test_what_is_drawn_of_nans_is_in_the_vocabulary(vocab):
    for nan in (np.nan, -np.nan):
        logits = np.full((vocab, 3), nan, np.float32)
        assert (draw(Sampling(), logits, None) < vocab).all()
        assert (top_k(logits, 5)[1] < vocab).all()


@pytest.mark.parametrize("vocab", [3, 61, 5000])
def test_greedy_takes_the_first_of_the_largest(vocab):
    logits = awkward_columns(np.random.default_rng(vocab), vocab)
    np.testing.assert_array_equal(draw(Sampling(), logits, None), logits.argmax(axis=0))
    cold = Sampling(1e-6)  # differences of 1 become a million: noise decides between equals only
    noise = noise_for(0, 1, logits.shape[1], vocab)
    drawn = np.asarray(draw(cold, np.maximum(logits, -1e4), noise))
    picked = np.take_along_axis(logits, drawn[None], axis=0)[0]
    quantized = (logits == np.round(logits)).all(axis=0)
    np.testing.assert_array_equal(picked[quantized], logits.max(axis=0)[quantized])
