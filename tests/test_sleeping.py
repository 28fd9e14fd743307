"""The ledger: when drafting rests, and when it is tried again."""

import jax
import jax.numpy as jnp
import pytest

from jspec.sleeping import FIRST, LONGEST, SAVED, close_round, open_ledger

book = jax.jit(close_round)
ONE = jnp.asarray([True])


def play(ledger, rounds, count, price, promise=None):
    """Rounds that emit ``count`` tokens at a price when drafting; what was drafted, round by round."""
    drafted, promise = [], count if promise is None else promise
    for _ in range(rounds):
        awake = int(ledger.rest) == 0
        drafted.append(awake)
        if awake:
            ledger = ledger._replace(price=jnp.float32(price), promise=jnp.float32(promise))
        counts = jnp.asarray([count if awake else 1])
        ledger = book(ledger, counts, ONE)
    return ledger, drafted


def rests(drafted):
    """Lengths of the runs without a draft."""
    return [len(run) for run in "".join(".x"[d] for d in drafted).split("x") if run]


def test_a_drafter_that_loses_rests_longer_and_longer():
    _, drafted = play(open_ledger(), 120, 1, 1.6)
    assert drafted[:3] == [True, True, False]  # it may lose one plain round
    assert rests(drafted)[:6] == [2, 4, 8, 16, 18, 18]
    assert max(rests(drafted)) == LONGEST
    assert sum(drafted[60:]) <= 4  # single tries


def test_a_drafter_that_gains_never_rests():
    ledger, drafted = play(open_ledger(), 60, 3, 1.6)
    assert all(drafted) and float(ledger.credit) == SAVED
    assert float(ledger.pace) == pytest.approx(3 / 1.6, rel=0.02)


@pytest.mark.parametrize("spell", range(1, 40, 3))
def test_it_is_tried_within_twenty_rounds_and_stays(spell):
    ledger, _ = play(open_ledger(), spell, 1, 2.0)
    ledger, drafted = play(ledger, 60, 2, 1.3)
    assert True in drafted[:20]
    first = drafted.index(True)
    assert all(drafted[first:])
    assert int(ledger.interval) == FIRST


def test_what_the_model_promises_may_lose_a_little():
    asleep, _ = play(open_ledger(), 3, 1, 2.5)
    waiting, _ = play(asleep, int(asleep.rest), 1, 1.0)
    assert int(waiting.rest) == 0 and bool(waiting.trial)
    assert int(play(waiting, 1, 1, 1.3)[0].rest) > 0
    assert int(play(waiting, 1, 1, 1.3, promise=1.4)[0].rest) == 0


def test_a_try_that_was_right_and_not_verified_goes_on_once():
    asleep, _ = play(open_ledger(), 3, 1, 2.5)
    waiting, _ = play(asleep, int(asleep.rest), 1, 1.0)
    ledger = waiting._replace(price=jnp.float32(1.2), promise=jnp.float32(1.0))
    for missed, rests_again in ((0.4, True), (1.0, False)):
        after = book(ledger, jnp.asarray([1]), ONE, jnp.float32(missed))
        assert (int(after.rest) > 0) == rests_again
    again = book(after, jnp.asarray([1]), ONE, jnp.float32(1.0))
    assert int(again.rest) > 0  # right, but it does not pay


def test_promises_that_are_not_kept_end_in_a_rest():
    _, drafted = play(open_ledger(), 200, 1, 1.3, promise=1.4)
    assert sum(drafted[100:]) <= 15


def test_a_try_goes_on_while_it_gains():
    ledger = open_ledger()
    assert bool(ledger.trial)
    assert bool(play(ledger, 3, 2, 1.5)[0].trial)
    assert not bool(play(ledger, 1, 1, 1.1)[0].trial)


def test_rows_without_a_root_do_not_count():
    ledger = open_ledger()._replace(price=jnp.float32(1.5), promise=jnp.float32(2))
    nobody = book(ledger, jnp.asarray([0, 0]), jnp.asarray([False, False]))
    assert jax.tree.map(float, nobody) == jax.tree.map(float, ledger)
    one = book(ledger, jnp.asarray([2, 99]), jnp.asarray([True, False]))
    assert float(one.credit) == pytest.approx(0.5)
