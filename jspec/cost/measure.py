"""Measuring what a round costs, on the very program that decoding runs; only its small steps are compiled for it alone.

A round of ``smart`` is timed in every row bucket while drafting rests: that is a verify forward and what is fixed. A
round that drafts, in the smallest bucket, tells the draft. The split between verify and fixed comes from the small
steps of a round, timed one by one; their sum is exact without it.

What disturbs a measurement makes it slower, never faster. So where more rows took less time, it is the fewer rows that
were disturbed: the lesser time holds for both. Where that changes much, more is measured.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int
from tqdm import tqdm

from jspec.attention import default_attention
from jspec.cost.profile import Profile, Setting
from jspec.cost.table import make_cost
from jspec.decode import advance
from jspec.driver import run_absorb_observe, run_accept_commit, run_propose
from jspec.method import MethodState, Params
from jspec.methods.smart import SmartShared, hold
from jspec.prefill import admit
from jspec.state import DecodeState, Plan, new_state
from jspec.verification import verify

ROUNDS = 4  # of a timed call: what starting a program costs counts as little as in decoding
LEAST, MOST = 3, 12  # timed calls of each point
DISTURBED = 0.1  # of a time: where it is off by more, it is measured again, up to AGAIN times
AGAIN = 2
CONTEXT = 33  # tokens known at the start


class Measured(NamedTuple):
    """Seconds; K row buckets."""

    rows: tuple[int, ...]
    verify: tuple[float, ...]
    spread: tuple[float, ...]  # relative, between quartiles
    draft: tuple[float, ...]
    fixed: float
    disturbed: float  # how far a time was above those of more rows, at most, relative


def measure_profile(
    plan: Plan,
    params: Params,
    setting: Setting,
    *,
    stops: Int[np.ndarray, "states V"] | None = None,
    seconds: float | int = 20.0,
) -> Profile:
    """Measures a profile of a setting; see ``measure_cost``."""
    found = measure_cost(
        plan, params, setting.batch, setting.capacity, stops=stops, seconds=seconds
    )
    return Profile(setting, **found._asdict())


def measure_cost(
    plan: Plan,
    params: Params,
    batch: int,
    capacity: int,
    *,
    stops: Int[np.ndarray, "states V"] | None = None,
    seconds: float | int = 20.0,
) -> Measured:
    """Times rounds in every row bucket, in turns, with progress on a terminal's stderr.

    Args:
      plan: its method is one of ``smart``.
      params: as decoding takes them; "cost" need not be there.
      batch: slots.
      capacity: cache rows of a slot.
      stops: of the shape that decoding uses, so that it is the same program.
      seconds: about how long, compilation aside; three calls for each point are made in any case.

    Raises:
      ValueError: a method that is not one of ``smart``, or a cache too small to measure in.
    """
    buckets = plan.row_buckets(batch)
    levels = max(plan.method.needs.depth, 1)
    params, ready = ready_rounds(plan, params, batch, capacity, stops)

    def rounds(rows, resting):
        return lambda state: advance(plan, params, state, ROUNDS), lambda: ready(rows, resting)

    first = next(b for b in buckets if b >= batch)
    points = {rows: rounds(rows, True) for rows in buckets} | {"draft": rounds(first, False)}
    times = {name: [] for name in points}
    for turn in range(1 + AGAIN):
        for name, found in time_points(points, seconds if turn == 0 else 0.0).items():
            times[name] += [t / ROUNDS for t in found]
        whole = {name: statistics.median(found) for name, found in times.items()}
        rounds_of = _undisturbed([whole[rows] for rows in buckets])
        disturbed = max(whole[rows] / t - 1 for rows, t in zip(buckets, rounds_of))
        if disturbed <= DISTURBED:
            break
    fixed = min(_fixed(plan, params, ready(first, True)), rounds_of[0] / 2)
    draft = max(whole["draft"] - rounds_of[buckets.index(first)], 0.0)
    return Measured(
        rows=buckets,
        verify=tuple(t - fixed for t in rounds_of),
        spread=tuple(_spread(times[rows]) for rows in buckets),
        draft=_by_level(plan, params, ready(first, False), draft, levels),
        fixed=fixed,
        disturbed=disturbed,
    )


def _undisturbed(times):
    """Times in the order of what they measure: none above a later one."""
    return np.minimum.accumulate(np.asarray(times)[::-1])[::-1].tolist()


def ready_rounds(
    plan: Plan,
    params: Params,
    batch: int,
    capacity: int,
    stops: Int[np.ndarray, "states V"] | None = None,
    context: int = CONTEXT,
) -> tuple[Params, Callable[[int, bool], DecodeState]]:
    """Params, and ``ready(rows, resting)``: a state whose rounds run in that row bucket, and draft or do not.

    The trees are cut to their roots, so that a round adds one token. ``context`` tokens are known, at most; the rest is
    as for ``measure_cost``.
    """
    buckets = plan.row_buckets(batch)
    # Rows so dear that only roots are verified, drafts for nothing: which part runs is up to the caller.
    levels = max(plan.method.needs.depth, 1)
    steep = make_cost(buckets, 1e3 * np.asarray(buckets), np.zeros(levels))
    params = {**params, "cost": steep}
    if "graft(" in plan.method.name:
        params["graft"] = jnp.float32(0)  # stops no draft: all of its passes are to be timed
    base = _begin(plan, params, batch, capacity, stops, context)

    def ready(rows, resting):
        state = jax.tree.map(jnp.copy, base)
        done = jnp.arange(batch) >= rows
        return dataclasses.replace(
            state,
            rows=dataclasses.replace(state.rows, done=done),
            method=hold(state.method, resting),
            least_rows=jnp.int32(rows),
        )

    return params, ready


def _begin(plan, params, batch, capacity, stops, context) -> DecodeState:
    """Slots with some text each, whose rows end at no token."""
    context = min(context, min(capacity, plan.config.max_positions) - ROUNDS - 2)
    if context < 1:
        raise ValueError(f"a cache of {capacity} rows is too small to measure rounds in")
    never = np.zeros((1, plan.config.vocab_size) if stops is None else stops.shape, np.int32)
    state = new_state(plan, params, batch, capacity, jax.random.key(0), never)
    if not isinstance(state.method.shared, SmartShared):
        raise ValueError(f"method must be one of smart, got {plan.method.name}")
    prompt = (np.arange(context) * 7 % plan.config.vocab_size).tolist()
    for slot in range(batch):
        state = admit(plan, params, state, slot, prompt, slot, capacity)
    return state


def time_points(
    points: dict[str | int, tuple[Callable, Callable]], seconds: float | int
) -> dict[str | int, list[float]]:
    """Seconds of calls by point, in turns; a first call of each, which may compile, is not counted.

    Args:
      points: what is called, and what makes its argument.
      seconds: about how long; three calls for each point are counted in any case.
    """
    times = {name: [] for name in points}
    bar = tqdm(total=len(points) * (MOST + 1), desc="measuring costs", leave=False, disable=None)
    with bar:
        start, turn = time.perf_counter(), 0
        while turn <= LEAST or (turn <= MOST and time.perf_counter() - start < seconds):
            for name, (call, make) in points.items():
                state = jax.block_until_ready(make())
                begun = time.perf_counter()
                jax.block_until_ready(call(state))
                if turn:
                    times[name].append(time.perf_counter() - begun)
                bar.update()
            if turn == 0:
                start = time.perf_counter()
            turn += 1
    return times


def _spread(times):
    low, mid, high = np.quantile(times, [0.25, 0.5, 0.75])
    return float((high - low) / mid)


def _fixed(plan, params, state):
    """Seconds of a resting round outside the verify forward, from its steps."""
    tree, _ = jax.eval_shape(lambda s: run_propose(plan, params, s), state)
    shapes = jax.eval_shape(lambda s, tree: verify(plan, params, s, tree), state, tree)
    verified = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    taken = []
    for _ in range(LEAST + 1):
        copy = jax.block_until_ready(jax.tree.map(jnp.copy, state))
        start = time.perf_counter()
        tree, copy = run_propose(plan, params, copy)
        verdict, copy, kept = run_accept_commit(plan, params, copy, tree, verified)
        jax.block_until_ready(run_absorb_observe(plan, params, copy, verdict, kept))
        taken.append(time.perf_counter() - start)
    return min(taken[1:])


def works_by_level(
    plan: Plan,
    params: Params,
    state: MethodState,
    roots: Int[Array, " B"] | jax.ShapeDtypeStruct,
) -> bool:
    """Whether a drafter asks before each level; arrays may be abstract."""
    asked = []

    def keep_growing(level, scores):
        asked.append(level)
        return jnp.ones(scores.shape[:1], bool)

    jax.eval_shape(lambda *given: plan.method.propose(*given, keep_growing), params, state, roots)
    return bool(asked)


def _by_level(plan, params, state, draft, levels):
    """Seconds of drafts by their passes: those of a level-by-level drafter are timed up to each level."""

    def upto(params, state, limit):
        def keep_growing(level, scores):
            return jnp.broadcast_to(level < limit, scores.shape[:1])

        with default_attention(plan.attention):
            return plan.method.propose(params, state.method, state.roots, keep_growing)[0].tree

    if not works_by_level(plan, params, state.method, state.roots):
        return (draft,) * levels
    call = jax.jit(upto)
    points = {
        n: (lambda n: call(params, state, n), lambda n=n: jnp.int32(n))
        for n in range(1, levels + 1)
    }
    times = time_points(points, 0.0)
    whole = np.array(_undisturbed([statistics.median(times[n]) for n in points]))
    return tuple(np.maximum(draft - (whole[-1] - whole), 0.0).tolist())
