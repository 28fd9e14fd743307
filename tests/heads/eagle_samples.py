"""Random EAGLE-3 heads of every kind, for tests."""

import jax
import jax.numpy as jnp
import numpy as np

from jspec.heads.eagle import init_head, with_draft_ids
from jspec.heads.eagle_config import EagleConfig
from jspec.models.config import RopeScaling

VOCAB = 61


def config(**changes):
    values = {
        "hidden_size": 32,
        "ffn_size": 48,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "vocab_size": VOCAB,
        "taps": (0, 1, 2),
        "target_layers": 3,
        "steps": 4,
    }
    return EagleConfig(**values | changes)


KINDS = {
    "whole": config(),
    "narrow": config(
        hidden_size=24,
        num_heads=3,
        num_kv_heads=1,
        head_dim=10,
        draft_vocab_size=23,
        taps=(2, 0),
        rope_scaling=RopeScaling("llama3", 8.0, 1.0, 4.0, 24),
        norm_eps=1e-4,
    ),
    "eagle2": config(taps=(3,), own_output=False, draft_vocab_size=30),
    "normed": config(norm_before_residual=True, rope_scaling=RopeScaling("linear", 2.5)),
}


def head_and_target(config, seed=0, dtype=jnp.float32):
    """Weights as training might leave them: no norm is all ones; the target's embedding and output rows."""
    keys = jax.random.split(jax.random.key(seed), 4)
    head = jax.tree.map(
        lambda x: (
            x + (0.3 * jax.random.normal(keys[0], x.shape)).astype(dtype) if x.ndim == 1 else x
        ),
        init_head(config, keys[1], dtype),
    )
    shape = (config.vocab_size, config.hidden_size)
    target = {
        "embed": jax.random.normal(keys[2], shape, dtype),
        "lm_head": jax.random.normal(keys[3], shape, dtype) * 0.5,
    }
    if config.draft_vocab_size is not None:
        rng = np.random.default_rng(seed)
        ids = np.sort(rng.choice(config.vocab_size, config.draft_vocab_size, replace=False))
        head = with_draft_ids(head, target, ids.astype(np.int32))
    return head, target


def output_rows(config, head, target):
    """The rows that make logits of the draft vocabulary, and the ids they stand for."""
    ids = np.asarray(head["draft_ids"]) if "draft_ids" in head else np.arange(config.vocab_size)
    return np.asarray(head["output"] if config.own_output else target["lm_head"][ids]), ids
