"""The best thresholds for rounds that were measured: those that yield the most tokens a second."""

import itertools

import numpy as np
from jaxtyping import Float, Int

from jspec.thresholds.measure import Rounds

GRID = tuple(i / 20 for i in range(21))


def forced(checkpoints: int, count: int) -> Float[np.ndarray, "S K"]:
    """Thresholds that stop every draft at the first checkpoint, the second, ..., and at none.

    Args:
      checkpoints: that are looked at.
      count: K, of thresholds a method has; those beyond are never looked at.
    """
    stops = np.full((checkpoints + 1, count), -1.0)  # a probability is never below
    for at in range(checkpoints):
        stops[at, at] = 2.0  # and always below
    return stops


def best_thresholds(
    rounds: Rounds, seconds: Float[np.ndarray, " S"]
) -> tuple[tuple[float, ...], float]:
    """The thresholds of ``GRID``, one a checkpoint, with the most tokens a second; of equal ones the lowest.

    Args:
      rounds: measured with ``forced``: choice s stops at checkpoint s, the last one at none.
      seconds: of a round with each choice.

    Returns:
      The thresholds, and the tokens a round expected.
    """
    best, found = -1.0, ((), 0.0)
    for values in itertools.product(GRID, repeat=rounds.sure.shape[1]):
        choice = chosen(rounds.sure, values)
        tokens = rounds.tokens[np.arange(len(choice)), choice]
        speed = tokens.sum() / seconds[choice].sum()
        if speed > best * (1 + 1e-9):
            best, found = speed, (values, float(tokens.mean()))
    return found


def chosen(sure: Float[np.ndarray, "R C"], values: tuple[float, ...]) -> Int[np.ndarray, " R"]:
    """Where drafts stop: the first checkpoint below its threshold, C if there is none."""
    below = sure < np.asarray(values, sure.dtype).reshape(1, -1)
    return np.where(
        below.any(axis=1), np.argmax(np.pad(below, [(0, 0), (0, 1)]), axis=1), sure.shape[1]
    )
