"""The two extremes: a drafter that is always right, and one that is right by chance alone."""

import functools

import jax
import jax.numpy as jnp

from jspec.method import Method, MethodState, Needs, Proposal
from jspec.tree import from_paths

SURE = 0.9  # what both say of every token


def _start(params, batch, capacity, memory):
    return MethodState(rows=jnp.zeros((batch,), jnp.int32))


def _count(params, state, tokens, taps, counts):
    return MethodState(rows=state.rows + counts, shared=state.shared)


def _scores(batch, depth):
    return jnp.broadcast_to(jnp.log(SURE) * (1 + jnp.arange(depth)), (batch, 1, depth))


@functools.cache
def perfect(budget: int, depth: int) -> Method:
    """Drafts the text ``params["text"]`` [X], which is the target's own, as a chain."""

    def propose(params, state, roots, keep_growing=None):
        at = state.rows[:, None] + 1 + jnp.arange(depth)
        path = params["text"][jnp.minimum(at, params["text"].shape[0] - 1)]
        lengths = jnp.full((roots.shape[0], 1), depth, jnp.int32)
        scores = _scores(roots.shape[0], depth)
        tree = from_paths(roots, path[:, None], lengths, scores, 0, budget)
        return Proposal(tree, passes=1), state

    return Method("perfect", budget, propose, Needs(depth=depth), _start, _count)


@functools.cache
def random_drafter(budget: int, depth: int, vocab: int) -> Method:
    """Drafts a chain of random tokens."""

    def propose(params, state, roots, keep_growing=None):
        def one(length):
            return jax.random.randint(jax.random.key(length), (1, depth), 0, vocab)

        lengths = jnp.full((roots.shape[0], 1), depth, jnp.int32)
        scores = _scores(roots.shape[0], depth)
        tree = from_paths(roots, jax.vmap(one)(state.rows), lengths, scores, 0, budget)
        return Proposal(tree, passes=1), state

    return Method("random", budget, propose, Needs(depth=depth), _start, _count)
