"""The head against a slow reference: rounds of any number of accepted tokens, and many anchors at once."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jspec.heads.parallel import (
    ParallelHead,
    block_hidden,
    draft_block,
    draft_table,
    empty_cache,
    init_head,
    read_context,
    trained,
)
from jspec.heads.published import to_tensors
from tests.heads import reference
from tests.heads.samples import KINDS, VOCAB, config, head_and_target

CAPACITY, ROWS = 24, 6

read = partial(jax.jit, static_argnums=0)(read_context)
draft = partial(jax.jit, static_argnums=(0, 5))(draft_block)
table = partial(jax.jit, static_argnums=(0, 5, 6))(draft_table)
anchored = partial(jax.jit, static_argnums=0)(block_hidden)


def states(rng, *shape):
    return (3 * rng.standard_normal(shape)).astype(np.float32)


def wanted(kind, head, target, taps, root, slots=None):
    """[H, slots], as the reference has it for a block of so many slots."""
    slots = kind.depth if slots is None else slots
    out = reference.block(kind, to_tensors(kind, head), target["embed"], taps, root, slots)
    return out.T.astype(np.float32)


def close(found, expected):
    np.testing.assert_allclose(found, expected, atol=1e-5, rtol=1e-5)


def poisoned(rng, taps, counts):
    """Rows beyond the counts are what nobody should read."""
    bad = rng.choice([np.nan, np.inf, 1e30, -1e30], size=taps.shape)
    beyond = np.arange(taps.shape[1]) >= counts[:, None]
    return np.where(beyond[..., None, None], bad, taps).astype(np.float32)


def rounds(kind, head, seed):
    """Yields (cache, known taps of each row) after each of some rounds of unequal rows."""
    rng = np.random.default_rng(seed)
    batch = 3
    cache = empty_cache(kind, batch, CAPACITY)
    known = [np.zeros((0, len(kind.taps), kind.hidden_size), np.float32)] * batch
    for counts in ([0, 6, 5], [1, 0, 6], [3, 2, 6], [6, 6, 1], [0, 4, 6]):
        counts = np.asarray(counts, np.int32)
        taps = states(rng, batch, ROWS, len(kind.taps), kind.hidden_size)
        cache = read(kind, head, cache, poisoned(rng, taps, counts), counts)
        known = [np.concatenate([k, t[:n]]) for k, t, n in zip(known, taps, counts)]
        yield cache, known


@pytest.mark.parametrize("name", KINDS)
def test_drafts_are_those_of_the_reference_after_any_rounds(name):
    kind = KINDS[name]
    head, target = head_and_target(kind)
    roots = np.asarray([5, 60, 17], np.int32)
    for cache, known in rounds(kind, head, seed=1):
        assert cache.length.tolist() == [len(k) for k in known]
        found = draft(kind, head, target, cache, roots, kind.depth)
        assert found.shape == (kind.hidden_size, 3 * kind.depth)
        each = np.split(np.asarray(found), 3, axis=1)
        for states, taps, root in zip(each, known, roots):
            close(states, wanted(kind, head, target, taps, root))
    assert max(len(k) for k in known) == CAPACITY  # the cache was filled


@pytest.mark.parametrize("name", ["bidirectional", "windows"])
def test_what_stands_beyond_the_known_rows_changes_nothing(name):
    kind = KINDS[name]
    head, target = head_and_target(kind)
    roots = jnp.asarray([1, 2, 3])
    *_, (cache, _), _ = rounds(kind, head, seed=2)
    stale = (jnp.arange(CAPACITY) >= cache.length[:, None])[:, None, :, None]
    assert stale.any(axis=2).all()
    dirty = dataclasses.replace(
        cache,
        keys=tuple(jnp.where(stale, jnp.nan, k) for k in cache.keys),
        values=tuple(jnp.where(stale, 1e30, v) for v in cache.values),
    )
    clean, same = (draft(kind, head, target, c, roots, kind.depth) for c in (cache, dirty))
    np.testing.assert_array_equal(clean, same)
    taps = np.full((3, ROWS, len(kind.taps), kind.hidden_size), np.nan, np.float32)
    unread = read(kind, head, dirty, taps, jnp.zeros(3, jnp.int32))
    jax.tree.map(np.testing.assert_array_equal, unread, dirty)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("depth", [1, 2])
def test_a_shallower_draft_is_the_beginning_of_the_whole_one(name, depth):
    kind = KINDS[name]
    head, target = head_and_target(kind)
    roots = np.asarray([7, 8, 9], np.int32)
    *_, (cache, known), _, _ = rounds(kind, head, seed=3)
    found = np.split(np.asarray(draft(kind, head, target, cache, roots, depth)), 3, axis=1)
    for states, taps, root in zip(found, known, roots):
        assert states.shape == (kind.hidden_size, depth)
        close(states, wanted(kind, head, target, taps, root)[:, :depth])
        smaller = wanted(kind, head, target, taps, root, slots=depth)
        assert np.allclose(states, smaller, atol=1e-5) == kind.causal


@pytest.mark.parametrize("depth", [0, 5])
def test_depths_beyond_the_block_are_refused(depth):
    kind = KINDS["causal"]
    head, target = head_and_target(kind)
    with pytest.raises(ValueError, match=rf"depth must be in 1\.\.4, .* got {depth}"):
        draft_block(kind, head, target, empty_cache(kind, 1, 8), jnp.asarray([1]), depth)


@pytest.mark.parametrize("name", ["causal", "narrow"])
def test_the_table_ranks_all_that_can_be_drafted(name):
    kind = KINDS[name]
    head, target = head_and_target(kind)
    *_, (cache, known) = rounds(kind, head, seed=4)
    roots = np.asarray([9, 8, 7], np.int32)
    width = 6
    found = table(kind, head, target, cache, roots, kind.depth, width)
    assert found.tokens.shape == found.logps.shape == (3, kind.depth, width)
    ids = np.asarray(head["draft_ids"]) if "draft_ids" in head else np.arange(VOCAB)
    for row, taps in enumerate(known):
        logits = (
            wanted(kind, head, target, taps, roots[row]).T @ np.asarray(target["lm_head"])[ids].T
        )
        logps = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        order = np.argsort(-logps, axis=1, kind="stable")[:, :width]
        best = np.take_along_axis(logps, order, axis=1)
        np.testing.assert_allclose(found.logps[row], best, atol=2e-5)
        clear = (np.diff(best, append=-np.inf, axis=1) < -1e-4) & (
            np.diff(best, prepend=np.inf, axis=1) < -1e-4
        )
        assert clear.mean() > 0.8
        np.testing.assert_array_equal(np.asarray(found.tokens[row])[clear], ids[order][clear])


def test_ties_in_the_table_go_to_the_lower_index():
    kind = KINDS["narrow"]
    head, target = head_and_target(kind)
    head["lm_head"] = head["lm_head"].at[5:].set(head["lm_head"][5])
    found = table(kind, head, target, empty_cache(kind, 1, 8), jnp.asarray([3]), kind.depth, 23)
    ties = np.asarray(head["draft_ids"])[5:]
    for tokens, logps in zip(found.tokens[0], found.logps[0]):
        tied = np.isin(tokens, ties)
        assert tokens[tied].tolist() == ties.tolist()
        assert (np.diff(logps) <= 0).all()


ANCHORS = np.asarray([[0, 9, -1, 5, 5], [13, 1, 12, -7, 2]], np.int32)
LENGTH = 14


def texts(kind, seed=5):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, VOCAB, (2, LENGTH)).astype(np.int32)
    return states(rng, 2, LENGTH, len(kind.taps), kind.hidden_size), tokens


@pytest.mark.parametrize("name", KINDS)
def test_every_anchor_sees_what_a_draft_there_would_see(name):
    kind = KINDS[name]
    head, target = head_and_target(kind)
    taps, tokens = texts(kind)
    found = np.asarray(anchored(kind, head, target, taps, tokens, ANCHORS))
    assert np.isfinite(found).all()
    blocks = found.reshape(kind.hidden_size, *ANCHORS.shape, kind.depth)
    for text, slot in zip(*np.nonzero(ANCHORS >= 0)):
        at = ANCHORS[text, slot]
        states, root = taps[text, :at], tokens[text, at]
        close(blocks[:, text, slot], wanted(kind, head, target, states, root))
    one = anchored(kind, head, target, taps[1], tokens[1], ANCHORS[1])
    close(one, blocks[:, 1].reshape(kind.hidden_size, -1))


def test_states_at_and_after_an_anchor_are_never_seen():
    kind = KINDS["bidirectional"]
    head, target = head_and_target(kind)
    taps, tokens = texts(kind)
    anchors = np.asarray([[5, 4, -1, 5, 5], [5, 1, 2, 0, 2]], np.int32)
    found = anchored(kind, head, target, taps, tokens, anchors)
    later = np.arange(LENGTH) >= 5
    other = np.where(later[:, None, None], 1e4, taps), np.where(np.arange(LENGTH) > 5, 0, tokens)
    other = anchored(kind, head, target, *other, anchors)
    np.testing.assert_array_equal(found, other)


@pytest.mark.parametrize("name", ["bidirectional", "windows"])
def test_gradients_are_those_of_drafting(name):
    kind = KINDS[name]
    head, target = head_and_target(kind)
    taps, tokens = texts(kind)
    at, pull = 9, np.random.default_rng(6).standard_normal((kind.hidden_size, kind.depth))
    taps, tokens, anchors = jnp.asarray(taps), jnp.asarray(tokens), jnp.asarray([at, -1])

    def training(head):
        hidden = block_hidden(kind, head, target, taps[0], tokens[0], anchors)
        return (hidden[:, : kind.depth] * pull).sum()

    def drafting(head):
        cache = read_context(kind, head, empty_cache(kind, 1, LENGTH), taps[:1], jnp.asarray([at]))
        root = jnp.asarray(tokens[0, at : at + 1])
        return (draft_block(kind, head, target, cache, root, kind.depth) * pull).sum()

    ours, theirs = jax.jit(jax.grad(training))(head), jax.jit(jax.grad(drafting))(head)
    for mine, its in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert np.abs(its).max() > 0
        np.testing.assert_allclose(mine, its, atol=1e-4 * np.abs(its).max())


def test_half_precision():
    kind = KINDS["narrow"]
    head, target = head_and_target(kind, dtype=jnp.bfloat16)
    assert {x.dtype for x in jax.tree.leaves(trained(head))} == {jnp.dtype(jnp.bfloat16)}
    taps, tokens = texts(kind)
    taps = taps.astype(jnp.bfloat16)
    cache = empty_cache(kind, 1, CAPACITY, jnp.bfloat16)
    cache = read(kind, head, cache, taps[:1, :ROWS], jnp.asarray([ROWS]))
    root = jnp.asarray(tokens[0, ROWS : ROWS + 1])
    found = draft(kind, head, target, cache, root, kind.depth)
    trained_on = anchored(kind, head, target, taps[0], tokens[0], jnp.asarray([ROWS]))
    assert found.dtype == trained_on.dtype == jnp.float32
    expected = wanted(kind, head, target, taps[0, :ROWS], int(root[0]))
    for states in (found, trained_on):
        np.testing.assert_allclose(states.astype(jnp.float32), expected, atol=0.15)
    logps = table(kind, head, target, cache, root, kind.depth, 3).logps
    assert logps.dtype == jnp.float32


def test_a_new_head_is_a_plain_pytree_that_depends_on_its_key():
    kind = config(num_layers=1)
    head, other = (init_head(kind, jax.random.key(seed)) for seed in (0, 1))
    assert set(head) == {"fc", "hidden_norm", "layers", "norm"} and set(head["layers"]) == {0}
    assert head["fc"].shape == (32, 64)
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(head))
    drawn = [not np.allclose(a, b) for a, b in zip(*map(jax.tree.leaves, (head, other)))]
    assert drawn == [x.ndim > 1 for x in jax.tree.leaves(head)]
    leaves = [np.asarray(x).ravel()[:8].tobytes() for x in jax.tree.leaves(head) if x.ndim > 1]
    assert len(set(leaves)) == len(leaves)  # no key is used twice
    assert abs(float(head["fc"].std()) * 8 - 1) < 0.1  # variance 1 / inputs
    assert issubclass(ParallelHead, nnx.Module)
