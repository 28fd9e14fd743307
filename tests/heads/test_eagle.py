"""The head of EAGLE-3 against a slow reference: rounds of any number of tokens, trees, and many anchors at once."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jspec.device import cache_dtype
from jspec.growth import Frontier, grow
from jspec.heads.eagle import (
    EagleHead,
    begin_draft,
    block_hidden,
    draft_level,
    empty_state,
    init_head,
    read_known,
)
from jspec.heads.eagle_published import to_tensors
from jspec.method import MethodState
from jspec.methods import eagle3
from jspec.tree import check
from tests.heads import eagle_reference as reference
from tests.heads.eagle_samples import KINDS, VOCAB, config, head_and_target, output_rows
from tests.oracles import paths_of, rows_of

CAPACITY, ROWS = 24, 6

read = partial(jax.jit, static_argnums=0)(read_known)
anchored = partial(jax.jit, static_argnums=0)(block_hidden)


@partial(jax.jit, static_argnums=(0, 1))
def propose(method, stops, head, target, state, roots):
    params = {"head": head, "target": target}
    return method.propose(params, MethodState(rows=state), roots, stops)[0]


def states(rng, *shape):
    return (3 * rng.standard_normal(shape)).astype(np.float32)


def poisoned(rng, x, counts, bad):
    """Entries beyond the counts are what nobody should read."""
    beyond = np.arange(x.shape[1]) >= counts[:, None]
    beyond = beyond.reshape(*beyond.shape, *[1] * (x.ndim - 2))
    return np.where(beyond, rng.choice(bad, size=x.shape), x).astype(x.dtype)


def rounds(kind, head, target, seed):
    """Yields (state, known tokens and taps of each row) after each of some rounds of unequal rows."""
    rng = np.random.default_rng(seed)
    batch = 3
    state = empty_state(kind, batch, CAPACITY)
    known = [(np.zeros(0, np.int32), np.zeros((0, kind.tap_count, kind.hidden_size)))] * batch
    for counts in ([0, 6, 1], [1, 0, 0], [3, 2, 6], [6, 6, 1], [1, 4, 6]):
        counts = np.asarray(counts, np.int32)
        taps = states(rng, batch, ROWS, kind.tap_count, kind.hidden_size)
        tokens = rng.integers(0, VOCAB, (batch, ROWS)).astype(np.int32)
        shown = (
            poisoned(rng, tokens, counts, [-1, 0, 1 << 30]),
            poisoned(rng, taps, counts, [np.nan, np.inf, 1e30, -1e30]),
        )
        state = read(kind, head, target, state, *shown, counts)
        known = [
            (np.concatenate([k[0], t[:n]]), np.concatenate([k[1], f[:n]]))
            for k, t, f, n in zip(known, tokens, taps, counts)
        ]
        yield state, known


def slow_tree(kind, head, target, known, root, *shape):
    tensors, (tokens, taps) = to_tensors(kind, head), known
    output, ids = output_rows(kind, head, target)
    text = [*tokens.tolist(), root]

    def children(path):
        found = reference.features(kind, tensors, target["embed"], taps, text, path)
        return dict(zip(ids.tolist(), reference.log_probs(kind, tensors, output, found[-1])))

    return reference.dynamic_tree(children, *shape)


def same_tree(nodes, expected):
    found = {path: score for path, score, _ in paths_of(nodes)}
    assert found.keys() == expected.keys()
    for path, score in found.items():
        assert score == pytest.approx(expected[path], abs=1e-5 * max(len(path), 1) + 1e-5)


@pytest.mark.parametrize("name", KINDS)
def test_trees_are_those_of_the_reference_after_any_rounds(name):
    kind = KINDS[name]
    head, target = head_and_target(kind)
    roots = np.asarray([5, 60, 17], np.int32)
    shape = {"whole": (20, 4, 3), "narrow": (9, 3, 10)}.get(name, (12, 3, 4))
    method = eagle3(kind, *shape)
    for state, known in rounds(kind, head, target, seed=1):
        tree = propose(method, None, head, target, state, roots).tree
        check(tree)
        for nodes, text, root in zip(rows_of(tree), known, roots.tolist()):
            same_tree(nodes, slow_tree(kind, head, target, text, root, *shape))
    assert state.known.tolist() == [len(k) for k, _ in known] == [11, 18, 14]


def test_what_stands_beyond_the_known_rows_changes_nothing():
    kind = KINDS["whole"]
    head, target = head_and_target(kind)
    method, roots = eagle3(kind, 16, 3, 4), jnp.asarray([1, 2, 3])
    *_, (state, _), _ = rounds(kind, head, target, seed=2)
    stale = (jnp.arange(CAPACITY) >= state.cache.length[:, None])[:, None, :, None]
    cache = dataclasses.replace(
        state.cache,
        keys=(jnp.where(stale, jnp.nan, state.cache.keys[0]),),
        values=(jnp.where(stale, 1e30, state.cache.values[0]),),
    )
    dirty = state._replace(cache=cache)
    clean, same = (propose(method, None, head, target, s, roots).tree for s in (state, dirty))
    jax.tree.map(np.testing.assert_array_equal, clean, same)
    taps = np.full((3, ROWS, kind.tap_count, kind.hidden_size), np.nan, np.float32)
    tokens = np.full((3, ROWS), 1 << 30, np.int32)
    unread = read(kind, head, target, dirty, tokens, taps, jnp.zeros(3, jnp.int32))
    jax.tree.map(np.testing.assert_array_equal, unread, dirty)


def test_tokens_taken_in_at_once_or_one_by_one_are_the_same():
    kind = KINDS["narrow"]
    head, target = head_and_target(kind)
    rng = np.random.default_rng(3)
    taps = states(rng, 1, ROWS, kind.tap_count, kind.hidden_size)
    tokens = rng.integers(0, VOCAB, (1, ROWS)).astype(np.int32)
    whole = read(kind, head, target, empty_state(kind, 1, 8), tokens, taps, np.array([ROWS]))
    single = empty_state(kind, 1, 8)
    for i in range(ROWS):
        one = tokens[:, i : i + 1], taps[:, i : i + 1]
        single = read(kind, head, target, single, *one, np.array([1]))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), whole, single)
    assert whole.cache.length.tolist() == [ROWS - 1]


def test_a_level_that_is_not_wanted_is_not_run():
    kind = KINDS["whole"]
    head, target = head_and_target(kind)
    *_, (state, known) = rounds(kind, head, target, seed=4)
    roots = np.asarray([9, 8, 7], np.int32)
    method = eagle3(kind, 20, 4, 3)
    for rows in ([4, 2, 0], [0, 1, 1]):
        rows = jnp.asarray(rows)
        found = propose(
            method, lambda level, scores, rows=rows: level < rows, head, target, state, roots
        )
        assert int(found.passes) == int(rows.max())
        for row, nodes in enumerate(rows_of(found.tree)):
            depth = int(rows[row])
            root = int(roots[row])
            same_tree(nodes, slow_tree(kind, head, target, known[row], root, 20, depth, 3))


def test_a_pass_that_is_skipped_does_not_run():
    kind = KINDS["whole"]
    head, target = head_and_target(kind)
    state, roots, runs = empty_state(kind, 2, 8), jnp.asarray([1, 2]), []

    def counted(*args):
        jax.debug.callback(lambda: runs.append(1))
        return draft_level(kind, head, target, state, 3, *args)

    @jax.jit
    def passes(limit):
        def stops(level, scores):
            return jnp.broadcast_to(level < limit, scores.shape[:1])

        return grow(counted, begin_draft(state, 4, 3), roots, 4, 3, 9, stops)[1].passes

    for limit in (0, 2):
        runs.clear()
        assert int(passes(limit)) == limit
        jax.effects_barrier()
        assert len(runs) == limit


def test_ties_go_to_the_shallower_then_to_the_lower_index():
    """All draft tokens are equally likely: levels fill up in order."""
    kind = KINDS["narrow"]
    head, target = head_and_target(kind)
    head = head | {"output": jnp.zeros_like(head["output"])}
    tree = propose(
        eagle3(kind, 9, 3, 4), None, head, target, empty_state(kind, 1, 8), jnp.array([3])
    )
    ids = np.asarray(head["draft_ids"]).tolist()
    assert tree.tree.tokens[0].tolist() == [3, *ids[:4], *ids[:4]]
    assert tree.tree.parents[0].tolist() == [-1, 0, 0, 0, 0, 1, 1, 1, 1]


ANCHORS = np.asarray([[0, 9, -1, 5, 5], [13, 1, 12, -7, 2]], np.int32)
LENGTH = 18


def texts(kind, seed=5):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, VOCAB, (2, LENGTH)).astype(np.int32)
    return states(rng, 2, LENGTH, kind.tap_count, kind.hidden_size), tokens


def close(found, expected):
    np.testing.assert_allclose(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", KINDS)
def test_every_anchor_sees_what_a_draft_of_its_text_would_see(name):
    kind = KINDS[name]
    head, target = head_and_target(kind)
    taps, tokens = texts(kind)
    found = np.asarray(anchored(kind, head, target, taps, tokens, ANCHORS))
    assert np.isfinite(found).all()
    blocks = found.reshape(kind.hidden_size, *ANCHORS.shape, kind.steps)
    tensors = to_tensors(kind, head)
    for text, slot in zip(*np.nonzero(ANCHORS >= 0)):
        at = ANCHORS[text, slot]
        path = tokens[text, at + 1 : at + kind.steps].tolist()
        known = tokens[text, : at + 1].tolist()
        want = reference.features(kind, tensors, target["embed"], taps[text, :at], known, path)
        want = reference.norm(want, np.asarray(tensors["norm.weight"]), kind.norm_eps)
        close(blocks[:, text, slot], want.T)
    one = anchored(kind, head, target, taps[1], tokens[1], ANCHORS[1])
    close(one, blocks[:, 1].reshape(kind.hidden_size, -1))


def test_states_at_and_after_an_anchor_are_never_seen():
    kind = KINDS["whole"]
    head, target = head_and_target(kind)
    taps, tokens = texts(kind)
    anchors = np.asarray([[5, 4, -1, 5, 5], [5, 1, 2, 0, 2]], np.int32)
    found = anchored(kind, head, target, taps, tokens, anchors)
    at = np.arange(LENGTH)
    other = np.where((at >= 5)[:, None, None], 1e4, taps), np.where(at > 4 + kind.steps, 0, tokens)
    other = anchored(kind, head, target, *other, anchors)
    np.testing.assert_array_equal(found, other)


def forced(kind, head, target, taps, tokens, at):
    """The features' drafting states of a draft that is fed a text's own tokens, by the passes that decoding runs."""
    state = empty_state(kind, 1, LENGTH)
    counts = jnp.asarray([at])
    state = read_known(kind, head, target, state, tokens[None, :at], taps[None, :at], counts)
    draft = begin_draft(state, kind.steps, 1)
    module = nnx.merge(
        nnx.split(EagleHead(kind, nnx.Rngs(0)))[0], {k: head[k] for k in head if k != "draft_ids"}
    )
    out = []
    zero = jnp.zeros((1, 1), jnp.int32)
    for step in range(kind.steps):
        token = tokens[None, None, at + step]
        frontier = Frontier(token, zero, zero, zero + step, jnp.zeros((1, 1)), zero == 0)
        _, draft = draft_level(kind, head, target, state, 1, draft, frontier)
        out.append(module.drafting(draft.features[0].T)[:, 0])
    return jnp.stack(out, axis=1)


@pytest.mark.parametrize("name", [pytest.param("whole", marks=pytest.mark.slow), "narrow"])
def test_training_is_drafting_and_so_are_its_gradients(name):
    kind = KINDS[name]
    head, target = head_and_target(kind)
    weights = {name: x for name, x in head.items() if name != "draft_ids"}
    ids = {name: x for name, x in head.items() if name == "draft_ids"}
    taps, tokens = map(jnp.asarray, texts(kind))
    at, pull = 9, np.random.default_rng(6).standard_normal((kind.hidden_size, kind.steps))

    def training(weights):
        head, anchors = weights | ids, jnp.asarray([at, -1])
        hidden = block_hidden(kind, head, target, taps[0], tokens[0], anchors)
        return (hidden[:, : kind.steps] * pull).sum()

    def drafting(weights):
        return (forced(kind, weights | ids, target, taps[0], tokens[0], at) * pull).sum()

    (a, ours), (b, theirs) = (jax.jit(jax.value_and_grad(f))(weights) for f in (training, drafting))
    np.testing.assert_allclose(a, b, rtol=1e-4)
    flat = zip(jax.tree.leaves_with_path(ours), jax.tree.leaves(theirs), strict=True)
    for (path, mine), its in flat:
        assert (np.abs(its).max() > 0) == (path[0].key != "output")
        np.testing.assert_allclose(mine, its, atol=1e-4 * np.abs(its).max() + 1e-12)


def test_half_precision():
    kind = KINDS["whole"]
    head, target = head_and_target(kind, dtype=jnp.bfloat16)
    taps, tokens = texts(kind)
    taps = taps.astype(jnp.bfloat16)
    state = empty_state(kind, 1, CAPACITY, cache_dtype(jnp.bfloat16))
    shown = tokens[:1, :ROWS], taps[:1, :ROWS]
    state = read(kind, head, target, state, *shown, np.asarray([ROWS]))
    assert state.feature.dtype == jnp.float32
    tree = propose(eagle3(kind, 9, 3, 3), None, head, target, state, jnp.asarray([5])).tree
    check(tree)
    trained_on = anchored(kind, head, target, taps[0], tokens[0], jnp.asarray([ROWS]))
    tensors = {k: np.asarray(x, np.float32) for k, x in to_tensors(kind, head).items()}
    known, path = tokens[0, : ROWS + 1].tolist(), tokens[0, ROWS + 1 : ROWS + kind.steps].tolist()
    embed = np.asarray(target["embed"], np.float32)
    given = np.asarray(taps[0, :ROWS], np.float32)
    want = reference.features(kind, tensors, embed, given, known, path)
    want = reference.norm(want, tensors["norm.weight"], kind.norm_eps)
    np.testing.assert_allclose(np.asarray(trained_on), want.T, atol=0.2)


def test_a_new_head_is_a_plain_pytree_that_depends_on_its_key():
    kind = config()
    head, other = (init_head(kind, jax.random.key(seed)) for seed in (0, 1))
    assert set(head) == {"fc", "layer", "norm", "output"}
    assert head["fc"].shape == (32, 96) and head["layer"]["qkv"].shape == (2, 4, 8, 64)
    assert head["output"].shape == (VOCAB, 32)
    assert set(init_head(KINDS["eagle2"], jax.random.key(0))) == {"fc", "layer", "norm"}
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(head))
    drawn = [not np.allclose(a, b) for a, b in zip(*map(jax.tree.leaves, (head, other)))]
    assert drawn == [x.ndim > 1 for x in jax.tree.leaves(head)]
    assert abs(float(head["fc"].std()) * 96**0.5 - 1) < 0.1  # variance 1 / inputs
    assert issubclass(EagleHead, nnx.Module)
