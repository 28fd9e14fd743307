"""Known tokens that a method was not shown yet, while it is not asked to draft."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

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


def flush(
    method: Method, params: Params, state: MethodState, queue: Queue
) -> tuple[MethodState, Queue]:
    """Shows the method what is in the queue."""
    state = method.absorb(params, state, queue.tokens, queue.taps, queue.length)
    return state, queue._replace(length=jnp.zeros_like(queue.length))


def flush_if(
    when: Array, method: Method, params: Params, state: MethodState, queue: Queue
) -> tuple[MethodState, Queue]:
    """``flush`` where there is need, as far as the device goes: the pass is skipped elsewhere."""
    needed = when & (queue.length > 0).any()
    return lax.cond(needed, lambda: flush(method, params, state, queue), lambda: (state, queue))


def defer(
    later: Array,
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
    counts = shown[2]

    def wait():
        longer = push(queue, *shown)
        full = (longer.length == queue.tokens.shape[1]).any()
        return flush_if(full, method, params, state, longer)

    def now():
        ready, rest = flush_if(jnp.array(True), method, params, state, queue)
        return method.absorb(params, ready, *shown), rest

    return lax.cond(later & (counts.max() <= 1), wait, now)
