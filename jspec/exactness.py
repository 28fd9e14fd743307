"""Where two texts of the same seed part, and whether a near-tie in the target's own scores excuses it."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from jspec.mesh import fetchable
from jspec.method import Params
from jspec.models.transformer import output_logits
from jspec.recording import text_taps
from jspec.sampling import Sampling, position_noise, warp
from jspec.state import Plan

NEAR_TIE = 1e-3  # of perturbed scores, or of the distance to the filters' cut


class Difference(NamedTuple):
    """The first place where a text departs from the reference.

    Attributes:
      position: index among the new tokens.
      gap: the smallest change that explains it: how far the target's perturbed scores of the two tokens are apart, or
        how far one of them is from the cut of a filter (log-probability; for top-p, mass). ``inf`` where one text
        merely ends earlier.
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
    raw, noise = _scores(plan, params, [*prompt, *reference[:at]], index, seed)
    sampling, pair = plan.sampling, [ours[at], reference[at]]
    if sampling.greedy:
        return Difference(at, float(abs(raw[pair[0]] - raw[pair[1]])))
    scaled = raw.astype(np.float64) / sampling.temperature
    gaps = [_cut_distance(sampling, scaled, token) for token in pair]
    kept = np.asarray(warp(sampling, jnp.asarray(raw)[:, None])[:, 0])[pair]
    if np.isfinite(kept).all():
        gaps.append(abs(np.subtract(*(kept + noise[pair]))))
    return Difference(at, float(min(gaps)))


def _cut_distance(sampling: Sampling, scaled: Float[np.ndarray, " V"], token: int) -> float:
    """How far a token is from being kept where it is filtered, or filtered where it is kept."""
    ours, distances = scaled[token], [np.inf]
    if 0 < sampling.top_k < len(scaled):
        after, kth = np.sort(scaled)[::-1][[sampling.top_k, sampling.top_k - 1]]
        distances.append(ours - after if ours >= kth else kth - ours)
        scaled = np.where(scaled >= kth, scaled, -np.inf)
    if sampling.top_p < 1:
        weights = np.exp(scaled - scaled.max())
        distances.append(abs(weights[scaled > ours].sum() / weights.sum() - sampling.top_p))
    if sampling.min_p > 0:
        distances.append(abs(ours - scaled.max() - np.log(sampling.min_p)))
    return min(distances)


def _scores(
    plan: Plan, params: Params, text: list[int], index: int, seed: int
) -> tuple[Float[np.ndarray, " V"], Float[np.ndarray, " V"]]:
    """Raw logits after a text, and the noise of the position that follows."""
    final = (plan.config.num_layers,)
    state = text_taps(plan, params, np.asarray([*text, 0], np.int32), final)[-1].T  # [H, 1]
    raw = fetchable(output_logits(params["target"], jnp.asarray(state))[:, 0])
    where = jnp.asarray([index]), jnp.asarray([[len(text)]])
    noise = position_noise(jax.random.key(seed), *where, raw.shape[0])[0, 0]
    return np.asarray(raw), np.asarray(noise)
