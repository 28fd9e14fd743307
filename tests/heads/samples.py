"""Random heads of every kind, for tests."""

import jax
import jax.numpy as jnp
import numpy as np

from jspec.heads.config import Correction, HeadConfig
from jspec.heads.parallel import init_head, with_draft_ids
from jspec.models.config import RopeScaling

VOCAB = 61


def config(**changes):
    values = {
        "hidden_size": 32,
        "ffn_size": 48,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "block_size": 5,
        "causal": True,
        "mask_token_id": 60,
        "taps": (0, 2),
        "target_layers": 3,
        "vocab_size": VOCAB,
    }
    return HeadConfig(**values | changes)


LLAMA3 = RopeScaling("llama3", 8.0, 1.0, 4.0, 24)
KINDS = {
    "causal": config(),
    "bidirectional": config(causal=False, rope_scaling=RopeScaling("linear", 2.5)),
    "windows": config(causal=False, windows=(4, None), rope_scaling=LLAMA3, norm_eps=1e-4),
    "narrow": config(
        num_layers=1,
        num_heads=3,
        num_kv_heads=3,
        head_dim=10,
        hidden_size=24,
        block_size=4,
        taps=(2, 0, 1),
        windows=(2,),
        draft_vocab_size=23,
    ),
    "domino": config(causal=False, block_size=4, shift_labels=True, correction=Correction(12, 5)),
    "causal domino": config(
        num_layers=1,
        draft_vocab_size=23,
        correction=Correction(gru_size=7, rank=6, prefix=2),
    ),
}


def head_and_target(config, seed=0, dtype=jnp.float32):
    """Weights as training might leave them; the target's embedding and output rows.

    No norm is all ones, and a correction is large enough to change what is drafted.
    """
    keys = jax.random.split(jax.random.key(seed), 4)
    head = jax.tree.map(
        lambda x: (
            x + (0.3 * jax.random.normal(keys[0], x.shape)).astype(dtype) if x.ndim == 1 else x
        ),
        init_head(config, keys[1], dtype),
    )
    if config.correction is not None:
        up = head["correction"]["up"]
        noise = 6 * jax.random.normal(jax.random.fold_in(keys[0], 1), up.shape)
        head["correction"]["up"] = noise.astype(dtype)
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
