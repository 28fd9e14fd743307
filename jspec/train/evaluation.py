"""How well a head drafts on texts that it was not trained on: their answers replayed, as decoding would meet them."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jspec.heads.kinds import AnyConfig
from jspec.recording import Recording, replay
from jspec.state import Plan
from jspec.train.data import Text
from jspec.train.optim import OptimConfig


def long_enough(texts: Sequence[Text], config: AnyConfig, optim: OptimConfig) -> list[Text]:
    """The texts that an evaluation can use, at most ``eval_texts``.

    Raises:
      ValueError: there is none.
    """
    need = optim.eval_tokens + config.depth
    out = [text for text in texts if len(text.tokens) - text.start >= need]
    if not out:
        raise ValueError(f"no held-out answer has the {need} tokens that an evaluation needs")
    return out[: optim.eval_texts]


def held_out_recordings(
    texts: Sequence[Text], taps: Sequence[int], config: AnyConfig, optim: OptimConfig
) -> list[Recording]:
    """Held-out texts as ``replay`` takes them."""
    columns = [taps.index(tap) for tap in config.taps]
    return [
        Recording(
            index=number,
            start=text.start,
            end=text.start + optim.eval_tokens,
            tokens=text.tokens,
            taps=np.asarray(text.taps[:, columns], np.float32),
        )
        for number, text in enumerate(texts)
    ]


def evaluate(plans: dict[str, Plan], params, recordings, tokens: int) -> dict[str, Any]:
    """Acceptance length of each plan on held-out texts, and how often each depth was accepted."""
    out = {}
    for name, plan in plans.items():
        capacity = max(len(one.tokens) for one in recordings) + plan.path
        capacity = -(-capacity // 128) * 128
        never = np.zeros((1, plan.config.vocab_size), np.int32)
        done = replay(
            plan, params, recordings, max_new_tokens=tokens, stops=never, capacity=capacity
        )
        rounds = sum(one.rounds for one in done)
        out[name] = sum(one.emitted for one in done) / rounds
        depths = np.sum([one.by_depth for one in done], axis=0) / rounds
        out[f"{name}_by_depth"] = [round(float(x), 4) for x in depths[1:]]
    return out
