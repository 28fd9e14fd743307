"""JetSpec, DFlash and DDTree in real rounds: what they draft, what they may not read, what compiles, what replay says.

The vocabulary is so small that an untrained head's trees are often right.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.decode import advance, propose
from jspec.driver import decode_all, outcome
from jspec.heads.config import config_for
from jspec.heads.parallel import (
    HeadCache,
    block_hidden,
    draft_logits,
    init_head,
    with_draft_ids,
)
from jspec.method import MethodState
from jspec.methods import ddtree, dflash, jetspec
from jspec.models.transformer import fuse
from jspec.prefill import _insert, _read_chunk, admit
from jspec.recording import record, replay, text_taps
from jspec.sampling import Sampling
from jspec.state import Plan, new_state
from jspec.tables import best_first_tree, chain_tree, exact_tree
from jspec.tree import check

VOCAB, BLOCK, CAPACITY = 6, 6, 256
METHODS = {jetspec: best_first_tree, dflash: chain_tree, ddtree: exact_tree}
WIDTH = {jetspec: {"width": 3}, dflash: {}, ddtree: {}}
LENGTHS = (9, 1, 40, 2, 23)

look = jax.jit(propose, static_argnums=0)


def cases(*quick):
    """Every method on every kind of head; those that are not quick are slow."""
    return [
        pytest.param(f, causal, marks=[] if (f, causal) in quick else [pytest.mark.slow])
        for f in METHODS
        for causal in (True, False)
    ]


@pytest.fixture(scope="module")
def tiny(tiny_model):
    config, params = tiny_model(vocab_size=VOCAB, eos_ids=(3,))
    return config, fuse(config, params)


@pytest.fixture(scope="module")
def paired(tiny):
    """``paired(factory, causal, seed) -> (plan, head config, params)``; equal plans are compiled once."""
    config, target = tiny

    def make(factory, causal=True, seed=1, temperature=0.8, **overrides):
        settings = {"mask_token_id": VOCAB - 1, "taps": (1, 0), "block_size": BLOCK}
        head = config_for(config, causal=causal, **settings, **overrides)
        method = factory(head, 16, **WIDTH[factory])
        plan = Plan(config, method, Sampling(temperature), buckets=())
        return plan, head, {"target": target, "head": init_head(head, jax.random.key(seed))}

    return make


def prompts(lengths=LENGTHS, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB, n).tolist() for n in lengths]


def admitted(plan, params):
    """A slot that is empty and one with a prompt, and the prompt."""
    [prompt] = prompts([11])
    state = new_state(plan, params, 2, CAPACITY, jax.random.key(0), np.zeros((1, VOCAB), np.int32))
    return admit(plan, params, state, 1, prompt, 0, 24), prompt


def poisoned(state):
    """The state with garbage in what the head's cache holds beyond its known rows."""
    cache = state.method.rows
    stale = (jnp.arange(CAPACITY) >= cache.length[:, None])[:, None, :, None]
    keys = tuple(jnp.where(stale, jnp.nan, k) for k in cache.keys)
    values = tuple(jnp.where(stale, 1e30, v) for v in cache.values)
    method = MethodState(rows=HeadCache(keys, values, jnp.copy(cache.length)))
    return dataclasses.replace(state, method=method)


def to_the_end(plan, params, touch=lambda state: state):
    """The outcome of the prompt that is ``admitted``, where a state is touched before each round."""
    state, _ = admitted(plan, params)
    while not state.rows.done.all():
        state = advance(plan, params, touch(state), 1)
    return outcome(state, 1)


def decode(plan, params, queue, **options):
    options = {"max_new_tokens": 30, "capacity": CAPACITY, "batch": 2, "seed": 4} | options
    return decode_all(plan, params, queue, **options)


@pytest.mark.parametrize(("factory", "causal"), cases((jetspec, True), (ddtree, False)))
def test_every_round_drafts_from_all_that_is_known(paired, factory, causal):
    """Trees are those of the training pass over the whole text's taps, which has no cache."""
    plan, head, params = paired(factory, causal)
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
        logps = jax.nn.log_softmax(draft_logits(params["head"], params["target"], hidden).T)
        logps = logps.reshape(roots.shape[0], head.depth, -1)
        best, tokens = jax.lax.top_k(logps, WIDTH[factory].get("width", VOCAB))
        return METHODS[factory](tokens, best, text[roots], 16)

    want = expected(taps, text[:-1], np.asarray(roots))
    for number, tree in enumerate(trees):
        check(tree)
        assert tree.size.tolist() == [0, int(want.size[number])]
        for name in ("tokens", "parents", "depths"):
            np.testing.assert_array_equal(getattr(tree, name)[1], getattr(want, name)[number])
        np.testing.assert_allclose(tree.scores[1], want.scores[number], atol=1e-3)


def test_a_poisoned_head_cache_changes_nothing(paired):
    plan, _, params = paired(jetspec)
    clean = to_the_end(plan, params)
    assert to_the_end(plan, params, poisoned) == clean
    assert clean.rounds < 24


@pytest.mark.parametrize("temperature", [0.8, pytest.param(0.0, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("factory", "causal"), cases((jetspec, True)))
def test_replay_equals_decoding_round_by_round(paired, factory, causal, temperature):
    plan, _, params = paired(factory, causal, temperature=temperature)
    recordings = record(plan, params, prompts(), batch=2, max_new_tokens=30, seed=4)
    played = replay(plan, params, recordings, max_new_tokens=30)
    real, _ = decode(plan, params, prompts())
    for a, b in zip(played, real, strict=True):
        assert dataclasses.replace(a, seconds=0.0) == dataclasses.replace(b, seconds=0.0)
    assert sum(one.emitted for one in real) > sum(one.rounds for one in real)


def test_a_draft_vocabulary_holds_all_that_is_drafted(paired):
    plan, _, params = paired(ddtree, draft_vocab_size=3)
    params["head"] = with_draft_ids(params["head"], params["target"], np.array([1, 3, 4]))
    tree = look(plan, params, admitted(plan, params)[0])[0].tree
    assert tree.size.tolist() == [0, 16]
    assert set(tree.tokens[1, 1:].tolist()) <= {1, 3, 4}


def test_passes_are_counted_where_a_row_is_alive(paired):
    plan, _, params = paired(jetspec)
    _, stream = decode(plan, params, prompts())
    assert int(stream.state.draft_passes) == int(stream.state.histogram.sum()) > 0
    again = look(plan, params, stream.state)[1]
    assert int(again.draft_passes) == int(stream.state.draft_passes)


def test_one_compilation_for_many_heads_and_prompts(paired):
    programs = (advance, _read_chunk, _insert)
    sizes = []
    for seed in range(4):
        plan, _, params = paired(jetspec, seed=seed)
        most = int(seed + 5)
        decode(plan, params, prompts([3 + seed, 30], seed), seed=seed, max_new_tokens=most)
        sizes.append([p._cache_size() for p in programs])
    assert sizes[0] == sizes[-1]


def test_budgets_are_ceilings(paired):
    _, head, _ = paired(jetspec)
    assert jetspec(head, 64) is jetspec(head, 64, depth=head.depth, width=VOCAB)
    assert ddtree(head, 64, width=99) is ddtree(head, 64)
    assert jetspec(head, 64) is not ddtree(head, 64)
    for factory in METHODS:
        for budget, depth in ((1, 0), (2, 1), (4, 3), (6, 5), (64, 5)):
            method = factory(head, budget)
            assert (method.name, method.budget) == (factory.__name__, budget)
            assert method.needs.depth == depth
            assert method.needs.taps == (head.taps if depth else ())
        assert factory(head, 64, depth=2).needs.depth == 2


@pytest.mark.parametrize("factory", METHODS)
def test_refuses_bad_arguments(paired, factory):
    _, head, _ = paired(jetspec)
    with pytest.raises(ValueError, match=r"budget must be .*, got 0"):
        factory(head, 0)
    with pytest.raises(ValueError, match=r"depth must be .*, got 0"):
        factory(head, 8, depth=0)
    with pytest.raises(ValueError, match="depth must be at most 5, as far as the head drafts, got"):
        factory(head, 8, depth=6)
    if factory is not dflash:
        with pytest.raises(ValueError, match=r"width must be .*, got 0"):
            factory(head, 8, width=0)
