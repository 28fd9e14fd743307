"""The cost model as arrays: seconds by rows and by draft passes, and the closed form beside them.

It goes into ``params["cost"]``, so that another machine's table, or a new one, recompiles nothing.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

Numbers = Sequence[float | int] | np.ndarray


class Cost(NamedTuple):
    """Seconds of the parts of a round. K row counts, L draft passes."""

    rows: Float[Array, " K"]  # the buckets of a verify forward, ascending
    verify: Float[Array, " K"]  # seconds at so many rows, never decreasing
    draft: Float[Array, " L"]  # seconds of a draft that took 1, 2, ... passes, never decreasing
    fixed: Float[Array, ""]  # seconds of a round that are neither
    fit: Float[Array, " 4"]  # lambda, gamma, delta, rho of the closed form


def make_cost(
    rows: Numbers,
    verify: Numbers,
    draft: Numbers = (0.0,),
    fixed: float | int = 0.0,
    fit: Numbers = (0.0, 0.0, 0.0, 1.0),
) -> Cost:
    """A ``Cost`` from numbers, made monotone: where a larger count was measured faster, the slower time counts.

    Raises:
      ValueError: rows that do not ascend from 1 or above, as many times as rows, or a number that is no time.
    """
    rows, verify, draft, fit = (np.asarray(x, np.float64) for x in (rows, verify, draft, fit))
    if rows.ndim != 1 or rows.size == 0 or rows[0] < 1 or (np.diff(rows) <= 0).any():
        raise ValueError(f"rows must ascend from 1 or above, got {rows.tolist()}")
    if verify.shape != rows.shape:
        raise ValueError(f"verify must have a time for each of {rows.size} rows, got {verify.size}")
    if draft.ndim != 1 or draft.size == 0:
        raise ValueError("draft must have a time for one pass or more, got none")
    times = {"verify": verify, "draft": draft, "fixed": np.asarray(fixed)}
    for name, x in times.items():
        if not (np.isfinite(x).all() and (x >= 0).all()):
            raise ValueError(f"{name} must be seconds, 0 or above, got {x.tolist()}")
    if verify[0] == 0:
        raise ValueError("verify must be above 0 seconds")
    if fit.shape != (4,) or not np.isfinite(fit).all():
        raise ValueError(f"fit must be 4 finite numbers, got {fit.tolist()}")
    rising = (np.maximum.accumulate(x) for x in (verify, draft))
    return Cost(*(jnp.asarray(x, jnp.float32) for x in (rows, *rising, fixed, fit)))


def bucket_of(cost: Cost, rows: Int[Array, "*n"]) -> Int[Array, "*n"]:
    """The index of the smallest bucket that holds so many rows; of the last one where none does."""
    return jnp.minimum(jnp.searchsorted(cost.rows, rows), cost.rows.size - 1)


def verify_seconds(cost: Cost, rows: Int[Array, "*n"] | Float[Array, "*n"]) -> Float[Array, "*n"]:
    """Seconds of a verify forward of so many rows: between those of the rows around, and no more beyond the last."""
    return jnp.interp(rows, cost.rows, cost.verify)


def draft_seconds(cost: Cost, passes: Int[Array, ""] | int) -> Float[Array, ""]:
    """Seconds of a draft that takes so many passes; a drafter without any takes one."""
    return cost.draft[jnp.clip(passes, 1, cost.draft.shape[0]) - 1]


def level_seconds(cost: Cost, level: Int[Array, ""] | int) -> Float[Array, ""]:
    """Seconds that drafting one more level takes; level 0 expands the root."""
    before = jnp.where(level > 0, draft_seconds(cost, level), 0.0)
    return draft_seconds(cost, level + 1) - before


def fitted_seconds(cost: Cost, rows: Float[Array, ""] | Int[Array, ""]) -> Float[Array, ""]:
    """SMART's closed form (arXiv 2604.09731): ``lambda n + gamma (exp(delta n ** rho) - 1)``."""
    weight, gamma, delta, rho = cost.fit
    return weight * rows + gamma * jnp.expm1(delta * rows**rho)


def fitted_slope(cost: Cost, rows: Float[Array, ""] | Int[Array, ""]) -> Float[Array, ""]:
    """What one more row costs by the closed form: its derivative."""
    weight, gamma, delta, rho = cost.fit
    return weight + gamma * delta * rho * rows ** (rho - 1) * jnp.exp(delta * rows**rho)
