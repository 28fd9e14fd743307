"""The cost table's lookups."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.cost.table import (
    draft_seconds,
    fitted_seconds,
    fitted_slope,
    level_seconds,
    make_cost,
    verify_seconds,
)

COST = make_cost([1, 2, 4, 16], [0.03, 0.04, 0.035, 0.08], [0.01, 0.02, 0.02], 0.002)


def test_times_never_fall_and_lie_between_their_neighbours():
    assert np.asarray(COST.verify).tolist() == pytest.approx([0.03, 0.04, 0.04, 0.08])
    rows = jnp.arange(1, 20)
    got = np.asarray(verify_seconds(COST, rows))
    assert (np.diff(got) >= 0).all()
    assert got[[0, 1, 2, 3, 9, 15, 18]] == pytest.approx([0.03, 0.04, 0.04, 0.04, 0.06, 0.08, 0.08])


def test_drafts_by_passes_and_by_level():
    passes = [float(draft_seconds(COST, n)) for n in range(6)]
    assert passes == pytest.approx([0.01, 0.01, 0.02, 0.02, 0.02, 0.02])
    levels = [float(level_seconds(COST, jnp.int32(n))) for n in range(5)]
    assert levels == pytest.approx([0.01, 0.01, 0, 0, 0], abs=1e-8)


def test_the_closed_form_and_its_slope():
    cost = make_cost([1], [1.0], fit=(0.002, 0.03, 0.4, 0.5))
    for rows in (1.0, 3.0, 40.0):
        got = float(fitted_seconds(cost, jnp.float32(rows)))
        assert got == pytest.approx(0.002 * rows + 0.03 * (np.exp(0.4 * rows**0.5) - 1), rel=1e-5)
        slope = jax.grad(lambda n: fitted_seconds(cost, n))(jnp.float32(rows))
        assert float(fitted_slope(cost, jnp.float32(rows))) == pytest.approx(float(slope), rel=1e-4)


WRONG = {
    "rows must ascend": ([2, 1], [0.1, 0.2]),
    "rows must ascend from 1": ([0, 1], [0.1, 0.2]),
    "verify must have a time for each of 2": ([1, 2], [0.1]),
    "verify must be seconds": ([1, 2], [0.1, float("nan")]),
    "verify must be above 0": ([1, 2], [0.0, 0.1]),
    "draft must be seconds": ([1], [0.1], [-1.0]),
    "draft must have": ([1], [0.1], []),
    "fixed must be seconds": ([1], [0.1], [0.1], float("inf")),
    "fit must be 4": ([1], [0.1], [0.1], 0.0, [1.0]),
}


@pytest.mark.parametrize("says", WRONG)
def test_what_is_no_table_is_refused(says):
    with pytest.raises(ValueError, match=says):
        make_cost(*WRONG[says])
