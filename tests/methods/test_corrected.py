"""Domino and DARTree in real rounds: replay, stale rows, what compiles, and a correction that knows the text."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.cost.table import make_cost
from jspec.decode import advance
from jspec.heads.config import Correction, config_for
from jspec.heads.parallel import init_head, with_draft_ids
from jspec.methods import dartree, dflash, domino, smart
from jspec.models.transformer import fuse
from jspec.prefill import _insert, _read_chunk
from jspec.recording import record, replay
from jspec.sampling import Sampling
from jspec.state import Plan, new_state
from jspec.tree import check
from tests.methods.test_one_pass import (
    CAPACITY,
    VOCAB,
    admitted,
    decode,
    look,
    poisoned,
    prompts,
    to_the_end,
)

BLOCK = 5
GRU, RANK = 8, 7


@functools.cache
def pruned(head, budget=16):
    return dartree(head, budget, width=4)


@functools.cache
def fixed(head, budget=16):
    return dartree(head, budget, variant="fixed")


METHODS = {"domino": domino, "pruned": pruned, "fixed": fixed}
slow = pytest.mark.slow


@pytest.fixture(scope="module")
def tiny(tiny_model):
    config, params = tiny_model(vocab_size=VOCAB, eos_ids=(3,))
    return config, fuse(config, params)


@pytest.fixture(scope="module")
def paired(tiny):
    """``paired(name, causal, seed) -> (plan, head config, params)``; equal plans are compiled once."""
    config, target = tiny

    def make(name, causal=False, seed=1, temperature=0.8, **overrides):
        settings = {"mask_token_id": VOCAB - 1, "taps": (1, 0), "block_size": BLOCK}
        settings |= {"shift_labels": not causal, "correction": Correction(GRU, RANK)}
        head = config_for(config, causal=causal, **settings, **overrides)
        plan = Plan(config, METHODS[name](head, 16), Sampling(temperature), buckets=())
        weights = init_head(head, jax.random.key(seed))
        up = weights["correction"]["up"]
        weights["correction"]["up"] = 4 * jax.random.normal(jax.random.key(seed), up.shape)
        return plan, head, {"target": target, "head": weights}

    return make


REPLAYS = [
    ("pruned", False, 0.8),
    pytest.param("domino", True, 0.8),
    *(
        pytest.param(name, causal, temperature, marks=slow)
        for name, causal, temperature in (
            ("pruned", True, 0.0),
            ("domino", False, 0.0),
            ("fixed", False, 0.8),
            ("fixed", True, 0.0),
        )
    ),
]


@pytest.mark.parametrize(("name", "causal", "temperature"), REPLAYS)
def test_replay_equals_decoding_round_by_round(paired, name, causal, temperature):
    plan, _, params = paired(name, causal, temperature=temperature)
    recordings = record(plan, params, prompts(), batch=2, max_new_tokens=30, seed=4)
    played = replay(plan, params, recordings, max_new_tokens=30)
    real, stream = decode(plan, params, prompts())
    for a, b in zip(played, real, strict=True):
        assert dataclasses.replace(a, seconds=0.0) == dataclasses.replace(b, seconds=0.0)
    assert sum(one.emitted for one in real) > sum(one.rounds for one in real)
    passes = int(stream.state.draft_passes)  # a level is one
    assert passes == plan.method.needs.depth * int(stream.state.histogram.sum())


def test_a_poisoned_head_cache_changes_nothing(paired):
    plan, _, params = paired("pruned")
    clean = to_the_end(plan, params)
    assert to_the_end(plan, params, poisoned) == clean
    assert clean.rounds < 24


def test_a_draft_vocabulary_holds_all_that_is_drafted(paired):
    plan, _, params = paired("pruned", draft_vocab_size=3)
    params["head"] = with_draft_ids(params["head"], params["target"], np.array([1, 3, 4]))
    tree = look(plan, params, admitted(plan, params)[0])[0].tree
    check(tree)
    assert tree.size.tolist() == [0, 16]
    assert set(tree.tokens[1, 1:].tolist()) == {1, 3, 4}


def test_one_compilation_for_many_heads_and_prompts(paired):
    programs = (advance, _read_chunk, _insert)
    sizes = []
    for seed in range(3):
        plan, _, params = paired("domino", seed=seed)
        decode(plan, params, prompts([3 + seed, 30], seed), seed=seed, max_new_tokens=5 + seed)
        sizes.append([p._cache_size() for p in programs])
    assert sizes[0] == sizes[-1]


# A target whose next token depends on the last one alone, and a correction that knows how.

AFTER = np.array([3, 0, 4, 2, 1, 5])  # the token after each; 5 is the mask


def knowing(tiny, prefix, causal, shift_labels):
    """The head's config, and params with which draft after draft is right from the prefix on, if those before are."""
    config, target = tiny
    config = dataclasses.replace(config, eos_ids=())
    head = config_for(
        config,
        mask_token_id=VOCAB - 1,
        taps=(0,),
        block_size=BLOCK,
        causal=causal,
        shift_labels=shift_labels,
        correction=Correction(GRU, RANK, prefix),
    )
    token = np.arange(VOCAB)
    embed = np.zeros((VOCAB, config.hidden_size), np.float32)
    embed[token, 1 + token] = embed[:, 0] = 1  # feature 0: what else a bias would be
    rows = np.zeros_like(embed)
    rows[AFTER, 1 + token] = 4
    target = target | {
        "embed": jnp.asarray(embed),
        "lm_head": jnp.asarray(rows),
        "layers": tuple(_silent(layer) for layer in target["layers"]),
    }
    weights = init_head(head, jax.random.key(0))
    weights["layers"] = {i: _silent(layer) for i, layer in weights["layers"].items()}
    gru_in, down, up = (
        np.zeros(weights["correction"][name].shape, np.float32) for name in ("gru_in", "down", "up")
    )
    gru_in[GRU : 2 * GRU, 0] = -30  # update: the new state, whatever the old one
    gru_in[2 * GRU + token, 1 + token] = 10  # new: which token it was
    down[token, config.hidden_size + token] = 10
    up[AFTER, token] = 10
    weights["correction"] |= {"gru_in": gru_in, "down": down, "up": up}
    weights = jax.tree.map(jnp.asarray, weights)
    weights["correction"]["gru_state"] = jnp.zeros_like(weights["correction"]["gru_state"])
    return config, head, {"target": target, "head": weights}


def _silent(layer):
    return layer | {name: jnp.zeros_like(layer[name]) for name in ("o", "down")}


@pytest.mark.parametrize(
    ("name", "prefix", "causal", "shift_labels"),
    [
        ("domino", 1, False, True),
        ("pruned", 0, True, False),
        pytest.param("fixed", 1, False, True, marks=slow),
        pytest.param("domino", 0, True, False, marks=slow),
    ],
)
def test_a_correction_that_knows_the_text_is_accepted_whole(
    tiny, name, prefix, causal, shift_labels
):
    config, head, params = knowing(tiny, prefix, causal, shift_labels)
    plan = Plan(config, METHODS[name](head, 16), buckets=())
    [one], _ = decode(plan, params, [[1, 4]], max_new_tokens=30, batch=1)
    want = [1, 4]
    while len(want) < 32:
        want.append(int(AFTER[want[-1]]))
    assert one.tokens == want[2:]
    assert set(one.trace) == {head.depth + 1}  # the longest path each time
    if name == "domino" and shift_labels:  # the slots alone know the first draft only
        plan = Plan(config, dflash(head, 16), buckets=())
        [base], _ = decode(plan, params, [[1, 4]], max_new_tokens=30, batch=1)
        assert base.tokens == one.tokens and max(base.trace) < head.depth + 1


def test_smart_stops_levels_that_do_not_pay(paired):
    """Its predicate reaches the drafter: levels that cost a fortune are not drafted."""
    plan, _, params = paired("pruned")
    plan = dataclasses.replace(plan, method=smart(plan.method, rest=False), buckets=(1, 16))
    times = {"cheap": (1e-4,) * BLOCK, "dear": (1e-4, *(1e3 * i for i in range(1, BLOCK)))}
    passes = {}
    for name, draft in times.items():
        cost = {"cost": make_cost((1, 16), (0.03, 0.031), draft)}
        done, stream = decode(plan, params | cost, prompts([11]), batch=1)
        rounds = int(stream.state.histogram.sum())
        passes[name] = int(stream.state.draft_passes) / rounds, done[0].tokens
    assert passes["dear"][0] == 1 < passes["cheap"][0]
    assert passes["dear"][1] == passes["cheap"][1]


def test_a_head_that_is_not_there_is_named(paired):
    plan, _, params = paired("domino")
    with pytest.raises(ValueError, match="weights of the head that domino has"):
        new_state(plan, {"target": params["target"]}, 1, CAPACITY, jax.random.key(0))
