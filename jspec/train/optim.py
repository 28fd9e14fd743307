"""How a head is optimised."""

import dataclasses
import math

import optax

from jspec.method import check_range

MOST_STEPS = 10**9


@dataclasses.dataclass(frozen=True)
class OptimConfig:
    """How a head is optimised: AdamW, a linear warm-up, then a cosine to zero.

    Attributes:
      steps: of the whole run.
      learning_rate: at the top.
      warmup: part of the steps.
      weight_decay: of AdamW.
      b2: of AdamW.
      clip: of the gradient's global norm.
      eval_every: steps between two evaluations and checkpoints; what a kill can lose.
      eval_texts: held-out texts that are replayed.
      eval_tokens: of each.
      eval_budget: of the tree.
      held_out: texts that are not trained on.
      seed: of the first weights.

    Raises:
      ValueError: a number out of range.
    """

    steps: int = 8000
    learning_rate: float = 1e-3
    warmup: float = 0.04
    weight_decay: float = 0.0
    b2: float = 0.98
    clip: float = 1.0
    eval_every: int = 500
    eval_texts: int = 24
    eval_tokens: int = 64
    eval_budget: int = 32
    held_out: int = 64
    seed: int = 0

    def __post_init__(self):
        least = dict.fromkeys(("steps", "eval_every", "eval_texts", "eval_tokens", "held_out"), 1)
        for name, low in {**least, "eval_budget": 2}.items():
            for most in (None, MOST_STEPS):
                check_range(name, getattr(self, name), low, most)
        if not 0 <= self.warmup < 1:
            raise ValueError(f"warmup must be in [0, 1), got {self.warmup}")
        for name in ("learning_rate", "clip"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be finite and above 0, got {getattr(self, name)}")
        if not 0 <= self.weight_decay < math.inf or not 0 < self.b2 < 1:
            raise ValueError("weight_decay must be finite, 0 or above, and b2 in (0, 1)")
        check_range("seed", self.seed, 0, 1 << 31)


def optimizer(config: OptimConfig) -> optax.GradientTransformation:
    """The optimiser of a config."""
    warm = max(1, round(config.warmup * config.steps))
    rate = optax.warmup_cosine_decay_schedule(
        0.0, config.learning_rate, warm, max(config.steps, warm + 1)
    )
    adam = optax.adamw(rate, b2=config.b2, weight_decay=config.weight_decay)
    return optax.chain(optax.clip_by_global_norm(config.clip), adam)
