"""Thresholds against a search in plain Python, and the tokens that are read off a text."""

import itertools

import numpy as np
import pytest

from jspec.thresholds.measure import Rounds, _emitted
from jspec.thresholds.search import GRID, best_thresholds, chosen, forced


def stage(sure, values):
    return next((i for i, (a, b) in enumerate(zip(sure, values)) if a < b), len(values))


def test_drafts_stop_at_the_first_checkpoint_below_its_threshold():
    rng = np.random.default_rng(0)
    sure = rng.random((200, 3)).astype(np.float32)
    for values in ((0.0, 0.0, 0.0), (0.5, 0.2, 0.9), (1.0, 1.0, 1.0)):
        assert chosen(sure, values).tolist() == [stage(row, values) for row in sure.tolist()]


def test_the_best_thresholds_of_the_grid():
    rng = np.random.default_rng(1)
    sure = rng.random((40, 2)).astype(np.float32)
    tokens = rng.integers(1, 6, (40, 3))
    seconds = np.array([1.0, 1.1, 1.5])
    values, mean = best_thresholds(Rounds(sure, tokens, np.zeros(3)), seconds)

    def speed(values):
        at = [stage(row, values) for row in sure.tolist()]
        return sum(tokens[i, s] for i, s in enumerate(at)) / sum(seconds[s] for s in at)

    speeds = {v: speed(v) for v in itertools.product(GRID, repeat=2)}
    assert speed(values) == pytest.approx(max(speeds.values()))
    assert values == min(v for v, x in speeds.items() if x > max(speeds.values()) - 1e-9)
    assert mean == np.mean([tokens[i, stage(row, values)] for i, row in enumerate(sure.tolist())])


def test_where_pruning_brings_nothing_nothing_is_pruned():
    sure = np.random.default_rng(2).random((30, 3)).astype(np.float32)
    same = Rounds(sure, np.full((30, 4), 2), np.zeros(4))
    assert best_thresholds(same, np.ones(4)) == ((0.0, 0.0, 0.0), 2.0)
    dear = np.array([1.0, 2.0, 3.0, 4.0])  # the later, the slower, for no more tokens
    values, _ = best_thresholds(same, dear)
    assert (chosen(sure, values) == 0).all()


def test_thresholds_that_force_a_stop():
    stops = forced(2, 3)
    sure = np.array([[0.0, 0.0], [1.0, 1.0], [0.5, 0.2]], np.float32)
    for at, limits in enumerate(stops):
        assert (chosen(sure, tuple(limits[:2])) == at).all()
    assert stops.shape == (3, 3)


@pytest.mark.parametrize(
    ("text", "emitted"),
    [([9, 9, 9], 1), ([5, 9, 9], 2), ([5, 6, 9], 3), ([5, 6, 7], 3), ([8, 6, 7], 2), ([5], 1)],
)
def test_tokens_that_a_tree_would_have_emitted(text, emitted):
    tokens, parents = [1, 5, 8, 6, 7], [-1, 0, 0, 1, 1]  # the last one is padding
    assert _emitted(np.array(tokens), np.array(parents), 4, text) == emitted
