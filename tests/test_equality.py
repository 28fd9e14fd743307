"""The central test: with the same seed every method emits what autoregressive decoding emits."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.benches import load_bench
from jspec.cost.table import make_cost
from jspec.decode import advance, generate
from jspec.driver import decode_all, outcome
from jspec.exactness import first_difference
from jspec.heads.config import Correction, config_for
from jspec.heads.parallel import init_head
from jspec.methods import (
    ar,
    dartree,
    ddtree,
    dflash,
    domino,
    graft,
    jetspec,
    prompt_lookup,
    smart,
    token_recycling,
)
from jspec.models.transformer import fuse
from jspec.prefill import admit
from jspec.sampling import Sampling
from jspec.state import Plan, new_state
from tests.drafters import echo, noise, wild

SAMPLINGS = {
    "greedy": Sampling(),
    "top-p": Sampling(temperature=0.8, top_p=0.95),
    "min-p": Sampling(temperature=0.8, min_p=0.1),
}
LENGTHS = (9, 1, 33, 2, 30, 23, 5)  # of prompts: more than slots, so that slots are refilled
NEW = 40
BUCKETS = (1, 8, 64)  # fewer than by default: each is a forward to compile
FEW = (8,)  # and of slow cases only this and the whole batch: there are many


def dartree_fixed(head, budget):
    return dartree(head, budget, variant="fixed")


# The heads of the methods that have one: causal or not.
CAUSAL = {
    jetspec: True,
    dflash: False,
    ddtree: False,
    domino: True,
    dartree: False,
    dartree_fixed: False,
}


def with_head(config, params):
    """What the steps take: a target, a head that is not trained, and costs with which some trees pay."""
    head = init_head(head_config(config, True), jax.random.key(1))
    up = head["correction"]["up"]
    head["correction"]["up"] = 4 * jax.random.normal(jax.random.key(2), up.shape)
    cost = make_cost((1, 8, 64, 512), (0.03, 0.032, 0.05, 0.2), (0.001,), fit=(0, 0.05, 0.5, 0.1))
    return {"target": fuse(config, params), "head": head, "cost": cost}


def head_config(config, causal, shift_labels=False):
    return config_for(
        config,
        mask_token_id=60,
        taps=(0, 1),
        block_size=9,
        causal=causal,
        shift_labels=shift_labels,
        correction=Correction(gru_size=16, rank=8),
    )


def make(factory, config, budget):
    if factory in CAUSAL:
        return factory(head_config(config, CAUSAL[factory], factory is dartree), budget)
    return factory(budget)


@pytest.fixture(scope="module")
def tiny(tiny_model):
    config, params = tiny_model(eos_ids=(7,))
    return config, with_head(config, params)


def prompts(vocab, lengths=LENGTHS, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab, n).tolist() for n in lengths]


def texts(config, params, method, sampling, batch, queue, buckets=BUCKETS, **options):
    options = {"max_new_tokens": NEW, "capacity": 256, "seed": 3} | options
    plan = Plan(config, method, sampling, buckets)
    done, _ = decode_all(plan, params, queue, batch=batch, **options)
    return [one.tokens for one in done]


def unexcused(config, params, sampling, queue, ours, reference, seed=3):
    """Differences that no near-tie excuses."""
    plan = Plan(config, ar(), sampling)
    found = [
        first_difference(plan, params, p, a, b, index=i, seed=seed)
        for i, (p, a, b) in enumerate(zip(queue, ours, reference, strict=True))
    ]
    return [d for d in found if d and not d.excused]


@pytest.fixture(scope="module")
def reference(tiny):
    """Autoregressive texts, one prompt at a time, by sampling."""
    config, params = tiny
    queue = prompts(config.vocab_size)
    return {
        name: texts(config, params, ar(), sampling, 1, queue)
        for name, sampling in SAMPLINGS.items()
    }


FACTORIES = {
    (1, 4, 16, 64): (prompt_lookup, token_recycling),
    (1, 8, 16, 32, 64, 128): (jetspec, dflash, ddtree),
    (8, 16, 32, 64): (domino, dartree, dartree_fixed),
}


QUICK_WITH_HEAD = [
    (jetspec, 16, "top-p", 5),
    (dflash, 8, "greedy", 1),
    (ddtree, 32, "top-p", 1),
    (domino, 8, "top-p", 5),
    (dartree, 32, "greedy", 5),
]


def is_quick(factory, budget, name, batch):
    if factory in CAUSAL:
        return (factory, budget, name, batch) in QUICK_WITH_HEAD
    return (budget, name, batch) in {(16, "greedy", 1), (16, "top-p", 5), (64, "top-p", 5)}


CASES = [
    pytest.param(*case, marks=[] if is_quick(*case) else [pytest.mark.slow])
    for budgets, factories in FACTORIES.items()
    for case in itertools.product(factories, budgets, SAMPLINGS, (1, 5))
    if case[2] != "min-p" or case[1] == 16
]


@pytest.mark.parametrize(("factory", "budget", "name", "batch"), CASES)
def test_methods_equal_autoregressive_decoding(tiny, reference, factory, budget, name, batch):
    config, params = tiny
    queue = prompts(config.vocab_size)
    method = make(factory, config, budget)
    buckets = BUCKETS if is_quick(factory, budget, name, batch) else FEW
    ours = texts(config, params, method, SAMPLINGS[name], batch, queue, buckets)
    assert not unexcused(config, params, SAMPLINGS[name], queue, ours, reference[name])


QUICK_SMART = [(token_recycling, "top-p", 3, "exact"), (ddtree, "greedy", 8, "exact")]
SMART = [
    pytest.param(*case, marks=[] if case in QUICK_SMART else [pytest.mark.slow])
    for case in itertools.product(
        (prompt_lookup, token_recycling, *CAUSAL), SAMPLINGS, (1, 3, 8), ("exact", "marginal")
    )
    if case[1:3] == ("top-p", 3) or (case[3] == "exact" and case[1] != "min-p")
]


@pytest.mark.parametrize(("factory", "name", "batch", "rule"), SMART)
def test_smart_changes_nothing(tiny, reference, factory, name, batch, rule):
    """Rows finish and are refilled at different times, drafting rests and is taken up again."""
    config, params = tiny
    queue = prompts(config.vocab_size)
    method = smart(make(factory, config, 16), rule=rule, queue=5)
    buckets = BUCKETS if (factory, name, batch, rule) in QUICK_SMART else FEW
    ours = texts(config, params, method, SAMPLINGS[name], batch, queue, buckets)
    assert not unexcused(config, params, SAMPLINGS[name], queue, ours, reference[name])


def grafted(factory, config, budget, kind):
    """The combinator over a method, in all its forms, with thresholds that prune some rounds and not others."""
    method = wild(3, 5, config.vocab_size) if factory is wild else make(factory, config, budget)
    options = {
        "root": {"thresholds": (0.3, 0.2, 0.1)},
        "both": {"retrieve": "both", "thresholds": (0.3, 0.2, 0.1), "scope": "kept"},
        "tail": {"place": "tail", "leaves": 2, "retrieve": "both", "thresholds": (0.1,)},
        "not pruned": {"prune": False},
    }
    return graft(method, **options[kind])


QUICK_GRAFT = [
    (wild, "top-p", 3, "root"),
    (dflash, "greedy", 1, "tail"),
    (ddtree, "top-p", 3, "smart"),
]
GRAFT = [
    pytest.param(*case, marks=[] if case in QUICK_GRAFT else [pytest.mark.slow])
    for case in itertools.product(
        (wild, prompt_lookup, *CAUSAL),
        SAMPLINGS,
        (1, 3, 5),
        ("root", "both", "tail", "not pruned", "smart"),
    )
    if case[1:3] == ("top-p", 3)
    or (case[1] == "greedy" and case[2:] in ((1, "root"), (5, "root")))
    or case in QUICK_GRAFT
]


@pytest.mark.parametrize(("factory", "name", "batch", "kind"), GRAFT)
def test_graft_changes_nothing(tiny, reference, factory, name, batch, kind):
    """Also under smart, which cuts its trees and stops its drafts."""
    config, params = tiny
    queue = prompts(config.vocab_size)
    method = grafted(factory, config, 16, "root" if kind == "smart" else kind)
    method = smart(method, queue=5) if kind == "smart" else method
    buckets = BUCKETS if (factory, name, batch, kind) in QUICK_GRAFT else FEW
    ours = texts(config, params, method, SAMPLINGS[name], batch, queue, buckets)
    assert not unexcused(config, params, SAMPLINGS[name], queue, ours, reference[name])


@pytest.mark.slow
@pytest.mark.parametrize("budget", [2, 8, 32, 64])
@pytest.mark.parametrize("name", ["greedy", "top-p"])
def test_graft_at_other_budgets(tiny, reference, budget, name):
    config, params = tiny
    queue = prompts(config.vocab_size)
    for factory, kind in ((jetspec, "root"), (dflash, "tail")):
        method = grafted(factory, config, budget, kind)
        ours = texts(config, params, method, SAMPLINGS[name], 5, queue, FEW)
        assert not unexcused(config, params, SAMPLINGS[name], queue, ours, reference[name])


@pytest.mark.slow
@pytest.mark.parametrize("budget", [8, 32, 64])
@pytest.mark.parametrize("factory", [domino, dartree])
@pytest.mark.parametrize("kind", ["graft", "smart", "both"])
def test_path_conditioned_trees_at_other_budgets(tiny, reference, factory, budget, kind):
    config, params = tiny
    queue = prompts(config.vocab_size)
    method = make(factory, config, budget)
    method = method if kind == "smart" else graft(method, thresholds=(0.3, 0.2, 0.1))
    method = method if kind == "graft" else smart(method, queue=5)
    name = "top-p" if budget == 32 else "greedy"
    ours = texts(config, params, method, SAMPLINGS[name], 5, queue, FEW)
    assert not unexcused(config, params, SAMPLINGS[name], queue, ours, reference[name])


@pytest.mark.parametrize("name", SAMPLINGS)
def test_slots_and_neighbours_do_not_matter(tiny, reference, name):
    config, params = tiny
    queue = prompts(config.vocab_size)
    for batch in (3, 8) if name == "top-p" else (3,):
        assert texts(config, params, ar(), SAMPLINGS[name], batch, queue) == reference[name]


@pytest.mark.parametrize("name", ["greedy", "top-p"])
def test_a_drafter_that_knows_nothing_changes_nothing(tiny, reference, name):
    config, params = tiny
    queue = prompts(config.vocab_size)
    method = noise(16, 4, config.vocab_size, taps=(0, 2), top_k=3)
    assert texts(config, params, method, SAMPLINGS[name], 3, queue) == reference[name]


@pytest.mark.parametrize(("name", "depth"), [("greedy", 1), ("greedy", 15), ("top-p", 3)])
def test_a_drafter_that_knows_the_answer_is_accepted_whole(tiny, name, depth):
    config, params = tiny
    config = dataclasses.replace(config, eos_ids=())
    [prompt] = prompts(config.vocab_size, [12])
    plan = Plan(config, ar(), SAMPLINGS[name], BUCKETS)
    [answer], _ = decode_all(plan, params, [prompt], max_new_tokens=120, capacity=256)
    params = params | {"text": jnp.asarray(prompt + answer.tokens)}
    plan = Plan(config, echo(16, depth), SAMPLINGS[name], BUCKETS)
    [ours], _ = decode_all(plan, params, [prompt], max_new_tokens=90, capacity=256)
    assert ours.tokens == answer.tokens[:90]
    assert set(ours.trace) == {depth + 1}
    assert ours.rounds == -(-90 // (depth + 1))


def test_one_program_and_the_host_loop_agree(tiny, reference):
    config, params = tiny
    queue = prompts(config.vocab_size)[:4]
    plan = Plan(config, token_recycling(16), SAMPLINGS["top-p"], BUCKETS)

    def admitted():
        state = new_state(plan, params, 4, 256, jax.random.key(3))
        for slot, prompt in enumerate(queue):
            state = admit(plan, params, state, slot, prompt, slot, NEW)
        return state

    whole = generate(plan, params, admitted())
    assert [outcome(whole, i).tokens for i in range(4)] == reference["top-p"][:4]
    state = admitted()
    while not state.rows.done.all():
        state = advance(plan, params, state, 1)
    for a, b in zip(jax.tree.leaves(whole.rows), jax.tree.leaves(state.rows), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["qwen2", "qwen3"])
@pytest.mark.parametrize("factory", [prompt_lookup, token_recycling, jetspec])
def test_other_architectures(tiny_model, arch, factory):
    config, params = tiny_model(arch)
    params = with_head(config, params)
    queue = prompts(config.vocab_size)
    sampling = SAMPLINGS["top-p"]
    want = texts(config, params, ar(), sampling, 1, queue)
    ours = texts(config, params, make(factory, config, 16), sampling, 3, queue)
    assert not unexcused(config, params, sampling, queue, ours, want)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["greedy", "top-p"])
def test_the_real_target(smollm2, name):
    """A sample; experiments/equality has the matrix."""
    params, sampling = {"target": smollm2.params}, SAMPLINGS[name]
    queue = [load_bench(b, 1)[0].encode(smollm2.tokenizer) for b in ("humaneval", "gsm8k", "math")]
    options = {"max_new_tokens": 32, "capacity": 512}
    want = texts(smollm2.config, params, ar(), sampling, 1, queue, **options)
    params["cost"] = make_cost((1, 4, 32), (0.03, 0.04, 0.1), (0.002,))
    for method in (prompt_lookup(16), token_recycling(16), smart(token_recycling(16))):
        ours = texts(smollm2.config, params, method, sampling, 2, queue, FEW, **options)
        assert not unexcused(smollm2.config, params, sampling, queue, ours, want)


def test_differences_are_found_and_weighed(tiny, reference):
    config, params = tiny
    queue = prompts(config.vocab_size)
    for name, sampling in SAMPLINGS.items():
        plan, text = Plan(config, ar(), sampling), reference[name][0]
        assert first_difference(plan, params, queue[0], text, text, seed=3) is None
        for at in (0, 5):
            other = [*text[:at], (text[at] + 1) % config.vocab_size, *text[at + 1 :]]
            found = first_difference(plan, params, queue[0], other, text, seed=3)
            assert found.position == at
            assert 0 < found.gap < 100
            again = first_difference(plan, params, queue[0], text, other, seed=3)
            assert again.gap == pytest.approx(found.gap, abs=1e-4)
        shorter = first_difference(plan, params, queue[0], text[:-1], text, seed=3)
        assert shorter == (len(text) - 1, float("inf"))
        assert not shorter.excused
