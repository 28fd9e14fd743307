import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.models.params import hub_names, init_params, param_shapes


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_random_params_have_the_documented_shapes(tiny_model, arch, tied):
    config, params = tiny_model(arch, tie_embeddings=tied)
    layer = {"input_norm", "q", "k", "v", "o", "post_norm", "gate", "up", "down"}
    layer |= {"q_bias", "k_bias", "v_bias"} if arch == "qwen2" else set()
    layer |= {"q_norm", "k_norm"} if arch == "qwen3" else set()
    assert set(params) == {"embed", "layers", "norm"} | (set() if tied else {"lm_head"})
    assert [set(p) for p in params["layers"]] == [layer] * 2
    first = params["layers"][0]
    assert params["embed"].shape == (61, 32)
    assert first["q"].shape == first["o"].T.shape == (32, 32)
    assert first["k"].shape == first["v"].shape == (16, 32)
    assert first["gate"].shape == first["up"].shape == first["down"].T.shape == (48, 32)
    if arch == "qwen3":
        assert first["q_norm"].shape == first["k_norm"].shape == (8,)
    if arch == "qwen2":
        assert first["q_bias"].shape == (32,) and first["v_bias"].shape == (16,)
    shapes = param_shapes(config)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), params) == jax.tree.map(
        lambda x: (x.shape, x.dtype), shapes
    )


def test_params_depend_on_the_key_and_take_a_dtype(tiny_model):
    config, params = tiny_model(seed=0)
    other = init_params(config, jax.random.key(1), jnp.bfloat16)
    assert all(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(other))
    assert not np.allclose(params["embed"], other["embed"].astype(jnp.float32), atol=0.1)
    leaves = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(params)]
    assert len(set(leaves)) == len(leaves)  # no key is used twice


def test_hub_names_are_unique_and_by_layer(tiny_model):
    config, params = tiny_model("qwen3")
    names = hub_names(config)
    assert jax.tree.structure(names) == jax.tree.structure(params)
    assert names["layers"][1]["k_norm"] == "model.layers.1.self_attn.k_norm.weight"
    flat = jax.tree.leaves(names)
    assert len(set(flat)) == len(flat)
