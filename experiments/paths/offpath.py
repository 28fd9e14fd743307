"""Why a path matters: how often a draft is right after the text has left a head's best path.

At every root of a recorded text the drafts of all depths are judged where every draft before them was right, as below a
node whose path is the text's. Once by the slot's row alone, which is the same for all nodes of a depth, and once
corrected by the path. A depth is off the best path when the row of an earlier one had another token on top than the
text went on with: the nodes that only a tree reaches.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int

from experiments.jetspec.acceptance import CHUNK, padded
from jspec.heads.config import HeadConfig
from jspec.heads.correction import taught_inputs
from jspec.heads.parallel import block_hidden, draft_logits
from jspec.models.products import product
from jspec.recording import Recording

KINDS = ("row, on the best path", "row, off it", "corrected, on it", "corrected, off it")


def offpath(
    config: HeadConfig,
    head: dict[str, Any],
    target_params: dict[str, Any],
    recordings: Sequence[Recording],
    taps: tuple[int, ...],
    *,
    new: int,
) -> dict[str, list[list[int]]]:
    """Counts by depth, over all roots of recordings: ``{kind of KINDS: [right, judged]}``.

    Args:
      config: the head's, with a correction or without: then the corrected kinds are missing.
      head: its weights.
      target_params: the target's.
      recordings: with the states of the layers ``taps``, all those of the head among them.
      taps: see there.
      new: new tokens of a recording, at most: roots.
    """
    total = sum(
        np.asarray(_count(config, new, head, target_params, states, tokens, one.start - 1, one.end))
        for one, states, tokens in padded(config, recordings, taps)
    )
    kinds = KINDS if config.correction else KINDS[:2]
    return {kind: total[i].T.tolist() for i, kind in enumerate(kinds)}


@partial(jax.jit, static_argnums=(0, 1))
def _count(config, new, head, target_params, taps, tokens, first, end) -> Int[Array, "K D 2"]:
    roots, depth = -(-new // CHUNK) * CHUNK, config.depth
    anchors = first + jnp.arange(roots)
    hidden = block_hidden(
        config, head, target_params, taps, tokens, jnp.minimum(anchors, tokens.shape[0] - 1)
    )
    at = anchors[:, None] + 1 + jnp.arange(depth)
    inside = jnp.minimum(at, tokens.shape[0] - 1)
    labels = tokens[inside]
    judged = (at < end) & (jnp.arange(roots) < new)[:, None]

    def part(one):
        hidden, anchors, labels = one
        logits = draft_logits(head, target_params, hidden)
        row = _best(head, logits)
        if config.correction is None:
            return row[None]
        before = tokens[jnp.minimum(anchors, tokens.shape[0] - 1)]
        mixed = taught_inputs(config, head, target_params, hidden, before, labels)
        change = product(head["correction"]["up"], mixed)
        return jnp.stack([row, _best(head, logits + change)])

    by_chunk = (
        hidden.reshape(hidden.shape[0], -1, CHUNK * depth).swapaxes(0, 1),
        anchors.reshape(-1, CHUNK),
        labels.reshape(-1, CHUNK, depth),
    )
    found = lax.map(part, by_chunk)  # [chunks, drafters, CHUNK * D]
    right = found.swapaxes(0, 1).reshape(-1, roots, depth) == labels
    wrong_before = jnp.cumsum(~right[0], axis=1) - ~right[0]
    out = []
    for mine in right:
        for off in (False, True):
            these = judged & ((wrong_before > 0) == off)
            out.append(jnp.stack([(mine & these).sum(0), these.sum(0)], axis=-1))
    return jnp.stack(out)


def _best(head, logits):
    best = jnp.argmax(logits, axis=0)
    return head["draft_ids"][best] if "draft_ids" in head else best
