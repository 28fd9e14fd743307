"""Drafters that only tests need: some know the answer, one knows nothing."""

import functools

import jax
import jax.numpy as jnp

from jspec.growth import grow
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


@functools.cache
def by_level(depth, width, sure, vocab):
    """A level-by-level drafter: knows the answer, and is so sure of it; counts its passes.

    ``params["sure"]`` [B], where it is there, says how sure it is in each row.
    """

    def propose(params, state, roots, keep_growing=None):
        text = params["text"]
        chance = jnp.broadcast_to(params.get("sure", sure), roots.shape)[:, None]

        def expand(passes, frontier):
            at = state.rows[:, None] + 1 + frontier.depths
            right = text[jnp.minimum(at, text.shape[0] - 1)]
            tokens = jnp.stack([right, (right + 1) % vocab], axis=-1)
            best = jnp.broadcast_to(jnp.log(chance), right.shape)
            logps = jnp.stack([best, jnp.full_like(best, jnp.log(0.01))], axis=-1)
            return (tokens, logps), passes + 1

        tree, passes = grow(expand, jnp.int32(0), roots, depth, width, width, keep_growing)
        return Proposal(tree, passes=passes), state

    return Method("by_level", 1 + depth * width, propose, Needs(depth=depth), _start, _count)


@functools.cache
def wild(depth, width, vocab):
    """A level-by-level drafter that knows nothing, and is now sure of it and now not."""

    def propose(params, state, roots, keep_growing=None):
        def expand(passes, frontier):
            def one(length, tokens, level):
                key = jax.random.fold_in(jax.random.key(length), level)
                logits = 3 * jax.random.normal(key, (vocab, vocab))
                return jax.lax.top_k(jax.nn.log_softmax(logits)[tokens], width)

            level = frontier.depths.max()
            logps, tokens = jax.vmap(one, (0, 0, None))(state.rows, frontier.tokens, level)
            return (tokens, logps), passes + 1

        tree, passes = grow(expand, jnp.int32(0), roots, depth, width, width, keep_growing)
        return Proposal(tree, passes=passes), state

    return Method("wild", 1 + depth * width, propose, Needs(depth=depth), _start, _count)


@functools.cache
def given(budget, depth):
    """Proposes ``params["draft"]``."""

    def propose(params, state, roots, keep_growing=None):
        return Proposal(params["draft"]), state

    return Method("given", budget, propose, Needs(depth=depth), _start, _count)
