"""Known tokens that a method was not shown yet, while it is not asked to draft."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jspec.method import Method, MethodState, Params


class Queue(NamedTuple):
    """The next known tokens of each row and their taps, in order; entries from ``length`` on are never read."""

    tokens: Int[Array, "B Q"]
    taps: Float[Array, "B Q T H"]
    length: Int[Array, " B"]


def empty_queue(batch: int, room: int, taps: int, hidden: int) -> Queue:
    """A queue of ``room`` tokens a row, with nothing in it."""
    return Queue(
        jnp.zeros((batch, room), jnp.int32),
        jnp.zeros((batch, room, taps, hidden), jnp.float32),
        jnp.zeros((batch,), jnp.int32),
    )


def push(
    queue: Queue, tokens: Int[Array, "B K"], taps: Float[Array, "B K T H"], counts: Int[Array, " B"]
) -> Queue:
    """Appends the first token of each row whose count is 1; the queue must have room."""
    row = jnp.arange(counts.shape[0])
    at = jnp.where(
        counts > 0, queue.length, queue.tokens.shape[1]
    )  # out of bounds: nothing is written
    return Queue(
        queue.tokens.at[row, at].set(tokens[:, 0], mode="drop"),
        queue.taps.at[row, at].set(taps[:, 0], mode="drop"),
        queue.length + (counts > 0),
    )


def run_if(when: Bool[Array, ""], step: Callable[[Any], Any], carry: Any) -> Any:
    """``step(carry)`` where there is need, as a loop of one turn or none: a cond would copy what it passes on."""

    def once(both):
        return jnp.array(False), step(both[1])

    return lax.while_loop(lambda both: both[0], once, (when, carry))[1]


def defer(
    later: Bool[Array, ""],
    method: Method,
    params: Params,
    state: MethodState,
    queue: Queue,
    shown: tuple[Int[Array, "B K"], Float[Array, "B K T H"], Int[Array, " B"]],
) -> tuple[MethodState, Queue]:
    """Shows the method known tokens now, after those that wait, or puts them into the queue.

    Args:
      later: bool[]; more than one token a row are shown now all the same. A queue that became full is read in.
      method: whose ``absorb`` it is.
      params: as ``absorb`` takes them.
      state: the method's.
      queue: what waits.
      shown: tokens, taps and counts, as ``absorb`` takes them.
    """
    tokens, taps, counts = shown
    waits = later & (counts.max() <= 1)
    queue = push(queue, tokens, taps, jnp.where(waits, counts, 0))
    full = (queue.length == queue.tokens.shape[1]).any()
    due = full | (~waits & (queue.length > 0).any())
    state = run_if(
        due, lambda s: method.absorb(params, s, queue.tokens, queue.taps, queue.length), state
    )
    state = run_if(~waits, lambda s: method.absorb(params, s, *shown), state)
    return state, queue._replace(length=jnp.where(due, 0, queue.length))
