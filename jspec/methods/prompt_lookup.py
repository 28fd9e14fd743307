"""Prompt lookup: what followed the text's last tokens when they stood in the text before.

The idea is Saxena's prompt lookup decoding (2023) and the input-grounded copying of LLMA (Yang et al. 2023,
arXiv 2304.04487); here several matches are drafted at once, as a trie.
"""

import functools
import math
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from jspec.method import Method, MethodState, Needs, Proposal
from jspec.tree import RETRIEVED, from_paths, root_only

# The fixed prior, in probabilities.
_FIRST = 0.6  # that a match of one token is followed by the right one; the misses halve a token
_NEXT = 0.85  # that a continuation that was right so far is right once more
_RANK = 0.6  # of a match, relative to the match before it


class Text(NamedTuple):
    """The known tokens of each row but the last, X = capacity + 1; entries from ``length`` on are never read."""

    tokens: Int[Array, "B X"]
    length: Int[Array, " B"]


def prompt_lookup(
    budget: int, depth: int = 8, ngram: int = 3, matches: int | None = None
) -> Method:
    """Drafts the continuations of the best earlier matches of the text's last tokens.

    A match is an earlier place whose last n tokens are the text's last n, with the root the last of all, for
    n = ``ngram``, ..., 1. Matches of more tokens come first, then the most recent. A continuation that reaches the end
    of the text goes on from the match again, as a text with that period would. No match: the root alone.

    Args:
      budget: most nodes, root included.
      depth: tokens of a continuation.
      ngram: the longest match looked for.
      matches: continuations drafted; default: enough to fill the budget.

    Raises:
      ValueError: an argument out of range.
    """
    matches = max(1, math.ceil((budget - 1) / depth)) if matches is None else matches
    arguments = {"budget": budget, "depth": depth, "ngram": ngram, "matches": matches}
    for name, value in arguments.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    return _prompt_lookup(budget, min(depth, budget - 1), ngram, matches)


@functools.cache
def _prompt_lookup(budget, depth, ngram, matches):
    def init(params, batch, capacity, memory):
        tokens = jnp.zeros((batch, capacity + 1), jnp.int32)
        return MethodState(rows=Text(tokens, jnp.zeros((batch,), jnp.int32)))

    def absorb(params, state, tokens, taps, counts):
        text, length = state.rows
        column = jnp.arange(tokens.shape[1])
        at = jnp.where(column < counts[:, None], length[:, None] + column, text.shape[1])
        row = jnp.arange(text.shape[0])[:, None]
        text = text.at[row, at].set(tokens, mode="drop")
        return MethodState(rows=Text(text, length + counts))

    def propose(params, state, roots, keep_growing=None):
        if depth == 0:
            return Proposal(root_only(roots, budget)), state
        places, agreed, text = _search(state.rows, roots, ngram, matches)
        period = jnp.maximum(state.rows.length[:, None] - places, 1)
        step = jnp.arange(depth)
        at = places[:, :, None] + 1 + step % period[:, :, None]
        paths = jnp.take_along_axis(text, at.reshape(at.shape[0], -1), axis=1, mode="clip")
        first = jnp.log1p(-((1 - _FIRST) * 0.5 ** (agreed - 1)))
        rank = jnp.arange(places.shape[1]) * math.log(_RANK)
        scores = (first + rank)[:, :, None] + step * math.log(_NEXT)
        lengths = jnp.where(agreed > 0, depth, 0)
        tree = from_paths(roots, paths.reshape(at.shape), lengths, scores, RETRIEVED, budget)
        return Proposal(tree), state

    def observe(params, state, verdict):
        return state

    def memory(state):
        return None

    name = "prompt_lookup"
    return Method(name, budget, Needs(depth=depth), init, absorb, propose, observe, memory)


def _search(known, roots, ngram, matches):
    """The best matches: their last tokens' places [B, R], how many tokens agree (0: no match), and the text."""
    tokens, length = known
    width = tokens.shape[1]
    at = jnp.arange(width)
    text = jnp.where(at == length[:, None], roots[:, None], tokens)
    run = at < length[:, None]
    agreed = jnp.zeros_like(text)
    for back in range(ngram):
        last = jnp.take_along_axis(text, jnp.maximum(length - back, 0)[:, None], axis=1)
        earlier = jnp.pad(text, [(0, 0), (back, 0)], constant_values=-1)[:, :width]
        run &= earlier == last
        agreed += run
    key = (agreed * width + at).astype(jnp.float32)  # XLA:CPU has a fast top_k for floats only
    _, places = lax.top_k(key, min(matches, width))
    return places, jnp.take_along_axis(agreed, places, axis=1), text
