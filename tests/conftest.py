"""Targets that tests share: the real default one, and tiny random ones."""

import dataclasses
import os
from importlib.metadata import version
from pathlib import Path

# Tests compile far more than they run: XLA's back end may be quick about it. Before JAX is imported. Without the fusion
# emitters a tiny model takes half the time; jaxlib 0.12 stops at a flag that it does not know.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0"
    + " --xla_cpu_use_fusion_emitters=false" * version("jaxlib").startswith("0.10."),
)

import jax
import pytest

from jspec.models.config import ModelConfig
from jspec.models.load import DEFAULT_TARGET, load_target
from jspec.models.params import init_params

_TINY = ModelConfig(
    arch="llama",
    vocab_size=61,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    ffn_size=48,
    norm_eps=1e-5,
    rope_theta=10000.0,
    rope_scaling=None,
    tie_embeddings=False,
    qkv_bias=False,
    qk_norm=False,
    max_positions=2048,
    eos_ids=(),
)


@pytest.fixture(autouse=True)
def few_programs():
    """Drops compiled programs in time: each holds memory maps, and Linux gives a process 65530."""
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_text().count("\n") > 20_000:
        jax.clear_caches()


@pytest.fixture(scope="session")
def smollm2():
    """The default target in fp32, fetched and converted on a fresh machine."""
    return load_target(DEFAULT_TARGET)


@pytest.fixture(scope="session")
def tiny_model():
    """``tiny_model(arch="llama", seed=0, **overrides) -> (config, params)``, random and fp32."""

    def make(arch="llama", seed=0, **overrides):
        kinds = {"arch": arch, "qkv_bias": arch == "qwen2", "qk_norm": arch == "qwen3"}
        config = dataclasses.replace(_TINY, **(kinds | overrides))
        return config, init_params(config, jax.random.key(seed))

    return make
