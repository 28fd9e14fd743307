"""When to leave off drafting for a while, and when to try again.

The ledger counts in autoregressive rounds of the batch: a round that yields t tokens a row and takes as long as c plain
rounds gains t - c. What it yields is taken half from what was emitted and half from what the calibrated model expected
of the trees, which is right in the mean and varies less. When the losses since the last gains reach a limit, drafting
rests; it is tried again after 2 rounds, then after 4, 8 and at most 18.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

FIRST, LONGEST = 2, 18  # rounds of rest: within 20 it is tried again
LOSS = 1.0  # plain rounds that may be lost before a rest
SAVED = 2.0  # gains that are remembered
MISSED = 0.5  # right nodes a row: a try that left more of them unverified goes on once
PACE = 0.125  # weight of the last round in ``pace``


class Ledger(NamedTuple):
    """What decides whether to draft: of the whole batch, since one pass drafts for all rows."""

    rest: Int[Array, ""]  # rounds left without a draft; 0: awake
    interval: Int[Array, ""]  # of the next rest
    credit: Float[Array, ""]
    trial: Bool[Array, ""]  # the next draft is a try
    price: Float[Array, ""]  # of the round under way, in plain rounds
    promise: Float[Array, ""]  # tokens a row that the model expects of the round under way
    pace: Float[Array, ""]  # of the last drafted rounds: times as fast as plain decoding
    spent: Float[Array, ""]  # what all rounds cost by the model, in plain rounds: for reports


def open_ledger() -> Ledger:
    """Awake, with nothing gained or lost; the first draft is a try."""
    return Ledger(
        rest=jnp.int32(0),
        interval=jnp.int32(FIRST),
        credit=jnp.float32(0),
        trial=jnp.array(True),
        price=jnp.float32(1),
        promise=jnp.float32(1),
        pace=jnp.float32(1),
        spent=jnp.float32(0),
    )


def close_round(
    ledger: Ledger,
    counts: Int[Array, " B"],
    active: Bool[Array, " B"],
    missed: Float[Array, ""] | float = 0.0,
) -> Ledger:
    """Books a round.

    A try that nothing speaks for must gain, or the rest goes on at once. It may lose a little once if the model gave it
    a chance, or what it drafted was right and only not verified.

    Args:
      ledger: with the price and the promise of the round.
      counts: tokens that each row emitted.
      active: rows that took part; without any, nothing happened.
      missed: nodes a row that were drafted, not verified, and turned out to be right.
    """
    awake, happened = ledger.rest == 0, active.any()
    before = ledger
    ledger = ledger._replace(spent=ledger.spent + ledger.price)
    mean = jnp.where(active, counts, 0).sum() / jnp.maximum(active.sum(), 1)
    gain = (mean + ledger.promise) / 2 - ledger.price
    lenient = ((ledger.promise > ledger.price) | (missed > MISSED)) & ledger.trial
    credit = jnp.where(lenient, jnp.maximum(ledger.credit, -0.8 * LOSS), ledger.credit)
    credit = jnp.minimum(credit + gain, SAVED)
    tired = credit < -LOSS
    drafted = ledger._replace(
        rest=jnp.where(tired, ledger.interval, 0),
        interval=jnp.where(
            tired,
            jnp.minimum(2 * ledger.interval, LONGEST),
            jnp.where(credit >= 0, FIRST, ledger.interval),
        ),
        credit=jnp.maximum(credit, -LOSS),
        trial=tired | (ledger.trial & (gain > 0)),
        pace=ledger.pace + PACE * (mean / jnp.maximum(ledger.price, 1e-6) - ledger.pace),
    )
    rested = ledger._replace(rest=jnp.maximum(ledger.rest - 1, 0))
    return Ledger(
        *(
            jnp.where(happened, jnp.where(awake, new, old), was).astype(was.dtype)
            for new, old, was in zip(drafted, rested, before)
        )
    )
