"""SMART in real rounds: what it verifies, when it rests, what it remembers, and what compiles."""

import dataclasses
import functools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.cost.table import make_cost
from jspec.decode import decode_round
from jspec.driver import decode_all
from jspec.heads.config import config_for
from jspec.heads.parallel import init_head
from jspec.method import Method, MethodState, Needs, Proposal
from jspec.methods import ar, ddtree, prompt_lookup, smart, token_recycling
from jspec.methods.smart import hold
from jspec.models.transformer import fuse
from jspec.prefill import admit
from jspec.recording import record, replay, replay_states
from jspec.sampling import Sampling
from jspec.sleeping import LONGEST
from jspec.state import Plan, new_state
from tests.drafters import by_level, echo, noise

VOCAB, CAPACITY, PROMPT = 61, 512, [5, 9, 17, 3, 4]
# Seconds by rows as on two cores (section 8 of the design), and what a draft costs.
ROWS = (1, 2, 4, 8, 16, 32, 64)
TIMES = np.array([25, 31, 39, 46, 57, 81, 120]) / 1000
DRAFT = 0.005
FREE = np.full(7, 0.03) + 1e-4 * np.arange(7)  # more rows cost next to nothing


def cost_of(times=TIMES, draft=(DRAFT,)):
    return make_cost(ROWS, times, draft, fit=(0.0, 0.03, 0.6, 0.4))


@pytest.fixture(scope="module")
def tiny(tiny_model):
    config, params = tiny_model()
    return config, {"target": fuse(config, params), "cost": cost_of()}


@pytest.fixture(scope="module")
def answer(tiny):
    """The target's own text after the prompt, greedy."""
    config, params = tiny
    plan = Plan(config, ar(), buckets=(1,))
    [one], _ = decode_all(plan, params, [PROMPT], max_new_tokens=450, capacity=CAPACITY)
    return one.tokens


@functools.cache
def sure(method):
    """A drafter that is 97 % sure of all that it says."""

    def propose(params, state, roots, keep_growing=None):
        proposal, state = method.propose(params, state, roots)
        tree = proposal.tree
        scores = jnp.where(tree.live, tree.depths * math.log(0.97), -jnp.inf)
        return proposal._replace(tree=dataclasses.replace(tree, scores=scores)), state

    return method._replace(propose=propose)


def rounds_of(plan, params, batch=1, most=400, prompts=(PROMPT,), limit=400):
    """What each round verified and emitted, and the state after all."""
    state = new_state(plan, params, batch, CAPACITY, jax.random.key(0))
    for slot, prompt in enumerate(prompts):
        state = admit(plan, params, state, slot, prompt, slot, limit)
    step = jax.jit(decode_round, static_argnums=0)
    trees = []
    for _ in range(most):
        if state.rows.done.all():
            break
        state, verdict = step(plan, params, state)
        trees.append((np.asarray(verdict.tree.size), np.asarray(verdict.count)))
    return trees, state


def test_a_drafter_that_knows_the_answer_soon_drafts_as_deep_as_pays(tiny, answer):
    config, params = tiny
    params = params | {"text": jnp.asarray(PROMPT + answer)}
    plan = Plan(config, smart(echo(16, 15)), buckets=ROWS)
    trees, state = rounds_of(plan, params, most=24)
    sizes = [int(size[0]) for size, _ in trees]
    assert sizes[0] <= 2  # nothing is known yet
    assert min(sizes[19:]) == 16  # 16 tokens for 57 ms
    assert all(count[0] == size[0] for size, count in trees)  # all of it is accepted
    assert state.rows.tokens[0, 5:60].tolist() == answer[:55]


def test_where_more_rows_cost_their_price_a_perfect_drafter_stays_shallow(tiny, answer):
    config, params = tiny
    steep = cost_of(np.array([25, 31, 39, 150, 300, 600, 1200]) / 1000)
    params = params | {"text": jnp.asarray(PROMPT + answer), "cost": steep}
    plan = Plan(config, smart(echo(16, 15)), buckets=ROWS)
    trees, _ = rounds_of(plan, params, most=24)
    assert [int(size[0]) for size, _ in trees[15:]] == [4] * 9


@pytest.mark.parametrize("confident", [False, True])
def test_a_drafter_that_knows_nothing_rests_within_twenty_rounds(tiny, answer, confident):
    config, params = tiny
    drafter = noise(16, 4, VOCAB)
    drafter = sure(drafter) if confident else drafter
    plan = Plan(config, smart(drafter), buckets=ROWS)
    trees, state = rounds_of(plan, params)
    assert state.rows.tokens[0, 5:405].tolist() == answer[:400]
    sizes = np.array([size[0] for size, _ in trees])
    assert 1 in sizes[:20] and (sizes[20:] > 1).mean() < 0.1
    ledger = state.method.shared.ledger
    assert int(ledger.interval) == LONGEST


@functools.cache
def two_faced(budget, depth, start):
    """Knows nothing until the text has ``start`` tokens, and everything from then on. Counts its drafts."""
    bad, good = noise(budget, depth, VOCAB), echo(budget, depth)

    def init(params, batch, capacity, memory):
        return MethodState(rows=jnp.zeros((batch,), jnp.int32), shared=jnp.int32(0))

    def absorb(params, state, tokens, taps, counts):
        return MethodState(rows=state.rows + counts, shared=state.shared)

    def propose(params, state, roots, keep_growing=None):
        known = MethodState(rows=state.rows)
        trees = [drafter.propose(params, known, roots)[0].tree for drafter in (bad, good)]
        late = state.rows[0] >= start
        tree = jax.tree.map(lambda a, b: jnp.where(late, b, a), *trees)
        scores = jnp.where(tree.live, tree.depths * -1.0, -jnp.inf)
        tree = dataclasses.replace(tree, scores=scores)
        return Proposal(tree, passes=1), MethodState(rows=state.rows, shared=state.shared + 1)

    return Method("two_faced", budget, propose, Needs(depth=depth, taps=(1,)), init, absorb)


@pytest.mark.parametrize("queue", [3, 32])
def test_it_wakes_up_when_drafting_pays_again(tiny, answer, queue):
    config, params = tiny
    start = 150
    params = params | {"text": jnp.asarray(PROMPT + answer)}
    plan = Plan(config, smart(two_faced(8, 7, start), queue=queue), buckets=ROWS)
    trees, state = rounds_of(plan, params, limit=300)
    assert state.rows.tokens[0, 5:305].tolist() == answer[:300]
    known = 5 + np.cumsum([count[0] for _, count in trees])
    first = int(np.searchsorted(known, start + 1))  # the first round that could draft well
    sizes = np.array([size[0] for size, _ in trees])
    assert (sizes[first - 60 : first] > 1).mean() < 0.15
    assert (sizes[first : first + 20] > 1).any()
    woken = first + int(np.argmax(sizes[first:] > 1))
    assert (sizes[woken:-1] > 1).all()
    assert sizes[-2] == 8
    # A pass that was not run was not counted, and the drafter was never asked.
    drafted = int(state.draft_passes)
    assert drafted == int(state.method.shared.inner) < len(trees) - 60
    assert state.method.rows.inner[0] + state.method.rows.queue.length[0] == state.known[0] - 1


def test_a_draft_that_rests_saves_its_pass_and_the_head_catches_up(tiny):
    """The head's cache after rests is what it would have been without."""
    config, params = tiny
    head = config_for(config, mask_token_id=60, taps=(0, 1), block_size=5, causal=True)
    params = params | {"head": init_head(head, jax.random.key(1))}
    method = ddtree(head, 8)
    plan = Plan(config, smart(method, queue=4), Sampling(0.8), buckets=ROWS)
    state = new_state(plan, params, 2, CAPACITY, jax.random.key(0))
    for slot, prompt in enumerate((PROMPT, PROMPT[:2])):
        state = admit(plan, params, state, slot, prompt, slot, 60)
    step = jax.jit(decode_round, static_argnums=0)
    passes = []
    for number in range(14):
        held = hold(state.method, resting=number % 7 < 6)
        state = step(plan, params, dataclasses.replace(state, method=held))[0]
        passes.append(int(state.draft_passes))
    assert passes == [0] * 6 + [1] * 7 + [2]
    plain = Plan(config, method, Sampling(0.8), buckets=ROWS)
    other = new_state(plain, params, 2, CAPACITY, jax.random.key(0))
    for slot, prompt in enumerate((PROMPT, PROMPT[:2])):
        other = admit(plain, params, other, slot, prompt, slot, 60)
    while (other.known < state.known).any():
        done = other.known == state.known
        rows = dataclasses.replace(other.rows, done=done, limit=state.known)
        other = step(plain, params, dataclasses.replace(other, rows=rows))[0]
    np.testing.assert_array_equal(other.rows.tokens, state.rows.tokens)
    mine, theirs = state.method.rows.inner, other.method.rows
    waiting = state.method.rows.queue.length
    np.testing.assert_array_equal(mine.length + waiting, theirs.length)
    for row, length in enumerate(mine.length.tolist()):
        for a, b in zip(mine.keys + mine.values, theirs.keys + theirs.values, strict=True):
            np.testing.assert_allclose(a[row, :, :length], b[row, :, :length], atol=2e-4)


@pytest.mark.parametrize(("sure", "level", "passes"), [(0.97, 0.002, 6), (0.05, 0.004, 1)])
def test_a_level_that_can_not_pay_is_not_drafted(tiny, answer, sure, level, passes):
    """At 25 ms a token a level of 4 ms needs a path that lives with a chance of 0.16."""
    config, params = tiny
    levels = cost_of(draft=level * np.arange(1, 7))
    params = params | {"text": jnp.asarray(PROMPT + answer), "cost": levels}
    plan = Plan(config, smart(by_level(6, 2, sure, VOCAB), rest=False), buckets=ROWS)
    state = new_state(plan, params, 1, CAPACITY, jax.random.key(0))
    state = admit(plan, params, state, 0, PROMPT, 0, 100)
    proposal, _ = jax.jit(plan.method.propose)(params, state.method, state.roots)
    assert int(proposal.passes) == passes

    def never(level, scores):
        return jnp.zeros(scores.shape[:1], bool)

    stopped, _ = plan.method.propose(params, state.method, state.roots, never)
    assert int(stopped.passes) == 0 and stopped.tree.size.tolist() == [1]


def test_finished_rows_do_not_draft_and_every_row_keeps_its_root(tiny, answer):
    config, params = tiny
    params = params | {"text": jnp.asarray(PROMPT + answer), "cost": cost_of(FREE)}
    plan = Plan(config, smart(echo(8, 7)), buckets=ROWS)
    state = new_state(plan, params, 3, CAPACITY, jax.random.key(0))
    state = admit(plan, params, state, 0, PROMPT, 0, 10)
    state = admit(plan, params, state, 2, PROMPT, 1, 40)
    step, sizes = jax.jit(decode_round, static_argnums=0), []
    while not state.rows.done.all():
        running = ~np.asarray(state.rows.done)
        state, verdict = step(plan, params, state)
        sizes.append(verdict.tree.size.tolist())
        assert ((np.asarray(verdict.tree.size) > 0) == running).all()
    assert sizes[-1][0] == sizes[-1][1] == 0
    assert state.method.rows.active.tolist() == [False, False, True]


def test_poisoned_rows_change_nothing(tiny, answer):
    """What a finished row's drafter says (here: no numbers) reaches neither the choice nor the counts."""
    config, params = tiny
    params = params | {"text": jnp.asarray(PROMPT + answer)}

    @functools.cache
    def spoiled(method):
        def propose(params, state, roots, keep_growing=None):
            proposal, state = method.propose(params, state, roots)
            tree = proposal.tree
            bad = (state.rows == 0)[:, None] | ~tree.live  # rows that never had a prompt
            scores = jnp.where(bad, jnp.nan, tree.scores)
            return proposal._replace(tree=dataclasses.replace(tree, scores=scores)), state

        return method._replace(propose=propose)

    method = echo(8, 7)
    seen = []
    for drafter in (method, spoiled(method)):
        plan = Plan(config, smart(drafter), buckets=ROWS)
        trees, state = rounds_of(plan, params, batch=2, most=20)
        assert all(size[1] == 0 for size, _ in trees)
        seen.append((trees, state.method.shared))
    for a, b in zip(*map(jax.tree.leaves, seen), strict=True):
        np.testing.assert_array_equal(a, b)


def test_nothing_compiles_anew_when_the_cost_changes(tiny, answer):
    config, params = tiny
    params = params | {"text": jnp.asarray(PROMPT + answer)}
    plan = Plan(config, smart(echo(8, 7)), buckets=ROWS)
    chex.clear_trace_counter()
    step = jax.jit(chex.assert_max_traces(decode_round, 1), static_argnums=0)
    state = new_state(plan, params, 1, CAPACITY, jax.random.key(0))
    state = admit(plan, params, state, 0, PROMPT, 0, 450)
    sizes = []
    for times in (FREE, TIMES, 100 * FREE, 0.03 * np.asarray(ROWS) ** 1.5):
        for _ in range(12):
            state, verdict = step(plan, params | {"cost": cost_of(times)}, state)
            sizes.append(int(verdict.tree.size[0]))
    assert sizes[11] == 8 and 1 in sizes[-6:]
    assert smart(echo(8, 7)) is plan.method


def test_what_was_learned_outlives_a_prompt_and_a_request(tiny, answer):
    config, params = tiny
    params = params | {"text": jnp.asarray(PROMPT + answer)}
    plan = Plan(config, smart(echo(16, 15)), buckets=ROWS)
    options = {"max_new_tokens": 60, "capacity": CAPACITY}
    first, run = decode_all(plan, params, [PROMPT] * 2, **options)
    assert (
        first[0].rounds > first[1].rounds
    )  # the second prompt begins with what the first one showed
    memory = run.memory()
    assert memory.calibration.hit.sum() > 50
    again, _ = decode_all(plan, params, [PROMPT] * 2, memory=memory, **options)
    assert again[0].rounds <= first[1].rounds
    assert [one.tokens for one in first + again] == [answer[:60]] * 4
    for leaf in jax.tree.leaves(memory):
        assert not leaf.is_deleted()


def test_prompts_are_not_taken_for_drafts(tiny):
    """A method that is shown prompts' top tokens: a prompt is no tree that was accepted."""
    config, params = tiny
    plan = Plan(config, smart(token_recycling(4, k=2)), buckets=ROWS)
    state = new_state(plan, params, 1, CAPACITY, jax.random.key(0))
    before = jax.tree.map(np.asarray, state.method.shared)
    state = admit(plan, params, state, 0, PROMPT * 9, 0, 10)
    after = state.method.shared
    for a, b in zip(jax.tree.leaves(before[1:]), jax.tree.leaves(after[1:]), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_replay_rests_and_learns_as_decoding_does(tiny):
    config, params = tiny
    method = smart(prompt_lookup(8, depth=4))
    plan = Plan(config, method, Sampling(0.5), buckets=ROWS)
    options = {"max_new_tokens": 90, "capacity": CAPACITY}
    queue = [PROMPT * 3, PROMPT]
    recordings = record(plan, params, queue, max_new_tokens=90)
    replayed = replay(plan, params, recordings, **options)
    for one, prompt, index in zip(replayed, queue, range(2)):
        [real], run = decode_all(plan, params, [prompt], first_index=index, **options)
        assert one.trace == real.trace and one.verified == real.verified
        assert one.tokens == real.tokens
    [state] = replay_states(plan, params, recordings[1:], **options)
    for a, b in zip(*map(jax.tree.leaves, (state.method.shared, run.state.method.shared))):
        np.testing.assert_allclose(a, b, rtol=1e-5)
    assert float(state.method.shared.ledger.spent) >= replayed[1].rounds
    with pytest.raises(ValueError, match="learns from what the target says of rejected nodes"):
        replay(Plan(config, smart(token_recycling(4))), params, recordings, max_new_tokens=9)


@pytest.mark.slow
def test_the_marginal_rule_decodes_too(tiny, answer):
    config, params = tiny
    flat = make_cost(ROWS, TIMES, (DRAFT,), fit=(1e-4, 0.04, 0.5, 0.05))
    params = params | {"text": jnp.asarray(PROMPT + answer), "cost": flat}
    sizes = {}
    for benefit in ("sum", "paths_mean"):
        plan = Plan(
            config, smart(sure(echo(16, 15)), rule="marginal", benefit=benefit), buckets=ROWS
        )
        trees, state = rounds_of(plan, params, most=20)
        assert state.rows.tokens[0, 5:25].tolist() == answer[:20]
        sizes[benefit] = [int(size[0]) for size, _ in trees]
    assert max(sizes["sum"]) > 2


def test_what_it_refuses(tiny):
    config, params = tiny
    method = echo(8, 7)
    for wrong in (0, -0.1, 1.5, float("nan")):
        with pytest.raises(ValueError, match=r"alpha must be in \(0, 1\]"):
            smart(method, alpha=wrong)
    with pytest.raises(ValueError, match="rule must be"):
        smart(method, rule="best")
    with pytest.raises(ValueError, match="benefit must be"):
        smart(method, rule="marginal", benefit="mean")
    with pytest.raises(ValueError, match="benefit must be 'sum'"):
        smart(method, benefit="paths_mean")
    with pytest.raises(ValueError, match="queue must be"):
        smart(method, queue=0)
    plan = Plan(config, smart(method), buckets=ROWS)
    with pytest.raises(ValueError, match='cost model for smart, as "cost"'):
        new_state(plan, {"target": params["target"]}, 1, CAPACITY, jax.random.key(0))
    with pytest.raises(ValueError, match="memory must be one of smart"):
        new_state(plan, params, 1, CAPACITY, jax.random.key(0), memory=3)
    assert smart(ar()) is ar()
