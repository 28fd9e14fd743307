"""Prompt lookup: what followed the text's last tokens when they stood in the text before.

The idea is Saxena's prompt lookup decoding (2023) and LLMA's copying (Yang et al. 2023, arXiv 2304.04487); here several
matches are drafted at once, as a trie.
"""

import functools
import math
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jspec.method import MAX_BUDGET, Method, MethodState, Needs, Proposal, check_range
from jspec.tree import RETRIEVED, from_paths, root_only

# The prior was read off replays of SmolLM2-135M-Instruct on the four benches: after n agreeing tokens the next one
# agrees as well in about 0.2, 0.5, 0.6, 0.7, 0.8 of all cases for n = 1 to 5, and 0.9 for n = 8, however many of the n
# were known before the draft.
_DOUBT = 1.5
_RANK = 0.7  # a match, relative to the match before it


class Text(NamedTuple):
    """The known tokens of each row but the last, X = capacity + 1; entries from ``length`` on are never read."""

    tokens: Int[Array, "B X"]
    length: Int[Array, " B"]


def prompt_lookup(budget: int, depth: int = 16, ngram: int = 8, matches: int = 8) -> Method:
    """Drafts the continuations of the best earlier matches of the text's last tokens.

    A match is an earlier place where the last n = ``ngram``, ..., 1 tokens are the text's own last n, the root being
    the last. Matches of more tokens come first, then the most recent. A continuation that reaches the end of the text
    goes on from the match again, as if the text had that period. Without a match the tree is its root alone.

    Args:
      budget: most nodes, root included.
      depth: tokens of a continuation, cut to ``budget - 1``.
      ngram: the longest match looked for.
      matches: continuations looked at; those that begin alike share nodes.

    Raises:
      ValueError: an argument out of range.
    """
    check_range("budget", budget, 1, MAX_BUDGET)
    check_range("depth", depth, 1)
    check_range("ngram", ngram, 1, 512)
    check_range("matches", matches, 1, 64)
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
        text = text.at[jnp.arange(text.shape[0])[:, None], at].set(tokens, mode="drop")
        return MethodState(rows=Text(text, length + counts))

    def propose(params, state, roots, keep_growing=None):
        if depth == 0:
            return Proposal(root_only(roots, budget)), state
        tokens, length = state.rows
        text = jnp.where(jnp.arange(tokens.shape[1]) == length[:, None], roots[:, None], tokens)
        places, agreed = search(text, length, ngram, matches)
        period = jnp.maximum(length[:, None] - places, 1)[..., None]
        at = places[..., None] + 1 + jnp.arange(depth) % period
        paths = jnp.take_along_axis(text, at.reshape(at.shape[0], -1), axis=1, mode="clip")
        lengths = jnp.where(agreed > 0, depth, 0)
        scores = prior(agreed, depth)
        tree = from_paths(roots, paths.reshape(at.shape), lengths, scores, RETRIEVED, budget)
        return Proposal(tree), state

    needs = Needs(depth=depth)
    detail = f"ngram {ngram}, matches {matches}"
    return Method("prompt_lookup", budget, propose, needs, init, absorb, detail=detail)


def search(
    text: Int[Array, "B X"], last: Int[Array, " B"], ngram: int, matches: int
) -> tuple[Int[Array, "B R"], Int[Array, "B R"]]:
    """The best places before ``last`` where the text's last tokens stand as well; R = min(matches, X).

    Args:
      text: tokens, read up to and including ``last``.
      last: index of the text's last token.
      ngram: how many tokens are compared.
      matches: how many places are wanted.

    Returns:
      The places of the matches' last tokens, and how many tokens agree there: the most first, then the latest place;
      0 is no match.
    """
    width = text.shape[1]
    at = jnp.arange(width)
    run = at < last[:, None]
    agreed = jnp.zeros_like(text)
    for back in range(min(ngram, width)):
        ours = jnp.take_along_axis(text, jnp.maximum(last - back, 0)[:, None], axis=1)
        theirs = jnp.pad(text, [(0, 0), (back, 0)], constant_values=-1)[:, :width]
        run &= theirs == ours
        agreed += run
    key = (agreed * width + at).astype(jnp.float32)  # XLA:CPU is fast at top_k of floats only
    _, places = lax.top_k(key, min(matches, width))
    return places, jnp.take_along_axis(agreed, places, axis=1)


def prior(agreed: Int[Array, "B R"], depth: int) -> Float[Array, "B R D"]:
    """Log-scores of the first D = ``depth`` tokens of continuations, given how many tokens agree before them."""
    n = jnp.maximum(agreed, 1)[..., None] + jnp.arange(depth)
    rank = jnp.arange(agreed.shape[1])[:, None]
    return rank * math.log(_RANK) + jnp.cumsum(jnp.log(n / (n + _DOUBT)), axis=-1)
