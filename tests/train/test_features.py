import jax.numpy as jnp
import numpy as np

from jspec.methods import ar
from jspec.recording import text_taps
from jspec.state import Plan
from jspec.train.features import target_taps


def test_the_states_are_those_of_decoding(tiny_model):
    config, params = tiny_model(max_positions=200)
    from jspec.models.transformer import fuse

    params = fuse(config, params)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, config.vocab_size, (2, 45)).astype(np.int32)
    lengths, taps = (45, 21), (0, 2)
    tokens[1, 21:] = 3  # padding
    found = np.asarray(target_taps(config, params, jnp.asarray(tokens), taps))
    for row, length in enumerate(lengths):
        plan = Plan(config, ar())
        slow = text_taps(plan, {"target": params}, tokens[row, :length], taps)
        np.testing.assert_allclose(found[row, : length - 1], slow, rtol=1e-4, atol=1e-4)
