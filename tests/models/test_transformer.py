"""The forward against transformers' logits and states (golden files), and against itself in pieces."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.attention import tree_attention
from jspec.models.transformer import forward, fuse, output_logits, unfuse
from jspec.tree import pack_bits
from tests.models import golden_io


@partial(jax.jit, static_argnums=(0, 3))
def causal(config, params, ids, taps=(), cached=None):
    """Logits [V, M], taps and key/value rows of a text read as one chain after the cached rows."""
    rows = len(ids)
    visible = pack_bits(jnp.tril(jnp.ones((rows, rows), bool)))[None]
    if cached is None:
        nothing = jnp.zeros((1, config.num_kv_heads, 1, config.head_dim))
        cached = jnp.zeros((1,), jnp.int32), [(nothing, nothing)] * config.num_layers
    length, layers = cached

    def attend(layer, q, k, v):
        return tree_attention(q[None], *layers[layer], length, k[None], v[None], visible)[0]

    out = forward(config, params, ids, length[0] + jnp.arange(rows), attend, taps)
    return output_logits(params, out.hidden), out


def check(logits, taps, want, at=slice(None)):
    np.testing.assert_allclose(logits.T[at], want["logits"], atol=1e-4, rtol=0)
    states = np.moveaxis(taps[at], 1, 0)
    # A few channels of SmolLM2's residual stream reach 22,000: fp32 rounds the others relative to those.
    scale = 1 + np.abs(want["states"]).max(axis=-1, keepdims=True)
    assert (np.abs(states - want["states"]) / scale).max() < 1e-4


@pytest.mark.parametrize("name", golden_io.CASES)
def test_equals_transformers(name):
    case = golden_io.load_case(name)
    params = fuse(case.config, case.params)
    taps = tuple(range(case.config.num_layers + 1))
    logits, out = causal(case.config, params, case.input_ids[0], taps)
    states = np.concatenate([case.hiddens, case.normed[None]])[:, 0]
    check(logits, out.taps, {"logits": case.logits[0], "states": states})


def test_the_default_target_equals_transformers(smollm2):
    golden = golden_io.load_smollm2()
    taps = (*golden["layers"].tolist(), smollm2.config.num_layers)
    logits, out = causal(smollm2.config, smollm2.params, golden["input_ids"][0], taps)
    states = np.concatenate([golden["hiddens"], golden["normed"][None]])[:, 0]
    check(logits, out.taps, {"logits": golden["logits"][0], "states": states}, golden["positions"])
    np.testing.assert_array_equal(logits.argmax(axis=0), golden["argmax"][0])


@pytest.mark.parametrize("split", [1, 17, 39])
def test_a_cached_prefix_changes_nothing(split):
    case = golden_io.load_case("qwen3")
    config, params = case.config, fuse(case.config, case.params)
    ids = case.input_ids[0]
    _, first = causal(config, params, ids[:split])

    def stored(rows, poison):  # [kv head, position, head_dim], garbage beyond the length
        rows = jnp.pad(rows, ((0, 64 - split), (0, 0), (0, 0)), constant_values=poison)
        return rows.transpose(1, 0, 2)[None]

    layers = [(stored(k, jnp.nan), stored(v, 1e30)) for k, v in zip(first.keys, first.values)]
    logits, _ = causal(config, params, ids[split:], (), (jnp.asarray([split]), layers))
    np.testing.assert_allclose(logits.T, case.logits[0, split:], atol=1e-4, rtol=0)


def test_taps_out_of_range(tiny_model):
    config, params = tiny_model()
    with pytest.raises(ValueError, match=r"taps must be layers 0\.\.2"):
        causal(config, fuse(config, params), jnp.asarray([1]), (3,))


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_unfuse_undoes_fuse(tiny_model, arch):
    config, params = tiny_model(arch)
    back = unfuse(config, fuse(config, params))
    jax.tree.map(np.testing.assert_array_equal, back, params)
