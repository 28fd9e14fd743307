"""SMART's closed form (arXiv 2604.09731) fitted to a measured table, and how far both are from it.

draft(n) = lambda n        verify(n) = gamma (exp(delta n ** rho) - 1)        n rows
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from jspec.cost.table import Numbers

_RHO = (0.02, 2.0)
_DELTA = (1e-4, 20.0)  # of delta * last ** rho: what stands in the exponent at the last row count
_GRID, _TURNS = (
    41,
    16,
)  # the optimum lies in a narrow valley: each turn looks at a third of the last


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

    Gamma is linear, so that a grid over the other two, made finer around its best point, finds the optimum.

    Args:
      rows: measured row counts.
      verify: seconds of a verify forward at these.
      draft: seconds of a whole draft, however many nodes of it are verified.
    """
    rows, verify = np.asarray(rows, float), np.asarray(verify, float)
    last = rows[-1]

    def best_gamma(delta, rho):
        shape = np.expm1(delta[..., None] * rows ** rho[..., None])
        return (shape * verify).sum(-1) / np.maximum((shape * shape).sum(-1), 1e-300), shape

    low = np.log([_DELTA[0], _RHO[0]])
    high = np.log([_DELTA[1], _RHO[1]])
    limits = low.copy(), high.copy()
    for _ in range(_TURNS):
        inside, rho = np.exp(
            np.meshgrid(*(np.linspace(a, b, _GRID) for a, b in zip(low, high)), indexing="ij")
        )
        gamma, shape = best_gamma(inside / last**rho, rho)
        error = ((gamma[..., None] * shape - verify) ** 2).sum(-1)
        at = np.unravel_index(np.argmin(error), error.shape)
        centre = np.log([inside[at], rho[at]])
        step = (high - low) / 6
        low, high = np.maximum(centre - step, limits[0]), np.minimum(centre + step, limits[1])
    delta = inside[at] / last ** rho[at]
    weight = draft * rows.sum() / (rows * rows).sum()
    found = Fit(float(weight), float(gamma[at]), float(delta), float(rho[at]), 0.0, 0.0)
    errors = np.abs(found.verify(rows) / verify - 1)
    return found._replace(median_error=float(np.median(errors)), worst_error=float(errors.max()))
