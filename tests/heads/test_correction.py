"""The correction against a slow reference and torch's GRU: alone, in training, and in trees of domino and dartree."""

import dataclasses
import functools
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jspec.heads.correction import gru_step, path_part, read_tokens, slot_part, taught_inputs
from jspec.heads.parallel import draft_logits, empty_cache, init_head
from jspec.heads.published import to_tensors
from jspec.method import MethodState
from jspec.methods import dartree, dflash, domino
from jspec.tree import check
from tests.heads import reference
from tests.heads.samples import KINDS, VOCAB, head_and_target
from tests.heads.test_parallel import CAPACITY, rounds

GOLDEN = Path(__file__).parent / "golden_gru.safetensors"
DOMINOS = {name: kind for name, kind in KINDS.items() if kind.correction}
inf = float("inf")

both = pytest.mark.parametrize("name", DOMINOS)


def vocabulary(kind, head, target):
    """The target's ids of the draft vocabulary, and their output rows."""
    ids = np.asarray(head["draft_ids"]) if "draft_ids" in head else np.arange(VOCAB)
    return ids, np.asarray(target["lm_head"])[ids]


# The GRU.


def gru_states(weights, embedded):
    """[n, G, M]: the states after each of n tokens [n, H, M]."""
    state = jnp.zeros((weights["gru_state"].shape[1], embedded.shape[2]))
    states = []
    for one in embedded:
        state = gru_step(weights, weights["gru_in"] @ one, state)
        states.append(state)
    return jnp.stack(states)


def test_the_gru_is_torch_s():
    golden = load_file(GOLDEN)
    weights = {"gru_in": golden["weight_ih"], "gru_state": golden["weight_hh"]}
    found = gru_states(jax.tree.map(jnp.asarray, weights), golden["inputs"].swapaxes(1, 2))
    np.testing.assert_allclose(found.swapaxes(1, 2), golden["states"], atol=1e-6)
    assert np.abs(golden["states"]).max() > 0.5  # gates that matter


@pytest.mark.parity
@pytest.mark.filterwarnings("ignore")
def test_golden_is_what_torch_computes_now():
    pytest.importorskip("torch")
    from tests.heads.make_gru_golden import make

    golden, live = load_file(GOLDEN), make()
    assert golden.keys() == live.keys()
    for key, value in live.items():
        np.testing.assert_allclose(golden[key], value, atol=1e-6)


@both
def test_states_of_paths_are_those_of_the_reference(name):
    kind = DOMINOS[name]
    head, target = head_and_target(kind)
    tensors = to_tensors(kind, head)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, VOCAB, (6, 5)).astype(np.int32)
    states = jnp.zeros((kind.correction.gru_size, 5))
    want = [np.zeros(kind.correction.gru_size)] * 5
    for step in tokens:
        states = gru_step(head["correction"], read_tokens(head, target, jnp.asarray(step)), states)
        embedded = np.asarray(target["embed"], np.float64)[step]
        want = [reference.read_token(tensors, e, w) for e, w in zip(embedded, want)]
        np.testing.assert_allclose(states.T, want, atol=1e-5)


@both
def test_teacher_forced_logits_are_those_of_each_path(name):
    kind = DOMINOS[name]
    head, target = head_and_target(kind)
    tensors = to_tensors(kind, head)
    ids, output = vocabulary(kind, head, target)
    rng = np.random.default_rng(1)
    anchors, depth = 4, kind.depth
    hidden = rng.standard_normal((kind.hidden_size, anchors * depth)).astype(np.float32)
    roots = rng.integers(0, VOCAB, anchors).astype(np.int32)
    labels = rng.integers(0, VOCAB, (anchors, depth)).astype(np.int32)
    labels[1, depth - 1] = -1  # beyond a text's end
    given = map(jnp.asarray, (hidden, roots, labels))
    taught = jax.jit(partial(taught_inputs, kind))(head, target, *given)
    assert np.isfinite(taught).all()
    logits = draft_logits(head, target, jnp.asarray(hidden)) + head["correction"]["up"] @ taught
    assert logits.shape == (len(ids), anchors * depth)
    for a in range(anchors):
        for slot in range(depth):
            path = [roots[a], *labels[a, :slot]]
            column = a * depth + slot
            want = reference.path_logits(
                kind, tensors, target["embed"], output, hidden[:, column].astype(np.float64), path
            )
            np.testing.assert_allclose(logits[:, column], want, atol=2e-5, rtol=1e-5)


def test_a_new_head_is_not_corrected_yet():
    kind = DOMINOS["domino"]
    head = init_head(kind, jax.random.key(0))
    assert not head["correction"]["up"].any() and head["correction"]["down"].all()


# Trees.


@partial(jax.jit, static_argnums=(0, 4))
def _propose(method, params, state, roots, keep_growing):
    return method.propose(params, state, roots, keep_growing)[0]


def propose(head, target, method, cache, roots, keep_growing=None):
    params = {"head": head, "target": target}
    return _propose(method, params, MethodState(rows=cache), jnp.asarray(roots), keep_growing)


def paths_of(tree, row):
    """{path: score} of a tree's row."""
    paths, out = [], {}
    tokens, parents, scores = (np.asarray(x)[row] for x in (tree.tokens, tree.parents, tree.scores))
    for i in range(int(tree.size[row])):
        path = () if i == 0 else (*paths[parents[i]], int(tokens[i]))
        paths.append(path)
        out[path] = float(scores[i])
    return out


def reference_states(kind, head, target, taps, root, depth):
    slots = depth if kind.causal else kind.depth
    tensors = to_tensors(kind, head)
    return reference.block(kind, tensors, target["embed"], taps, root, slots)[:depth]


@functools.cache
def all_rounds(kind):
    """(head, target, cache, known taps of each row, roots) after each of five rounds."""
    head, target = head_and_target(kind)
    roots = np.asarray([5, 60, 17], np.int32)
    return [(head, target, cache, known, roots) for cache, known in rounds(kind, head, seed=1)]


@both
def test_domino_drafts_the_chain_of_the_reference_after_any_rounds(name):
    kind = DOMINOS[name]
    method = domino(kind, 8)
    changed = 0
    for head, target, cache, known, roots in all_rounds(kind):
        ids, output = vocabulary(kind, head, target)
        proposal = propose(head, target, method, cache, roots)
        check(proposal.tree)
        assert int(proposal.passes) == kind.depth and proposal.tree.budget == kind.depth + 1
        base = propose(head, target, dflash(kind, 8), cache, roots).tree
        for row, taps in enumerate(known):
            states = reference_states(kind, head, target, taps, roots[row], kind.depth)
            arrays = to_tensors(kind, head), target["embed"], output, ids
            tokens, scores = reference.chain(kind, *arrays, states, int(roots[row]))
            found = paths_of(proposal.tree, row)
            assert list(found) == [tuple(tokens[:i]) for i in range(kind.depth + 1)]
            np.testing.assert_allclose(list(found.values())[1:], scores, atol=1e-4)
            changed += found.keys() != paths_of(base, row).keys()
            first = slice(1, 1 + kind.correction.prefix)
            np.testing.assert_array_equal(proposal.tree.tokens[row, first], base.tokens[row, first])
    assert changed > 5  # corrections that matter


SHAPES = [  # budget, depth, width, candidates, variant, whether all tokens have a part in the probabilities
    (20, None, 5, 9, "pruned", False),
    (14, None, None, 7, "fixed", True),
    pytest.param(8, None, None, 64, "pruned", True, marks=pytest.mark.slow),
    pytest.param(64, 2, 12, 64, "pruned", False, marks=pytest.mark.slow),
    pytest.param(5, 3, 2, 3, "pruned", True, marks=pytest.mark.slow),
    pytest.param(9, None, None, 64, "fixed", False, marks=pytest.mark.slow),
]


@both
@pytest.mark.parametrize(("budget", "depth", "width", "candidates", "variant", "whole"), SHAPES)
def test_dartree_equals_the_reference_node_by_node(
    name, budget, depth, width, candidates, variant, whole
):
    kind = DOMINOS[name]
    options = {"candidates": candidates, "normalise": "vocabulary" if whole else "candidates"}
    method = dartree(kind, budget, depth, width, variant=variant, **options)
    deepest = min(depth or kind.depth, budget - 1)
    nodes = budget - 1
    if variant == "fixed":
        keeps = []
        for left in range(deepest, 0, -1):
            keeps.append(-(-(nodes - sum(keeps)) // left))
        penalty = 0.0
    else:
        widest = -(-nodes // deepest)
        keeps, penalty = [min(width or max(12, 3 * widest), nodes)] * deepest, 0.2
    for head, target, cache, known, roots in all_rounds(kind):
        ids, output = vocabulary(kind, head, target)
        proposal = propose(head, target, method, cache, roots)
        check(proposal.tree)
        assert int(proposal.passes) == deepest and proposal.tree.budget <= budget
        for row, taps in enumerate(known):
            states = reference_states(kind, head, target, taps, roots[row], deepest)
            want = reference.tree(
                kind,
                to_tensors(kind, head),
                target["embed"],
                output,
                ids,
                states,
                int(roots[row]),
                budget,
                keeps,
                candidates,
                penalty,
                whole,
            )
            found = paths_of(proposal.tree, row)
            assert found.keys() == want.keys()
            for path, score in found.items():
                assert score == pytest.approx(want[path], abs=1e-4)


@both
def test_what_stands_beyond_the_known_rows_changes_no_tree(name):
    kind = DOMINOS[name]
    *_, (head, target, cache, _, roots), _ = all_rounds(kind)
    stale = (jnp.arange(CAPACITY) >= cache.length[:, None])[:, None, :, None]
    assert stale.any(axis=2).all()
    dirty = dataclasses.replace(
        cache,
        keys=tuple(jnp.where(stale, jnp.nan, k) for k in cache.keys),
        values=tuple(jnp.where(stale, 1e30, v) for v in cache.values),
    )
    for method in (domino(kind, 8), dartree(kind, 16), dartree(kind, 16, variant="fixed")):
        clean, same = (propose(head, target, method, c, roots).tree for c in (cache, dirty))
        jax.tree.map(np.testing.assert_array_equal, clean, same)


def test_rows_do_not_see_each_other():
    kind = DOMINOS["domino"]
    *_, (head, target, cache, _, roots) = all_rounds(kind)
    method = dartree(kind, 16)
    whole = propose(head, target, method, cache, roots).tree
    for row in range(3):
        alone = jax.tree.map(lambda x, row=row: x[row : row + 1], cache)
        tree = propose(head, target, method, alone, roots[row : row + 1]).tree
        assert paths_of(tree, 0).keys() == paths_of(whole, row).keys()


@pytest.mark.parametrize(
    "factory", [domino, partial(dartree, width=8), partial(dartree, variant="fixed")]
)
def test_a_row_that_should_not_grow_stops_and_its_levels_are_not_drafted(factory):
    kind = DOMINOS["domino"]
    *_, (head, target, cache, _, roots) = all_rounds(kind)
    method = factory(kind, 64)
    whole = propose(head, target, method, cache, roots).tree
    limits = np.asarray([0, 1, 2])

    def keep_growing(level, scores):
        assert scores.ndim == 2
        return level < limits

    proposal = propose(head, target, method, cache, roots, keep_growing)
    check(proposal.tree)
    assert int(proposal.passes) == 2
    for row, limit in enumerate(limits):
        want = {p: s for p, s in paths_of(whole, row).items() if len(p) <= limit}
        assert paths_of(proposal.tree, row) == pytest.approx(want)


@both
def test_a_head_that_is_no_number_drafts_nothing(name):
    kind = DOMINOS[name]
    *_, (head, target, cache, _, roots) = all_rounds(kind)
    bad = jnp.full_like(head["correction"]["gru_in"], jnp.nan)
    head = head | {"correction": head["correction"] | {"gru_in": bad}}
    for method in (domino(kind, 16), dartree(kind, 16)):
        tree = propose(head, target, method, cache, roots).tree
        check(tree)
        assert (np.asarray(tree.size) >= 2).all()  # the first drafts are not corrected
        assert int(tree.depths.max()) == kind.correction.prefix


def test_half_precision():
    kind = DOMINOS["causal domino"]
    head, target = head_and_target(kind, dtype=jnp.bfloat16)
    cache, root = empty_cache(kind, 1, 8), 5
    tensors, (ids, output) = to_tensors(kind, head), vocabulary(kind, head, target)
    states = reference_states(kind, head, target, np.zeros((0, 2, 32)), root, kind.depth)
    for method in (domino(kind, 8), dartree(kind, 16, normalise="vocabulary")):
        tree = propose(head, target, method, cache, np.asarray([root])).tree
        check(tree)
        found = paths_of(tree, 0)
        for path, score in found.items():
            if path:  # the reference's probability of the path's last token, whatever led to it
                arrays = kind, tensors, target["embed"], output, states[len(path) - 1]
                logits = reference.path_logits(*arrays, [root, *path[:-1]])
                want = reference.log_softmax(logits)[np.searchsorted(ids, path[-1])]
                assert score - found[path[:-1]] == pytest.approx(want, abs=0.3)


# Arguments.


def test_budgets_are_ceilings():
    kind = DOMINOS["domino"]
    assert domino(kind, 64) is domino(kind, 64, depth=kind.depth)
    assert dartree(kind, 64) is dartree(kind, 64, width=48, candidates=64)
    assert dartree(kind, 8) is dartree(kind, 8, width=99)
    assert dartree(kind, 8, candidates=99) is dartree(kind, 8, candidates=61)
    assert dartree(kind, 64).name == "dartree"
    assert dartree(kind, 64, variant="fixed").name == "dartree_fixed"
    for factory in (domino, dartree, partial(dartree, variant="fixed")):
        for budget, depth in ((1, 0), (2, 1), (4, 3), (64, 4)):
            method = factory(kind, budget)
            assert (method.budget, method.needs.depth) == (budget, depth)
            assert method.needs.taps == (kind.taps if depth else ())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": 0}, "budget must be .*, got 0"),
        ({"depth": 0}, "depth must be .*, got 0"),
        ({"depth": 5}, "depth must be at most 4, as far as the head drafts, got 5"),
        ({"width": 0}, "width must be .*, got 0"),
        ({"candidates": 0}, "candidates must be .*, got 0"),
        ({"variant": "wide"}, "variant must be 'pruned' or 'fixed', got 'wide'"),
        ({"normalise": "all"}, "normalise must be 'candidates' or 'vocabulary', got 'all'"),
        ({"depth_penalty": -0.2}, "depth_penalty must be finite and 0 or above, got -0.2"),
        ({"depth_penalty": inf}, "depth_penalty must be finite and 0 or above, got inf"),
        ({"variant": "fixed", "width": 4}, "the fixed variant has no width"),
    ],
)
def test_dartree_refuses_bad_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        dartree(DOMINOS["domino"], **{"budget": 8} | options)


@pytest.mark.parametrize("factory", [domino, dartree])
def test_a_head_without_a_correction_is_refused(factory):
    with pytest.raises(ValueError, match="has Domino's correction, and this one has none"):
        factory(KINDS["causal"], 8)


def test_parts_of_the_projection():
    kind = DOMINOS["domino"]
    head, _ = head_and_target(kind)
    rng = np.random.default_rng(3)
    z = rng.standard_normal((kind.hidden_size, 2)).astype(np.float32)
    s = rng.standard_normal((kind.correction.gru_size, 2)).astype(np.float32)
    whole = head["correction"]["down"] @ np.concatenate([z, s])
    found = slot_part(kind, head, jnp.asarray(z)) + path_part(kind, head, jnp.asarray(s))
    np.testing.assert_allclose(found, whole, atol=1e-5)
