"""SMART's closed form (arXiv 2604.09731) fitted to a measured table, and how far both are from it.

draft(n) = lambda n        verify(n) = gamma (exp(delta n ** rho) - 1)        n rows
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from jspec.cost.table import Numbers

_RHO = (0.02, 2.0)
_BEND = (1e-4, 20.0)  # delta * last ** rho: what stands in the exponent at the last row count
_GRID, _TURNS = 31, 10


class Fit(NamedTuple):
    """The four numbers, and the largest and the median relative error of ``verify`` at the measured rows."""

    weight: float  # lambda, seconds a node
    gamma: float  # seconds
    delta: float
    rho: float
    median_error: float
    worst_error: float

    def verify(self, rows: Numbers) -> Float[np.ndarray, " n"]:
        """Seconds of a verify forward by the closed form."""
        return self.gamma * np.expm1(self.delta * np.asarray(rows, float) ** self.rho)


def fit_cost(rows: Numbers, verify: Numbers, draft: float | int) -> Fit:
    """Least squares, on seconds.

    For every rho there is a best delta, found on a grid that gets finer around its best point, and for both a best
    gamma, by division; the best rho is found as delta is.

    Args:
      rows: measured row counts.
      verify: seconds of a verify forward at these.
      draft: seconds of a whole draft, however many nodes of it are verified.
    """
    rows, verify = np.asarray(rows, float), np.asarray(verify, float)

    def best_bend(rho):  # [R] -> errors, bends, gammas
        power = (rows / rows[-1]) ** rho[:, None, None]

        def look(bend):
            shape = np.expm1(np.exp(bend)[..., None] * power)
            gamma = (shape * verify).sum(-1) / (shape * shape).sum(-1)
            return ((gamma[..., None] * shape - verify) ** 2).sum(-1), bend, gamma

        return _descend(look, np.full(rho.shape, np.log(_BEND[0])), np.log(_BEND[1]))

    def outer(rho):
        error, bend, gamma = best_bend(np.exp(rho).reshape(-1))
        return tuple(x.reshape(rho.shape) for x in (error, rho, bend, gamma))

    found = _descend(outer, np.log([_RHO[0]]), np.log(_RHO[1]))
    rho, bend, gamma = np.exp(found[1][0]), np.exp(found[2][0]), found[3][0]
    delta = bend / rows[-1] ** rho
    weight = draft * rows.sum() / (rows * rows).sum()
    fit = Fit(float(weight), float(gamma), float(delta), float(rho), 0.0, 0.0)
    errors = np.abs(fit.verify(rows) / verify - 1)
    return fit._replace(median_error=float(np.median(errors)), worst_error=float(errors.max()))


def _descend(look, low, high):
    """The least error over a number for each of R problems, on grids that get finer.

    Args:
      look: from numbers [R, G] to errors and what comes with them, each [R, G].
      low: [R], where the search begins.
      high: where it ends.
    """
    low, high = low, np.full(low.shape, high)
    problem = np.arange(low.size)
    for _ in range(_TURNS):
        points = np.linspace(low, high, _GRID, axis=-1)
        found = look(points)
        at = np.argmin(found[0], axis=-1)
        low = points[problem, np.maximum(at - 1, 0)]
        high = points[problem, np.minimum(at + 1, _GRID - 1)]
    return tuple(x[problem, at] for x in found)
