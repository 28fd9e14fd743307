"""Where two texts of the same seed part, and whether a near-tie in the target's own scores excuses it."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from jspec.method import Params
from jspec.models.transformer import output_logits
from jspec.replay import text_taps
from jspec.sampling import position_noise, warp
from jspec.state import Plan

NEAR_TIE = 1e-3  # of perturbed scores, or of the distance to the filters' cut


class Difference(NamedTuple):
    """The first place where a text departs from the reference.

    Attributes:
      position: index among the new tokens.
      gap: how far the target's perturbed scores of the two tokens are apart; for a token that the filters removed, how
        far below the cut it stands (log-probability). ``inf`` where one text merely ends earlier.
    """

    position: int
    gap: float

    @property
    def excused(self) -> bool:
        """Whether it is a near-tie."""
        return self.gap <= NEAR_TIE


def first_difference(
    plan: Plan,
    params: Params,
    prompt: Sequence[int],
    ours: Sequence[int],
    reference: Sequence[int],
    *,
    index: int = 0,
    seed: int = 0,
) -> Difference | None:
    """Compares new tokens with autoregressive decoding's.

    Args:
      plan: gives the target and the sampling; its method does not matter.
      params: ``{"target": ..., ...}``.
      prompt: token ids.
      ours: new tokens to be checked.
      reference: autoregressive decoding's.
      index: of the prompt in the input.
      seed: of the draws.

    Returns:
      None where both are equal.
    """
    if list(ours) == list(reference):
        return None
    pairs = zip(ours, reference, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if at is None:
        return Difference(min(len(ours), len(reference)), float("inf"))
    text = [*prompt, *reference[:at]]
    raw, noise = _scores(plan, params, text, index, seed)
    pair = np.asarray([ours[at], reference[at]])
    kept = np.asarray(warp(plan.sampling, jnp.asarray(raw)[:, None])[:, 0])
    scaled = raw / (plan.sampling.temperature or 1.0)
    gap = 0.0
    if np.isfinite(kept[pair]).all():
        score = kept[pair] if plan.sampling.greedy else kept[pair] + noise[pair]
        gap = float(abs(score[0] - score[1]))
    else:
        cut = kept[np.isfinite(kept)].min()
        gap = float(max(cut - scaled[token] for token in pair))
    return Difference(at, gap)


def _scores(
    plan: Plan, params: Params, text: list[int], index: int, seed: int
) -> tuple[Float[np.ndarray, " V"], Float[np.ndarray, " V"]]:
    """Raw logits after a text, and the noise of the position that follows."""
    final = (plan.config.num_layers,)
    state = text_taps(plan, params, np.asarray([*text, 0], np.int32), final)[-1].T  # [H, 1]
    raw = output_logits(params["target"], jnp.asarray(state))[:, 0]
    where = jnp.asarray([index]), jnp.asarray([[len(text)]])
    noise = position_noise(jax.random.key(seed), *where, raw.shape[0])[0, 0]
    return np.asarray(raw), np.asarray(noise)
