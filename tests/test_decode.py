"""The round's edges: where rows end, what stale rows may hold, what compiles, what replay says."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.decode import absorb, advance, commit, generate, judge, observe, propose, write_rows
from jspec.driver import Stream, decode_all, outcome
from jspec.method import Needs, Proposal
from jspec.methods import ar, prompt_lookup, token_recycling
from jspec.models.transformer import fuse
from jspec.prefill import _insert, _read_chunk, admit, chunks
from jspec.recording import record, replay
from jspec.sampling import Sampling
from jspec.state import KVCache, Plan, capacity_for, new_state
from jspec.stopping import stop_table
from jspec.tree import root_only
from jspec.verification import verify
from tests.drafters import echo

BUCKETS = (1, 8)


@pytest.fixture(scope="module")
def tiny(tiny_model):
    config, params = tiny_model()
    return config, {"target": fuse(config, params)}


@pytest.fixture(scope="module")
def story(tiny):
    """A prompt and 60 greedy tokens after it."""
    config, params = tiny
    prompt = np.random.default_rng(5).integers(0, config.vocab_size, 12).tolist()
    [one], _ = decode_all(Plan(config, ar()), params, [prompt], max_new_tokens=60, capacity=256)
    return prompt, one.tokens


def knowing(tiny, story, depth=15, **changes):
    """A plan and params whose drafter knows the story."""
    config, params = tiny
    prompt, tokens = story
    params = params | {"text": jnp.asarray(prompt + tokens)}
    return Plan(dataclasses.replace(config, **changes), echo(16, depth), buckets=BUCKETS), params


def run(plan, params, prompt, **options):
    [one], _ = decode_all(plan, params, [prompt], **({"capacity": 256} | options))
    return one


@pytest.mark.parametrize("at", [0, 1, 7, 8, 14])
def test_a_stop_token_inside_an_accepted_path_ends_the_row_right_there(tiny, story, at):
    plan, params = knowing(tiny, story)
    prompt, tokens = story
    stop = tokens[at]
    first = tokens.index(stop)
    table = stop_table(plan.config.vocab_size, [stop])
    one = run(plan, params, prompt, max_new_tokens=60, stops=table)
    assert one.tokens == tokens[: first + 1]
    assert one.emitted == 16 * one.rounds  # counted before the cut


def test_a_stop_string_inside_an_accepted_path_ends_the_row_right_there(tiny, story):
    plan, params = knowing(tiny, story)
    prompt, tokens = story
    letters = [bytes([65 + t % 26, 97 + t // 26]) for t in range(plan.config.vocab_size)]
    text = b"".join(letters[t] for t in tokens)
    wanted = text[9:15]  # from inside token 4 to inside token 7
    end = next(i for i in range(60) if wanted in b"".join(letters[t] for t in tokens[: i + 1]))
    table = stop_table(plan.config.vocab_size, [], [wanted.decode()], letters)
    assert run(plan, params, prompt, max_new_tokens=60, stops=table).tokens == tokens[: end + 1]


@pytest.mark.parametrize("most", [1, 2, 15, 16, 17, 40])
def test_max_new_tokens_is_never_exceeded(tiny, story, most):
    plan, params = knowing(tiny, story)
    prompt, tokens = story
    one = run(plan, params, prompt, max_new_tokens=most)
    assert one.tokens == tokens[:most]
    assert one.rounds == -(-most // 16)


@pytest.mark.parametrize("context", [14, 29])
def test_the_round_narrows_at_the_end_of_the_context_and_stops(tiny, story, context):
    prompt, tokens = story
    for plan, params in (
        knowing(tiny, story, max_positions=context),  # the context ends
        knowing(tiny, story),  # the cache ends
    ):
        one = run(plan, params, prompt, max_new_tokens=60, capacity=context)
        assert one.tokens == tokens[: context - len(prompt)]
        for number, count in enumerate(one.trace):
            known = len(prompt) + 16 * number
            assert count == min(16, context + 1 - known)


def test_poisoned_padding_and_stale_rows_change_nothing(tiny, story):
    config, params = tiny
    prompt, tokens = story
    for method in (prompt_lookup(8), token_recycling(8)):
        plan = Plan(config, method, buckets=BUCKETS)
        state = new_state(plan, params, 2, 256, jax.random.key(0))
        state = admit(plan, params, state, 1, prompt, 0, 30)

        def poison_cache(state):
            stale = jnp.arange(256) >= state.cache.length[:, None]
            stale = stale[:, None, :, None]
            keys = tuple(jnp.where(stale, jnp.nan, k) for k in state.cache.keys)
            values = tuple(jnp.where(stale, 1e30, v) for v in state.cache.values)
            cache = KVCache(keys, values, state.cache.length)
            unknown = jnp.arange(257) > state.cache.length[:, None]
            rows = dataclasses.replace(
                state.rows, tokens=jnp.where(unknown, 1 << 20, state.rows.tokens)
            )
            return dataclasses.replace(state, cache=cache, rows=rows)

        def poison(x, live):
            live = live.reshape(*live.shape, *[1] * (x.ndim - 2))
            return jnp.where(live, x, jnp.nan if x.dtype == jnp.float32 else 1 << 20)

        def one_round(state, plan=plan):
            state = poison_cache(state)
            proposal, state = propose(plan, params, state)
            tree = proposal.tree
            dead = {
                name: poison(getattr(tree, name), tree.live)
                for name in ("tokens", "parents", "depths", "scores")
            }
            tree = dataclasses.replace(tree, **dead)
            verified = verify(plan, params, state, tree)
            on_path = judge(plan, tree, verified).path >= 0
            keys = tuple(poison(k, on_path) for k in verified.keys)
            values = tuple(jnp.where(on_path[..., None, None], v, 1e30) for v in verified.values)
            verified = verified._replace(
                tokens=poison(verified.tokens, tree.live),
                top_tokens=poison(verified.top_tokens, tree.live),
                top_logits=poison(verified.top_logits, tree.live),
                taps=poison(verified.taps, tree.live),
                keys=keys,
                values=values,
            )
            verdict = judge(plan, tree, verified)
            state, kept = commit(plan, state, verified, verdict)
            state = absorb(plan, params, state, verdict, kept)
            return observe(plan, params, state, verdict)

        one_round = jax.jit(one_round)
        while not state.rows.done.all():
            state = one_round(state)
        assert outcome(state, 1).tokens == tokens[:30]


def test_write_rows_writes_accepted_rows_only():
    rng = np.random.default_rng(0)
    capacity, nodes, most = 20, 7, 4
    layers = [rng.normal(size=(3, 2, capacity, 5)).astype(np.float32) for _ in range(4)]
    new = [rng.normal(size=(3, nodes, 2, 5)).astype(np.float32) for _ in range(4)]
    for length, count in (
        ([0, 3, 10], [4, 0, 2]),
        ([19, 17, 16], [1, 3, 4]),
        ([18, 20, 5], [2, 0, 1]),
    ):
        path = np.full((3, most), -1, np.int32)
        for b, c in enumerate(count):
            path[b, :c] = np.sort(rng.choice(nodes, c, replace=False))
        cache = KVCache(
            tuple(map(jnp.asarray, layers[:2])),
            tuple(map(jnp.asarray, layers[2:])),
            jnp.asarray(length),
        )
        out = write_rows(
            cache,
            tuple(map(jnp.asarray, new[:2])),
            tuple(map(jnp.asarray, new[2:])),
            jnp.asarray(path),
            jnp.asarray(count),
        )
        for stored, rows, got in zip(layers, new, (*out.keys, *out.values)):
            want = stored.copy()
            for b in range(3):
                for i in range(count[b]):
                    want[b, :, length[b] + i] = rows[b, path[b, i]]
            np.testing.assert_array_equal(got, want)
        np.testing.assert_array_equal(out.length, np.add(length, count))


def test_one_compilation_for_many_generations(tiny):
    config, params = tiny
    rng = np.random.default_rng(1)
    plan = Plan(config, prompt_lookup(8), buckets=(1, 5))  # of no other test
    programs = (advance, generate, _read_chunk, _insert)
    before = [p._cache_size() for p in programs]
    for turn in range(20):
        queue = [rng.integers(0, 61, rng.integers(1, 120)).tolist() for _ in range(3)]
        most = int(rng.integers(1, 30))
        decode_all(plan, params, queue, batch=2, max_new_tokens=most, capacity=256, seed=turn)
        state = new_state(plan, params, 2, 256, jax.random.key(turn))
        for slot in range(2):
            state = admit(plan, params, state, slot, queue[slot], slot, most)
        generate(plan, params, state)
    grown = [p._cache_size() - b for p, b in zip(programs, before, strict=True)]
    assert grown == [1, 1, 3, 1]  # chunks of 32, 64 and 128


def test_stream_yields_each_token_once_and_refills(tiny, story):
    plan, params = knowing(tiny, story)
    prompt, tokens = story
    queue = [prompt, prompt, prompt]
    run = Stream(plan, params, queue, max_new_tokens=20, batch=2, capacity=256)
    got = {i: [] for i in range(3)}
    finished = []
    for event in run:
        got[event.index] += event.tokens
        if event.finished:
            finished.append(event.index)
            assert event.finished.tokens == got[event.index] == tokens[:20]
            assert event.finished.by_depth == [2] * 16
            assert event.finished.by_source == [30, 0]
            assert sum(event.finished.by_rank) == event.finished.by_rank[0] == 30
    assert sorted(finished) == [0, 1, 2]
    assert run.state.histogram.sum() >= 4


def test_profile_runs_the_same_rounds(tiny, story):
    config, params = tiny
    prompt, tokens = story
    plan = Plan(config, prompt_lookup(8), buckets=BUCKETS)
    [one], run = decode_all(plan, params, [prompt], max_new_tokens=20, capacity=256, profile=True)
    assert one.tokens == tokens[:20]
    assert all(seconds > 0 for seconds in run.step_seconds.values())


@pytest.mark.parametrize(
    "sampling",
    [
        pytest.param(Sampling(), marks=pytest.mark.slow),
        Sampling(temperature=0.8, top_p=0.95),
    ],
)
def test_replay_equals_decoding_round_by_round(tiny, sampling):
    config, params = tiny
    config = dataclasses.replace(config, eos_ids=(7, 11))
    plan = Plan(config, prompt_lookup(12), sampling, BUCKETS)
    rng = np.random.default_rng(2)
    queue = [rng.integers(0, 61, n).tolist() for n in (1, 30, 12, 20)]
    options = {"max_new_tokens": 50, "seed": 4}
    recordings = record(plan, params, queue, batch=2, **options)
    played = replay(plan, params, recordings, max_new_tokens=50)
    real, _ = decode_all(plan, params, queue, batch=2, **options)
    for a, b in zip(played, real, strict=True):
        assert dataclasses.replace(a, seconds=0.0) == dataclasses.replace(b, seconds=0.0)


def test_replay_refuses_methods_that_learn_from_rejected_nodes(tiny):
    config, params = tiny
    with pytest.raises(ValueError, match="measure it by decoding"):
        replay(Plan(config, token_recycling(8)), params, [], max_new_tokens=5)

    seeing = ar()._replace(observe=lambda params, state, verdict: state)
    with pytest.raises(ValueError, match="measure it by decoding"):
        replay(Plan(config, seeing), params, [], max_new_tokens=5)


def test_replay_where_the_chunks_of_a_prompt_are_wider_than_the_cache(tiny):
    config, params = tiny
    config = dataclasses.replace(config, max_positions=180)
    plan = Plan(config, prompt_lookup(4), buckets=(1, 4))
    prompt = np.random.default_rng(3).integers(0, 9, 163).tolist()  # read as 128 and 64
    recordings = record(plan, params, [prompt], max_new_tokens=20)
    [played] = replay(plan, params, recordings, max_new_tokens=20)
    [real], _ = decode_all(plan, params, [prompt], max_new_tokens=20)
    assert dataclasses.replace(played, seconds=0.0) == dataclasses.replace(real, seconds=0.0)
    for options, says in (
        ({"capacity": -1}, "capacity"),
        ({"capacity": 40}, "longer than the context"),
        ({"max_new_tokens": 0}, "max_new_tokens must be 1 or above"),
    ):
        with pytest.raises(ValueError, match=says):
            replay(plan, params, recordings, **({"max_new_tokens": 20} | options))


def test_taps_are_absorbed_in_order(tiny, story):
    """Every known token reaches the method once, with the taps of a plain forward."""
    config, params = tiny
    prompt, tokens = story
    from jspec.recording import text_taps

    text = np.asarray(prompt + tokens[:40], np.int32)
    want = text_taps(Plan(config, ar()), params, text, (0, 2))
    seen = []

    inner = echo(16, 5)
    needs = dataclasses.replace(inner.needs, taps=(0, 2))

    def absorb(p, state, tokens, taps, counts):
        jax.debug.callback(
            lambda t, x, n: seen.append((np.asarray(t)[0, : n[0]], np.asarray(x)[0, : n[0]])),
            tokens,
            taps,
            counts,
            ordered=True,
        )
        return inner.absorb(p, state, tokens, taps, counts)

    plan, params = knowing(tiny, story)
    plan = dataclasses.replace(plan, method=inner._replace(needs=needs, absorb=absorb))
    run(plan, params, prompt, max_new_tokens=40)
    jax.effects_barrier()
    got, taps = (np.concatenate(part) for part in zip(*seen, strict=True))
    count = len(prompt) + 40 - 1
    assert len(got) == count
    np.testing.assert_array_equal(got, text[:count])
    np.testing.assert_allclose(taps, want[:count], atol=1e-4)


def test_a_warm_up_compiles_everything_and_changes_nothing(tiny, story):
    plan, params = knowing(tiny, story)
    prompt, _ = story
    queue = [prompt, prompt * 3, [1]]
    options = {"max_new_tokens": 20, "capacity": 512}
    cold, _ = decode_all(plan, params, queue, **options)
    for profile in (False, True):
        run = Stream(plan, params, queue, **options, warm_up=True, profile=profile)
        assert run.prefill_seconds == run.decode_seconds == 0
        before = advance._cache_size(), _read_chunk._cache_size()
        warm = [event.finished for event in run if event.finished]
        assert (advance._cache_size(), _read_chunk._cache_size()) == before
        for a, b in zip(warm, cold, strict=True):
            assert dataclasses.replace(a, seconds=0.0) == dataclasses.replace(b, seconds=0.0)


@pytest.mark.parametrize(
    ("prompt", "most", "match"),
    [
        ([], 5, "at least one token"),
        ([61], 5, "outside the vocabulary"),
        ([-1], 5, "outside the vocabulary"),
        ([1] * 256, 5, "longer than the context allows, 255"),
        ([1], 0, "max_new_tokens must be 1 or above"),
    ],
)
def test_admit_refuses(tiny, prompt, most, match):
    config, params = tiny
    plan = Plan(config, ar())
    state = new_state(plan, params, 1, 256, jax.random.key(0))
    with pytest.raises(ValueError, match=match):
        admit(plan, params, state, 0, prompt, 0, most)


def rooted(tree_of):
    """A method of one-node trees, whatever they are."""
    return ar()._replace(
        budget=2, propose=lambda p, s, roots, keep=None: (Proposal(tree_of(roots)), s)
    )


@pytest.mark.parametrize(
    "tree_of",
    [
        lambda roots: root_only(roots + 1, 2),  # another root
        lambda roots: dataclasses.replace(root_only(roots, 2), size=0 * roots),  # none
    ],
)
def test_a_row_advances_from_its_last_token_whatever_is_proposed(tiny, story, tree_of):
    config, params = tiny
    prompt, tokens = story
    plan = Plan(config, rooted(tree_of))
    assert run(plan, params, prompt, max_new_tokens=12).tokens == tokens[:12]


def test_trees_above_the_budget_are_refused(tiny):
    config, params = tiny
    plan = Plan(config, rooted(lambda roots: root_only(roots, 3)))
    with pytest.raises(ValueError, match="proposed trees of 3 nodes, its budget is 2"):
        Stream(plan, params, [[1]], max_new_tokens=5)


def test_other_refusals(tiny):
    config, params = tiny
    needing = [
        (Needs(top_k=62), r"top tokens wanted must be in 0\.\.61"),
        (Needs(taps=(0, 3)), r"taps must be in 0\.\.2, got 3"),
        (Needs(lookahead=1), "not there yet"),
    ]
    for needs, match in needing:
        with pytest.raises(ValueError, match=match):
            Plan(config, ar()._replace(needs=needs))
    with pytest.raises(ValueError, match="buckets must ascend"):
        Plan(config, ar(), buckets=(4, 4))
    state = new_state(Plan(config, ar()), params, 2, 256, jax.random.key(0))
    for slot in (-1, 2):
        with pytest.raises(ValueError, match=r"slot must be in 0\.\.1"):
            admit(Plan(config, ar()), params, state, slot, [1], 0, 5)
    once = Stream(Plan(config, ar()), params, [[1]], max_new_tokens=1)
    list(once)
    with pytest.raises(RuntimeError, match="once"):
        list(once)
    for options, says in (
        ({"batch": 0}, "batch must be 1 or above"),
        ({"rounds": 1 << 40}, "rounds must be in"),
        ({"seed": -1}, "seed must be in"),
        ({"first_index": 1 << 31}, "first_index must be in"),
        ({"stops": np.zeros((1, 5), np.int32)}, r"stops must be \[states, 61\]"),
    ):
        with pytest.raises(ValueError, match=says):
            Stream(Plan(config, ar()), params, [[1]], **({"max_new_tokens": 5} | options))
    with pytest.raises(ValueError, match="prompt must be a sequence of token ids"):
        Stream(Plan(config, ar()), params, [[1 << 70]], max_new_tokens=5)
    with pytest.raises(ValueError, match=r"budget must be in 1\.\.512"):
        Plan(config, ar()._replace(budget=513))


def test_chunks_cover_the_prompt():
    for count in range(700):
        widths = chunks(count, 1024)
        assert sum(widths) >= count
        assert sum(widths[:-1]) < max(count, 1)
    assert chunks(300, 1024) == [256, 64]
    assert chunks(20, 24) == [24]


def test_capacity_holds_the_last_path(tiny):
    config, _ = tiny
    plan = Plan(config, echo(16, 15))
    assert capacity_for(plan, 240) == 256
    assert capacity_for(plan, 241) == 512
    assert capacity_for(plan, 5000) == config.max_positions
