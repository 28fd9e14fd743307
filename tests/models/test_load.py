import dataclasses
import functools
import json
import shutil

import huggingface_hub
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from golden_io import GOLDEN
from hub import byte_tokenizer, tensors, write_hub
from safetensors.numpy import load_file, save_file

from jspec.models.config import TargetError, from_hf, read_json
from jspec.models.load import load_target, read_params
from jspec.models.params import param_shapes
from jspec.models.transformer import fuse


def assert_same(params, expected, dtype=jnp.float32):
    assert jax.tree.structure(params) == jax.tree.structure(expected)
    for ours, theirs in zip(jax.tree.leaves(params), jax.tree.leaves(expected)):
        assert ours.dtype == dtype
        np.testing.assert_array_equal(ours, theirs.astype(dtype))


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_hub_directory(tiny_model, tmp_path, arch, tied):
    config, params = tiny_model(arch, tie_embeddings=tied, eos_ids=(5,))
    folder = write_hub(tmp_path / "model", config, tensors(config, params))
    target = load_target(folder)
    assert target.config == config
    assert target.name == str(folder)
    assert target.tokenizer.encode("!1") == [0, 16]
    assert_same(read_params(folder, config)[0], params)
    assert_same(target.params, fuse(config, params))


def test_dtypes_are_converted_and_the_fingerprint_is_of_the_stored_weights(tiny_model, tmp_path):
    config, params = tiny_model()
    weights = tensors(config, params)
    folder = write_hub(tmp_path / "f32", config, weights)
    _, fingerprint = read_params(folder, config)
    narrow, same = read_params(folder, config, jnp.bfloat16)
    assert_same(narrow, params, jnp.bfloat16)
    assert fingerprint == same
    assert len(fingerprint) == 16 and int(fingerprint, 16) >= 0
    for stored in (ml_dtypes.bfloat16, np.float16):
        rounded = {name: array.astype(stored) for name, array in weights.items()}
        folder = write_hub(tmp_path / str(np.dtype(stored)), config, rounded)
        loaded, other = read_params(folder, config)
        expected = jax.tree.map(lambda x, stored=stored: x.astype(stored), params)
        assert_same(loaded, jax.tree.map(lambda x: x.astype(jnp.float32), expected))
        assert other != fingerprint


def test_shards_are_one_model(tmp_path):
    sharded = GOLDEN / "qwen2"
    config = from_hf(read_json(sharded / "config.json"))
    params, fingerprint = read_params(sharded, config)
    weights = {}
    for shard in sorted(sharded.glob("model-*.safetensors")):
        weights |= load_file(shard)
    save_file(weights, tmp_path / "model.safetensors")
    whole, same = read_params(tmp_path, config)
    assert_same(whole, params)
    assert same == fingerprint


def test_the_fingerprint_tells_weights_and_architectures_apart(tiny_model, tmp_path):
    config, params = tiny_model()
    weights = tensors(config, params)

    def fingerprint(config, weights):
        return load_target(write_hub(tmp_path / "model", config, weights)).fingerprint

    original = fingerprint(config, weights)
    assert fingerprint(config, weights) == original
    assert fingerprint(dataclasses.replace(config, eos_ids=(3,)), weights) == original
    assert fingerprint(dataclasses.replace(config, rope_theta=2.0), weights) != original
    name = "model.layers.1.mlp.up_proj.weight"
    assert fingerprint(config, weights | {name: weights[name] * 1.001}) != original


def test_a_head_stored_beside_tied_embeddings_is_ignored(tiny_model, tmp_path):
    config, params = tiny_model(tie_embeddings=True)
    weights = tensors(config, params)
    extra = {
        "lm_head.weight": weights["model.embed_tokens.weight"].copy(),
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32),
    }
    assert_same(read_params(write_hub(tmp_path, config, weights | extra), config)[0], params)


def test_the_default_target(smollm2):
    config = smollm2.config
    assert (config.num_layers, config.hidden_size, config.num_heads, config.num_kv_heads) == (
        30,
        576,
        9,
        3,
    )
    assert config.tie_embeddings and config.norm_eps == 1e-5 and config.eos_ids == (2,)
    assert smollm2.fingerprint == "682727a897d57535"
    shapes = jax.eval_shape(functools.partial(fuse, config), param_shapes(config))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), smollm2.params) == jax.tree.map(
        lambda x: (x.shape, x.dtype), shapes
    )
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(smollm2.params))


def test_a_hub_id_is_downloaded_by_the_hub_client(tiny_model, tmp_path, monkeypatch):
    config, params = tiny_model()
    folder = write_hub(tmp_path, config, tensors(config, params))
    asked = []

    def snapshot_download(name, allow_patterns):
        asked.append(name)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert_same(load_target("org/some-model.1").params, fuse(config, params))
    assert asked == ["org/some-model.1"]

    def offline(name, allow_patterns):
        raise RuntimeError("no route to host\nmore\nlines")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(TargetError, match=r"^cannot get org/x .*no route to host$"):
        load_target("org/x")


@pytest.mark.parametrize("name", ["smollm", "no/such/dir", "/no/such/dir", "x.gguf", "a/x.gguf"])
def test_an_unknown_target_lists_what_would_be_right(name):
    with pytest.raises(TargetError, match=r"no target .*smollm2-135m, a directory"):
        load_target(name)


@pytest.mark.parametrize("name", ["~nosuchuser/x", "a" * 5000, "a/" + "b" * 5000])
def test_a_name_that_can_be_no_path(name):
    with pytest.raises(TargetError, match=r"^no target "):
        load_target(name)


class TestDamage:
    """Each damaged directory is one clear line."""

    @pytest.fixture
    def model(self, tiny_model, tmp_path):
        config, params = tiny_model()
        weights = tensors(config, params)
        return write_hub(tmp_path / "model", config, weights), config, weights

    def refuse(self, folder, message):
        with pytest.raises(TargetError, match=message) as caught:
            load_target(folder)
        assert "\n" not in str(caught.value)

    def test_no_config(self, tmp_path):
        self.refuse(tmp_path, r"has no config\.json")

    def test_no_tokenizer(self, model):
        (model[0] / "tokenizer.json").unlink()
        self.refuse(model[0], r"has no tokenizer\.json")

    def test_no_weights(self, model):
        (model[0] / "model.safetensors").unlink()
        (model[0] / "pytorch_model.bin").touch()
        self.refuse(model[0], r"has no weights: model\.safetensors is missing")

    def test_a_missing_shard(self, tmp_path):
        folder = shutil.copytree(GOLDEN / "qwen2", tmp_path / "qwen2")
        byte_tokenizer().save(str(folder / "tokenizer.json"))
        load_target(folder)
        (folder / "model-00002-of-00002.safetensors").unlink()
        self.refuse(folder, "model-00002-of-00002.safetensors is missing")

    @pytest.mark.parametrize("weight_map", [5, ["x"], {"a": 5}, {"a": ["x"]}, {"a": None}])
    def test_a_weight_map_of_a_wrong_type(self, model, weight_map):
        index = model[0] / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": weight_map}))
        self.refuse(model[0], "the weight_map in .* names no files")

    @pytest.mark.parametrize("dtype", [np.int8, np.int32, bool, ml_dtypes.float8_e4m3fn])
    def test_weights_that_are_no_plain_floats(self, model, dtype):
        folder, _, weights = model
        name = min(weights)
        save_file(weights | {name: weights[name].astype(dtype)}, folder / "model.safetensors")
        self.refuse(folder, f"{name} in .* is stored as .*supported: F64, F32, F16, BF16")

    @pytest.mark.parametrize("keep", [0, 5, 100, -1])
    def test_truncated_weights(self, model, keep):
        path = model[0] / "model.safetensors"
        path.write_bytes(path.read_bytes()[:keep])
        self.refuse(model[0], "the weights in .* cannot be read")

    def test_a_missing_tensor(self, model):
        folder, config, weights = model
        del weights["model.layers.1.mlp.up_proj.weight"]
        write_hub(folder, config, weights)
        self.refuse(folder, r"lack model\.layers\.1\.mlp\.up_proj\.weight")

    def test_a_tensor_of_another_architecture(self, model):
        folder, config, weights = model
        write_hub(folder, config, weights | {"model.layers.0.self_attn.q_proj.bias": np.ones(32)})
        self.refuse(folder, r"have model\.layers\.0\.self_attn\.q_proj\.bias, unknown to llama")

    def test_a_wrong_shape(self, model):
        folder, config, weights = model
        write_hub(folder, config, weights | {"model.norm.weight": np.ones(31, np.float32)})
        self.refuse(folder, r"model\.norm\.weight .* has shape \(31,\), .* asks for \(32,\)")

    def test_a_model_that_is_not_served(self, model):
        raw = json.loads((model[0] / "config.json").read_text())
        (model[0] / "config.json").write_text(json.dumps(raw | {"model_type": "gpt2"}))
        self.refuse(model[0], "'gpt2' is not supported")

    def test_a_file_of_another_kind(self, model):
        self.refuse(model[0] / "config.json", r"neither a directory nor a \.gguf file")
