"""Drafters that only tests need: one that knows the answer, one that knows nothing."""

import functools

import jax
import jax.numpy as jnp

from jspec.method import Method, MethodState, Needs, Proposal
from jspec.tree import from_paths


def _count(params, state, tokens, taps, counts):
    return MethodState(rows=state.rows + counts, shared=state.shared)


def _start(params, batch, capacity, memory):
    return MethodState(rows=jnp.zeros((batch,), jnp.int32))


@functools.cache
def echo(budget, depth):
    """Proposes, as a chain, the text ``params["text"]`` [X] from where the row stands."""

    def propose(params, state, roots, keep_growing=None):
        at = state.rows[:, None] + 1 + jnp.arange(depth)
        path = params["text"][jnp.minimum(at, params["text"].shape[0] - 1)]
        lengths = jnp.full((roots.shape[0], 1), depth, jnp.int32)
        scores = -jnp.ones((roots.shape[0], 1, depth)) * (1 + jnp.arange(depth))
        return Proposal(from_paths(roots, path[:, None], lengths, scores, 0, budget)), state

    return Method("echo", budget, propose, Needs(depth=depth), _start, _count)


@functools.cache
def noise(budget, depth, vocab, taps=(), top_k=0):
    """Proposes random paths of random lengths."""

    def propose(params, state, roots, keep_growing=None):
        batch, paths = roots.shape[0], max(1, -(-(budget - 1) // depth))

        def one(length):
            key = jax.random.key(length)
            tokens = jax.random.randint(key, (paths, depth), 0, vocab)
            return tokens, jax.random.randint(key, (paths,), 0, depth + 1)

        tokens, lengths = jax.vmap(one)(state.rows)
        scores = jnp.broadcast_to(-1.0 - jnp.arange(depth), (batch, paths, depth))
        return Proposal(from_paths(roots, tokens, lengths, scores, 0, budget)), state

    needs = Needs(depth=depth, taps=taps, top_k=top_k)
    return Method("noise", budget, propose, needs, _start, _count)
