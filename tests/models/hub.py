"""Writes hub-style directories for tests."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tokenizers
from safetensors.numpy import save_file
from tokenizers import decoders, models, pre_tokenizers

from jspec.models.config import ModelConfig, to_hf
from jspec.models.params import hub_names


def byte_tokenizer(size: int = 61) -> tokenizers.Tokenizer:
    """Byte-level BPE without merges over the first ``size`` visible characters."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[:size]
    backend = tokenizers.Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def tensors(config: ModelConfig, params: dict[str, Any]) -> dict[str, np.ndarray]:
    """The params by the names of a hub checkpoint."""
    names = jax.tree.leaves(hub_names(config))
    return dict(zip(names, map(np.asarray, jax.tree.leaves(params)), strict=True))


def write_hub(folder: Path, config: ModelConfig, weights: dict[str, np.ndarray]) -> Path:
    """A target as the hub has it, with a tokenizer of bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(to_hf(config)))
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    save_file(weights, folder / "model.safetensors")
    return folder
