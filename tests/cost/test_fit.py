"""The closed form's fit."""

import numpy as np
import pytest

from jspec.cost.fit import fit_cost

ROWS = np.array([1, 2, 4, 8, 16, 32, 64])


@pytest.mark.parametrize("truth", [(0.02, 0.5, 0.3), (0.002, 2.5, 0.1), (0.3, 0.02, 0.9)])
def test_a_closed_form_is_found_again(truth):
    gamma, delta, rho = truth
    verify = gamma * np.expm1(delta * ROWS**rho)
    fit = fit_cost(ROWS, verify, 0.01)
    np.testing.assert_allclose(fit.verify(ROWS), verify, rtol=0.02)
    assert fit.worst_error < 0.02 and fit.median_error <= fit.worst_error
    assert fit.weight == pytest.approx(0.01 * ROWS.sum() / (ROWS**2).sum())


def test_nothing_nearby_is_better():
    verify = np.array([29, 38, 47, 56, 73, 104, 157]) / 1000  # section 8 of the design
    fit = fit_cost(ROWS, verify, 0.0)

    def error(gamma, delta, rho):
        return ((gamma * np.expm1(delta * ROWS**rho) - verify) ** 2).sum()

    mine = error(fit.gamma, fit.delta, fit.rho)
    rng = np.random.default_rng(0)
    for _ in range(300):
        near = np.array([fit.gamma, fit.delta, fit.rho]) * np.exp(0.02 * rng.normal(size=3))
        assert error(*near) > mine * (1 - 1e-6)
    errors = abs(fit.verify(ROWS) / verify - 1)
    assert fit.worst_error == pytest.approx(errors.max())
    assert fit.median_error == pytest.approx(np.median(errors))
    assert fit.weight == 0


def test_one_row_count_and_a_flat_table():
    assert fit_cost(np.array([1]), np.array([0.03]), 0.01).worst_error < 1e-6
    flat = fit_cost(ROWS, np.full(7, 0.05), 0.0)
    assert flat.worst_error < 0.05
