"""Measuring on the program that decoding uses."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.cost import measure
from jspec.cost.measure import measure_cost, measure_profile
from jspec.cost.profile import setting_of
from jspec.driver import decode_all
from jspec.methods import ar, smart, token_recycling
from jspec.models.transformer import fuse
from jspec.state import Plan
from tests.drafters import echo
from tests.methods.test_smart import by_level

BUCKETS = (1, 2, 4)


@pytest.fixture(scope="module")
def tiny(tiny_model):
    config, params = tiny_model(eos_ids=(7,))
    return config, {"target": fuse(config, params), "text": jnp.arange(300) % 61}


@pytest.fixture
def clock(monkeypatch):
    """Time passes only in ``advance`` and in the steps: as much as a made-up machine takes."""
    now, calls = [0.0], []

    def advance(plan, params, state, most):
        resting = int(state.method.shared.ledger.rest) > 0
        rows = max(int(state.least_rows), int((~state.rows.done).sum()))
        calls.append((rows, resting, int((~state.rows.done).sum())))
        now[0] += most * (0.010 + 0.002 * rows + (0.0 if resting else 0.003))
        return state

    def fixed(plan, params, state):
        return 0.004

    monkeypatch.setattr(measure, "advance", advance)
    monkeypatch.setattr(measure, "_fixed", fixed)
    monkeypatch.setattr(measure.time, "perf_counter", lambda: now[0])
    return calls


@pytest.mark.parametrize("batch", [1, 3])
def test_the_parts_add_up_to_the_rounds(tiny, clock, batch):
    config, params = tiny
    plan = Plan(config, smart(echo(4, 3)), buckets=BUCKETS)
    found = measure_cost(plan, params, batch, 256, seconds=0)
    assert found.rows == plan.row_buckets(batch)
    for rows, seconds in zip(found.rows, found.verify):
        assert found.fixed + seconds == pytest.approx(0.010 + 0.002 * rows)
    assert found.draft == pytest.approx((0.003,) * 3)
    assert found.fixed == 0.004 and max(found.spread) < 1e-6
    # Every bucket is run, and buckets below the batch by fewer rows.
    assert {(rows, active) for rows, _, active in clock} == {
        (rows, min(rows, batch)) for rows in found.rows
    }
    assert [resting for _, resting, _ in clock].count(False) == 1 + measure.LEAST


@pytest.mark.parametrize("often", [False, True])
def test_a_bucket_that_was_disturbed_is_measured_again(tiny, clock, monkeypatch, often):
    """No bucket is dearer than those of more rows: else these would look free."""
    config, params = tiny
    quiet, calls = measure.advance, []

    def advance(plan, params, state, most):
        rows, start = int(state.least_rows), measure.time.perf_counter()
        state = quiet(plan, params, state, most)
        if (
            rows == 1
            and int(state.method.shared.ledger.rest)
            and (often or len(calls) <= measure.LEAST)
        ):
            calls.append(rows)
            quiet(plan, params, state, 2 * most)  # three times as long
        assert measure.time.perf_counter() > start
        return state

    monkeypatch.setattr(measure, "advance", advance)
    plan = Plan(config, smart(echo(4, 3)), buckets=BUCKETS)
    found = measure_cost(plan, params, 1, 256, seconds=0)
    true = [0.010 + 0.002 * rows for rows in found.rows]
    rounds = [found.fixed + seconds for seconds in found.verify]
    if often:
        assert rounds == pytest.approx([true[1], *true[1:]])
        assert found.disturbed == pytest.approx(3 * true[0] / true[1] - 1)
        assert len(calls) == (1 + measure.AGAIN) * (1 + measure.LEAST)
    else:
        assert rounds == pytest.approx(true)  # two more turns outvote the first
        assert found.disturbed == pytest.approx(0)
    assert found.draft == pytest.approx((0.003 + true[0] - rounds[0],) * 3)


def test_the_program_is_the_one_that_decodes(tiny):
    """Decoding after a measurement compiles no round, nor the measurement after decoding."""
    config, params = tiny
    plan = Plan(config, smart(token_recycling(4, k=2)), buckets=BUCKETS)
    stops = np.zeros((2, config.vocab_size), np.int32)
    before = measure.advance._cache_size()
    found = measure_cost(plan, params, 2, 256, stops=stops, seconds=0)
    assert measure.advance._cache_size() == before + 1
    assert min(found.verify) > 0 and found.fixed > 0 and min(found.draft) >= 0
    profile = measure_profile(
        plan, params, setting_of(plan, params, "t", None, 2, 256), stops=stops, seconds=0
    )
    assert profile.rows == found.rows == (1, 2, 4, 8)
    options = {"max_new_tokens": 8, "capacity": 256, "batch": 2, "stops": stops}
    decode_all(plan, params | {"cost": profile.cost()}, [[1, 2, 3], [4, 5]], **options)
    assert measure.advance._cache_size() == before + 1


def test_levels_are_timed_where_a_drafter_has_them(tiny, clock, monkeypatch):
    config, params = tiny
    plan = Plan(config, smart(by_level(3, 2, 0.9, config.vocab_size)), buckets=BUCKETS)
    asked = []

    def timed(points, seconds):
        if "draft" in points:
            return whole(points, seconds)
        asked.extend(points)
        for call, make in points.values():
            chex.assert_tree_all_finite(call(make()).depths)
        return {n: [0.001 * n + 0.1] for n in points}

    whole = measure.time_points
    monkeypatch.setattr(measure, "time_points", timed)
    found = measure_cost(plan, params, 1, 256, seconds=0)
    assert asked == [1, 2, 3]
    assert found.draft == pytest.approx((0.001, 0.002, 0.003))


def test_what_it_refuses(tiny):
    config, params = tiny
    with pytest.raises(ValueError, match="method must be one of smart, got ar"):
        measure_cost(Plan(config, ar()), params, 1, 256)
    short = dataclasses.replace(config, max_positions=6)
    plan = Plan(short, smart(echo(4, 3)), buckets=BUCKETS)
    with pytest.raises(ValueError, match="6 rows is too small to measure"):
        measure_cost(plan, params, 1, 6)


def test_the_fixed_part_is_a_time(tiny):
    config, params = tiny
    plan = Plan(config, smart(echo(4, 3)), buckets=BUCKETS)
    found = measure_cost(plan, params, 1, 256, seconds=0)
    assert all(np.isfinite(x) and x > 0 for x in (found.fixed, *found.verify))
    assert jax.tree.all(jax.tree.map(lambda x: x >= 0, found))
