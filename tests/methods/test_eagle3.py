"""EAGLE-3 in real rounds: equality with decoding, what it drafts from, replay, and a head that knows the answer."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.cost.table import make_cost
from jspec.decode import advance, propose
from jspec.driver import decode_all, outcome
from jspec.heads.eagle import best_drafts, block_hidden, init_head, with_draft_ids
from jspec.heads.eagle_config import eagle_config_for
from jspec.method import MethodState
from jspec.methods import ar, eagle3, graft, smart
from jspec.models.transformer import fuse
from jspec.prefill import _insert, _read_chunk, admit
from jspec.recording import record, replay, text_taps
from jspec.sampling import Sampling
from jspec.state import KVCache, Plan, new_state
from jspec.tree import check
from tests.test_equality import BUCKETS, FEW, SAMPLINGS, prompts, texts, unexcused

VOCAB, CAPACITY = 6, 256
LENGTHS = (9, 1, 40, 2, 23)

look = jax.jit(propose, static_argnums=0)


# Equality with autoregressive decoding.


@pytest.fixture(scope="module")
def tiny(tiny_model):
    config, params = tiny_model(eos_ids=(7,))
    head = eagle_config_for(config, taps=(0, 1, 2), draft_vocab_size=50)
    weights = with_draft_ids(init_head(head, jax.random.key(1)), {}, np.arange(3, 53))
    cost = make_cost(
        (1, 8, 64, 512), (0.03, 0.032, 0.05, 0.2), (0.001,) * 3, fit=(0, 0.05, 0.5, 0.1)
    )
    return config, head, {"target": fuse(config, params), "head": weights, "cost": cost}


@pytest.fixture(scope="module")
def reference(tiny):
    """``reference(name)``: autoregressive texts, one prompt at a time."""
    config, _, params = tiny
    queue = prompts(config.vocab_size)
    return functools.cache(lambda name: texts(config, params, ar(), SAMPLINGS[name], 1, queue))


QUICK = [(16, "top-p", 5)]
CASES = [
    pytest.param(*case, marks=[] if case in QUICK else [pytest.mark.slow])
    for case in itertools.product((1, 8, 16, 32, 60, 64), SAMPLINGS, (1, 5))
    if case[1] != "min-p" or case[0] == 16
]


@pytest.mark.parametrize(("budget", "name", "batch"), CASES)
def test_it_equals_autoregressive_decoding(tiny, reference, budget, name, batch):
    config, head, params = tiny
    queue, sampling = prompts(config.vocab_size), SAMPLINGS[name]
    buckets = BUCKETS if (budget, name, batch) in QUICK else FEW
    ours = texts(config, params, eagle3(head, budget, depth=6), sampling, batch, queue, buckets)
    assert not unexcused(config, params, sampling, queue, ours, reference(name))


QUICK_SMART = [("top-p", 3, "exact")]
SMART = [
    pytest.param(*case, marks=[] if case in QUICK_SMART else [pytest.mark.slow])
    for case in itertools.product(SAMPLINGS, (1, 3, 8), ("exact", "marginal"))
    if case[:2] == ("top-p", 3) or (case[2] == "exact" and case[0] != "min-p")
]


@pytest.mark.parametrize(("name", "batch", "rule"), SMART)
def test_smart_changes_nothing(tiny, reference, name, batch, rule):
    config, head, params = tiny
    queue, sampling = prompts(config.vocab_size), SAMPLINGS[name]
    method = smart(eagle3(head, 16, depth=5), rule=rule, queue=5)
    buckets = BUCKETS if (name, batch, rule) in QUICK_SMART else FEW
    ours = texts(config, params, method, sampling, batch, queue, buckets)
    assert not unexcused(config, params, sampling, queue, ours, reference(name))


QUICK_GRAFT = [(16, "top-p", 5, True)]
GRAFT = [
    pytest.param(*case, marks=[] if case in QUICK_GRAFT else [pytest.mark.slow])
    for case in itertools.product((8, 16, 32, 64), ("greedy", "top-p"), (1, 5), (False, True))
]


@pytest.mark.parametrize(("budget", "name", "batch", "under_smart"), GRAFT)
def test_graft_changes_nothing(tiny, reference, budget, name, batch, under_smart):
    """The paper's own setting; the thresholds prune some rounds and not others."""
    config, head, params = tiny
    queue, sampling = prompts(config.vocab_size), SAMPLINGS[name]
    method = graft(eagle3(head, budget, depth=6), thresholds=(0.3, 0.05, 1e-4))
    method = smart(method, queue=5) if under_smart else method
    buckets = BUCKETS if (budget, name, batch, under_smart) in QUICK_GRAFT else FEW
    ours = texts(config, params, method, sampling, batch, queue, buckets)
    assert not unexcused(config, params, sampling, queue, ours, reference(name))


def test_a_draft_that_graft_stops_takes_fewer_passes(tiny):
    config, head, params = tiny
    queue = prompts(config.vocab_size)
    options = {"max_new_tokens": 12, "capacity": CAPACITY, "batch": 5}
    passes = {}
    for limits in ((0.0, 0.0, 0.0), (0.0, 1.0, 0.0), (1.0, 0.0, 0.0)):
        plan = Plan(config, graft(eagle3(head, 8, depth=6), thresholds=limits), buckets=(1, 8, 64))
        done, run = decode_all(plan, params, queue[:5], **options)
        rounds = max(len(one.trace) for one in done)
        passes[limits] = int(run.state.draft_passes) / rounds
    assert list(passes.values()) == [6, 2, 1]


# Rounds, on a vocabulary so small that an untrained head's trees are often right.


@pytest.fixture(scope="module")
def small(tiny_model):
    config, params = tiny_model(vocab_size=VOCAB, eos_ids=(3,))
    return config, fuse(config, params)


@pytest.fixture(scope="module")
def drafted(small):
    """``drafted(seed, temperature, ...) -> (plan, head config, params)``; equal plans are compiled once."""
    config, target = small

    def make(seed=1, temperature=0.8, budget=16, depth=4, width=3, **overrides):
        head = eagle_config_for(config, **{"taps": (1, 0, 0), "steps": 4} | overrides)
        plan = Plan(config, eagle3(head, budget, depth, width), Sampling(temperature), buckets=())
        return plan, head, {"target": target, "head": init_head(head, jax.random.key(seed))}

    return make


def queue_of(lengths=LENGTHS, seed=0):
    return prompts(VOCAB, lengths, seed)


def admitted(plan, params):
    """A slot that is empty and one with a prompt, and the prompt."""
    [prompt] = queue_of([11])
    state = new_state(plan, params, 2, CAPACITY, jax.random.key(0), np.zeros((1, VOCAB), np.int32))
    return admit(plan, params, state, 1, prompt, 0, 24), prompt


def decode(plan, params, queue, **options):
    options = {"max_new_tokens": 30, "capacity": CAPACITY, "batch": 2, "seed": 4} | options
    return decode_all(plan, params, queue, **options)


def test_every_round_drafts_from_true_states_of_all_that_is_known(drafted):
    """Chains are those of the training pass over the whole text's taps, which has no cache and saw no draft."""
    plan, head, params = drafted(width=1, budget=5)
    state, prompt = admitted(plan, params)
    trees, roots = [], []
    while not state.rows.done.all():
        roots.append(int(state.cache.length[1]))
        trees.append(look(plan, params, state)[0].tree)
        state = advance(plan, params, state, 1)
    assert len(roots) < 24  # something was accepted
    text = np.asarray(prompt + outcome(state, 1).tokens, np.int32)
    taps = text_taps(plan, params, text, head.taps)

    @jax.jit
    def expected(taps, text, roots):
        hidden = block_hidden(head, params["head"], params["target"], taps, text, roots)
        tokens, logps = best_drafts(params["head"], params["target"], hidden, 1)
        return tokens.reshape(-1, 4), logps.reshape(-1, 4)

    tokens, logps = expected(taps, text[:-1], np.asarray(roots))
    at = np.asarray(roots)
    right = np.ones(
        len(roots), bool
    )  # the chain so far is the text's own, so that both were fed the same
    for depth in range(4):
        for number, tree in enumerate(trees):
            check(tree)
            assert tree.size.tolist() == [0, 5]
            if right[number]:
                assert tree.tokens[1, depth + 1] == tokens[number, depth]
                score = tree.scores[1, depth + 1] - tree.scores[1, depth]
                np.testing.assert_allclose(score, logps[number, depth], atol=1e-3)
        after = np.minimum(at + 1 + depth, len(text) - 1)
        right &= np.asarray(tokens[:, depth]) == text[after]
        right &= at + 1 + depth < len(text) - 1


def test_a_poisoned_head_cache_changes_nothing(drafted):
    plan, _, params = drafted()

    def poison(state):
        rows = state.method.rows
        stale = (jnp.arange(CAPACITY) >= rows.cache.length[:, None])[:, None, :, None]
        keys = (jnp.where(stale, jnp.nan, rows.cache.keys[0]),)
        values = (jnp.where(stale, 1e30, rows.cache.values[0]),)
        cache = KVCache(keys, values, jnp.copy(rows.cache.length))
        method = MethodState(rows=rows._replace(cache=cache))
        return dataclasses.replace(state, method=method)

    def run(touch):
        state, _ = admitted(plan, params)
        while not state.rows.done.all():
            state = advance(plan, params, touch(state), 1)
        return outcome(state, 1)

    clean = run(lambda state: state)
    assert run(poison) == clean
    assert clean.rounds < 24


@pytest.mark.parametrize("temperature", [0.8, pytest.param(0.0, marks=pytest.mark.slow)])
def test_replay_equals_decoding_round_by_round(drafted, temperature):
    plan, _, params = drafted(temperature=temperature)
    recordings = record(plan, params, queue_of(), batch=2, max_new_tokens=30, seed=4)
    played = replay(plan, params, recordings, max_new_tokens=30)
    real, _ = decode(plan, params, queue_of())
    for a, b in zip(played, real, strict=True):
        assert dataclasses.replace(a, seconds=0.0) == dataclasses.replace(b, seconds=0.0)
    assert sum(one.emitted for one in real) > sum(one.rounds for one in real)


def test_a_draft_vocabulary_holds_all_that_is_drafted(drafted):
    plan, _, params = drafted(draft_vocab_size=3)
    params["head"] = with_draft_ids(params["head"], params["target"], np.array([1, 3, 4]))
    tree = look(plan, params, admitted(plan, params)[0])[0].tree
    assert tree.size.tolist() == [0, 16]
    assert set(tree.tokens[1, 1:].tolist()) == {1, 3, 4}


def test_passes_are_counted_where_a_row_is_alive(drafted):
    plan, _, params = drafted()
    _, stream = decode(plan, params, queue_of())
    assert int(stream.state.draft_passes) == 4 * int(stream.state.histogram.sum()) > 0
    again = look(plan, params, stream.state)[1]
    assert int(again.draft_passes) == int(stream.state.draft_passes)


def test_one_compilation_for_many_heads_and_prompts(drafted):
    programs = (advance, _read_chunk, _insert)
    sizes = []
    for seed in range(3):
        plan, _, params = drafted(seed=seed)
        decode(plan, params, queue_of([3 + seed, 30], seed), seed=seed, max_new_tokens=seed + 5)
        sizes.append([p._cache_size() for p in programs])
    assert sizes[0] == sizes[-1]


def test_a_head_that_knows_the_answer_is_accepted_whole(tiny_model):
    """The next token depends on the last one alone: in the target, and in a head that attends to its own pair alone."""
    config, params = tiny_model(num_kv_heads=4, vocab_size=40)
    chunks = params["embed"].reshape(
        40, 4, 8
    )  # of a head each: equal lengths, so that a token is its own best key
    chunks = chunks / jnp.sqrt(jnp.square(chunks).mean(axis=2, keepdims=True))
    params["embed"] = chunks.reshape(40, 32)
    params["lm_head"] = params["lm_head"] * 40  # sharp, so that the best chain is the best tree
    params["layers"] = tuple(
        layer | {"o": 0 * layer["o"], "down": 0 * layer["down"]} for layer in params["layers"]
    )
    target = fuse(config, params)
    shape = eagle_config_for(config, taps=(1,), steps=4)
    shape = dataclasses.replace(shape, norm_before_residual=True)
    head = init_head(shape, jax.random.key(0))
    eye, none = jnp.eye(32), jnp.zeros((32, 32))
    read = jnp.concatenate([eye, none], axis=1).reshape(4, 8, 64)
    head["layer"] |= {
        "hidden_norm": jnp.zeros(32),
        "qkv": jnp.stack([30 * read, 30 * read, read], axis=1),
        "o": eye,
        "down": 0 * head["layer"]["down"],
    }
    head |= {"norm": params["norm"], "output": params["lm_head"]}
    plan = Plan(config, eagle3(shape, 16, 5, 3), buckets=())
    queue = prompts(40, (9, 4, 17))
    done, _ = decode_all(plan, {"target": target, "head": head}, queue, max_new_tokens=48, batch=2)
    for one in done:
        assert set(one.trace) == {6}
        assert one.rounds == 8


def test_budgets_are_ceilings(drafted):
    _, head, _ = drafted()
    assert eagle3(head, 64) is eagle3(head, 64, depth=8, width=10)
    assert eagle3(head, 4) is eagle3(head, 4, depth=3, width=3)
    for budget, depth in ((1, 0), (2, 1), (4, 3), (9, 8), (64, 8)):
        method = eagle3(head, budget)
        assert (method.name, method.budget) == ("eagle3", budget)
        assert method.needs.depth == depth
        assert method.needs.taps == (head.taps if depth else ())
    assert eagle3(head, 64, depth=12).needs.depth == 12  # deeper than it was trained for


def test_refuses_bad_arguments(drafted):
    plan, head, params = drafted()
    for name, given in (
        ("budget", {"budget": 0}),
        ("depth", {"depth": 0}),
        ("width", {"width": 0}),
    ):
        with pytest.raises(ValueError, match=rf"{name} must be .*, got 0"):
            eagle3(head, **{"budget": 8} | given)
    with pytest.raises(ValueError, match="weights of the head that eagle3 has"):
        new_state(plan, {"target": params["target"]}, 1, 64, jax.random.key(0))
