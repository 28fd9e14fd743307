"""What each way to stop a draft would have yielded, round by round of real decoding."""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Float, Int
from tqdm import tqdm

from jspec.attention import default_attention
from jspec.decode import decode_round
from jspec.method import Method, Params
from jspec.methods.graft import confidence, inner_state
from jspec.prefill import admit
from jspec.state import DecodeState, Plan, capacity_for, new_state


class Rounds(NamedTuple):
    """R rounds: of each, what C checkpoints saw, and what S choices would have yielded."""

    sure: Float[np.ndarray, "R C"]  # probability of the best path at each checkpoint
    tokens: Int[np.ndarray, "R S"]  # emitted, bonus included
    passes: Float[np.ndarray, " S"]  # of the draft, in the mean


def measure_rounds(
    plan: Plan,
    params: Params,
    drafter: Method,
    checkpoints: Sequence[int],
    limits: Float[np.ndarray, "S K"],
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    batch: int = 1,
    seed: int = 0,
    stops: Int[np.ndarray, "states V"] | None = None,
) -> Rounds:
    """Decodes prompts, and drafts in every round with each of the thresholds beside its own.

    The text does not depend on what is drafted, so what a tree would have yielded is read off it afterwards; rounds so
    close to its end that a path could reach beyond it are left out.

    Args:
      plan: its method is one of ``graft``; its own thresholds decide where rounds land.
      params: as decoding takes them.
      drafter: the method inside.
      checkpoints: those at which its confidence is wanted.
      limits: thresholds to be tried.
      prompts: token ids.
      max_new_tokens: of each prompt.
      batch: slots.
      seed: of the draws.
      stops: where text ends; default: the target's EOS ids.

    Raises:
      ValueError: no round is left to count.
    """
    capacity = capacity_for(plan, max(map(len, prompts)) + max_new_tokens)
    watched, tried = tuple(checkpoints), jnp.asarray(limits, jnp.float32)
    sure, tokens, passes = [], [], []
    for first in tqdm(range(0, len(prompts), batch), desc="calibrating", leave=False, disable=None):
        group = prompts[first : first + batch]
        state = new_state(plan, params, batch, capacity, jax.random.key(seed), stops)
        for slot, prompt in enumerate(group):
            state = admit(plan, params, state, slot, prompt, first + slot, max_new_tokens)
        seen = []
        while not state.rows.done.all():
            state, found = _probe(plan, drafter, watched, params, state, tried)
            seen.append(jax.device_get(found))
        texts = np.asarray(state.rows.tokens)
        known = np.asarray(state.known)
        for one in seen:
            passes.append(one.passes)
            for row in np.flatnonzero(one.live):
                at = int(one.known[row])
                if at + plan.path <= known[row]:
                    text = texts[row, at : known[row]].tolist()
                    sure.append(one.sure[row])
                    tokens.append(
                        [_emitted(*x, text) for x in zip(*(y[:, row] for y in one.trees))]
                    )
    if not tokens:
        raise ValueError(
            f"answers are too short to calibrate with: they need more than {plan.path} tokens"
        )
    return Rounds(np.array(sure), np.array(tokens), np.mean(passes, axis=0))


class _Seen(NamedTuple):
    known: jax.Array  # [B], tokens before the round
    live: jax.Array  # [B]
    sure: jax.Array  # [B, C]
    trees: tuple[jax.Array, ...]  # tokens and parents [S, B, N], size [S, B]
    passes: jax.Array  # [S]


@partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=4)
def _probe(plan, drafter, checkpoints, params, state: DecodeState, limits):
    """A round, and what drafting by each of the limits would have proposed in it."""

    def draft(limit):
        tried = {**params, "graft": limit}
        with default_attention(plan.attention):
            proposal, _ = plan.method.propose(tried, state.method, state.roots)
        tree = proposal.tree
        return (tree.tokens, tree.parents, tree.size), jnp.asarray(proposal.passes, jnp.float32)

    def look(depth):  # as the drafter's own loop would: with no more than it has drafted by then
        def keep_growing(level, scores):
            return jnp.broadcast_to(level < depth + 1, scores.shape[:1])

        own = inner_state(state.method)
        proposal, _ = drafter.propose(params, own, state.roots, keep_growing)
        return confidence(proposal, (depth,))[:, 0]

    trees, passes = lax.map(draft, limits)
    empty = jnp.zeros((state.roots.shape[0], 0))
    sure = jnp.stack([look(d) for d in checkpoints], axis=1) if checkpoints else empty
    seen = _Seen(state.known, ~state.rows.done, sure, trees, passes)
    return decode_round(plan, params, state)[0], seen


def _emitted(tokens, parents, size, text) -> int:
    """Tokens that a round on a tree emits, given the text that follows its root."""
    children = {(int(parents[i]), int(tokens[i])): i for i in range(1, int(size))}
    node = count = 0
    while node is not None and count < len(text):
        node = children.get((node, text[count]))
        count += 1
    return count
