"""The golden cases: tiny models in hub layout with what transformers computes for them."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from jspec.models.config import ModelConfig, from_hf, read_json
from jspec.models.load import read_params

GOLDEN = Path(__file__).parent / "golden"
CASES = ("llama_llama3", "llama_linear", "qwen2", "qwen3")


@dataclasses.dataclass(frozen=True)
class Case:
    """A model and its expected outputs, fp32 (S positions, L layers, H hidden, V vocabulary).

    Attributes:
      input_ids: i32 [1, S].
      logits: [1, S, V].
      hiddens: [L, 1, S, H], the residual stream after each layer.
      normed: [1, S, H], after the final norm.
    """

    config: ModelConfig
    params: dict[str, Any]
    input_ids: np.ndarray
    logits: np.ndarray
    hiddens: np.ndarray
    normed: np.ndarray


def load_case(name: str) -> Case:
    """One of ``CASES``."""
    folder = GOLDEN / name
    config = from_hf(read_json(folder / "config.json"))
    params, _ = read_params(folder, config)
    return Case(config, params, **load_file(folder / "expected.safetensors"))


def load_smollm2() -> dict[str, np.ndarray]:
    """What transformers says of the default target on one text.

    "input_ids" i32 [1, S] and "argmax" i32 [1, S]; at the "positions" i32 [P] also "logits"
    [1, P, V] and "normed" [1, P, H]; and "hiddens" [T, 1, P, H] after the "layers" i32 [T].
    """
    return load_file(GOLDEN / "smollm2.safetensors")
