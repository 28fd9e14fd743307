"""EAGLE-3's published layouts: configs and tensors of both spellings, and the maps of the draft vocabulary."""

import dataclasses
import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny_target import write_target

from jspec.checkpoint import (
    export_head,
    head_fingerprint,
    load_head,
    read_config,
    read_head,
    save_head,
)
from jspec.heads.config import HeadError, check_kind, check_pair
from jspec.heads.eagle_config import EagleConfig, eagle_config_for, paired, published_taps
from jspec.heads.eagle_published import (
    config_from_json,
    config_to_json,
    is_eagle,
    tensor_shapes,
    to_tensors,
)
from jspec.heads.kinds import config_from_json as config_of_any_kind
from jspec.heads.published import config_to_json as of_parallel
from jspec.models.load import load_target
from tests.heads import samples
from tests.heads.eagle_samples import KINDS, config, head_and_target

LLAMA_8B = {  # the keys of a published head's config.json
    "architectures": ["LlamaForCausalLMEagle3"],
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 2048,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 1,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "use_cache": True,
    "vocab_size": 128256,
    "draft_vocab_size": 32000,
}
EAGLE_8B = EagleConfig(
    hidden_size=4096,
    ffn_size=14336,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=128256,
    norm_eps=1e-5,
    draft_vocab_size=32000,
)
PLAIN = LLAMA_8B | {"architectures": ["LlamaForCausalLM"]}  # as some are published
SPECULATORS = {
    "architectures": ["Eagle3Speculator"],
    "speculators_model_type": "eagle3",
    "draft_vocab_size": 32000,
    "norm_before_residual": True,
    "target_hidden_size": None,
    "transformer_layer_config": {
        k: v for k, v in LLAMA_8B.items() if k not in ("architectures", "draft_vocab_size")
    },
}
FULL = config(vocab_size=64, target_layers=5, taps=(1, 1, 2))
NARROW = dataclasses.replace(FULL, draft_vocab_size=23)
EAGLE2 = dataclasses.replace(NARROW, taps=(5,), own_output=False)
OF_ALL = [*KINDS.values(), FULL, EAGLE2, config(taps=(), target_layers=None, steps=2)]


def test_a_published_config():
    assert config_from_json(LLAMA_8B) == EAGLE_8B
    ours = paired(EAGLE_8B, dataclasses.replace(EAGLE_8B.stack, num_layers=32))
    assert (ours.taps, ours.target_layers) == ((1, 15, 28), 32)
    whole = config_from_json(LLAMA_8B | {"draft_vocab_size": 128256})
    assert whole == dataclasses.replace(EAGLE_8B, draft_vocab_size=None)


def test_one_that_is_published_as_a_plain_llama():
    assert is_eagle(PLAIN) and config_of_any_kind(PLAIN) == EAGLE_8B
    without = {k: v for k, v in PLAIN.items() if k != "draft_vocab_size"}
    assert not is_eagle(without) and not is_eagle(PLAIN | {"block_size": 8})


def test_the_other_spelling():
    assert config_from_json(SPECULATORS) == dataclasses.replace(EAGLE_8B, norm_before_residual=True)


def test_taps_are_told_in_three_ways():
    entered = "eagle_aux_hidden_state_layer_ids"
    for keys in (
        {"target_layer_ids": [1, 15, 28], entered: [9]},
        {entered: [2, 16, 29]},  # vLLM: the layers that the states enter
        {"eagle_config": {entered: [1, 15, 28], "use_aux_hidden_state": True}},  # SGLang: leave
    ):
        assert config_from_json(LLAMA_8B | keys).taps == (1, 15, 28)


@pytest.mark.parametrize("kind", [*OF_ALL, config(target_fingerprint="0f")])
def test_configs_come_back_and_are_told_from_other_heads(kind):
    data = json.loads(json.dumps(config_to_json(kind, "float32")))
    assert config_from_json(data) == config_of_any_kind(data) == kind
    other = samples.KINDS["causal"]
    data = of_parallel(other, "float32")
    assert not is_eagle(data) and config_of_any_kind(data) == other


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": None}, "lacks an integer 'hidden_size'"),
        ({"model_type": "qwen3"}, "layers of type 'qwen3' are not supported"),
        ({"num_hidden_layers": 2}, "heads of 2 layers are not supported"),
        ({"attention_bias": True}, "attention_bias is not supported"),
        ({"norm_before_fc": True}, "norm_before_fc in config.json is not supported"),
        ({"target_hidden_size": 2048}, "narrower or wider"),
        ({"norm_before_residual": 1}, "norm_before_residual in config.json must be true or false"),
        ({"transformer_layer_config": 3}, "transformer_layer_config in config.json must be an"),
        ({"target_layer_ids": "1"}, "target_layer_ids in config.json must be a list of layers"),
        ({"target_layer_ids": [-1]}, "taps must be target layers 0.., got -1"),
        (
            {"target_layer_ids": [9], "num_target_layers": 8},
            r"taps must be target layers 0\.\.8, got 9",
        ),
        ({"draft_vocab_size": 128257}, r"draft_vocab_size must be in 1\.\.128256, got 128257"),
        ({"draft_vocab_size": 1.5}, "needs an integer draft_vocab_size"),
        ({"steps": 0}, r"steps must be in 1\.\.511, got 0"),
        ({"target_fingerprint": 3}, "target_fingerprint in config.json must be text"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope type 'yarn'"),
        ({"num_key_value_heads": 5}, "32 query heads cannot share 5"),
    ],
)
def test_configs_that_are_refused(changes, message):
    with pytest.raises(HeadError, match=message):
        config_from_json(LLAMA_8B | changes)


def test_a_new_head_takes_after_its_target(tiny_model):
    target, _ = tiny_model(num_layers=6)
    head = eagle_config_for(target)
    assert head.taps == published_taps(6) == (1, 2, 2) and head.depth == 7
    assert head.stack.head_dim == target.head_dim and head.rope_theta == target.rope_theta
    check_pair(head, target, "0123")
    check_kind("eagle3", head, EagleConfig)
    with pytest.raises(HeadError, match="need a target of 5 layers or more, this one has 4"):
        eagle_config_for(dataclasses.replace(target, num_layers=4))
    with pytest.raises(HeadError, match=r"taps must be target layers 0\.\.6, got 7"):
        eagle_config_for(target, taps=(7,))
    with pytest.raises(
        HeadError, match="the head of eagle3 must be one of EAGLE-3's, this one is a p"
    ):
        check_kind("eagle3", samples.config(), EagleConfig)


def test_tensors_have_the_published_names_and_the_published_size():
    shapes = tensor_shapes(EAGLE_8B)
    assert len(shapes) == 15
    assert shapes["fc.weight"].shape == (4096, 12288)
    assert shapes["midlayer.self_attn.q_proj.weight"].shape == (4096, 8192)
    assert shapes["midlayer.self_attn.v_proj.weight"].shape == (1024, 8192)
    assert shapes["midlayer.hidden_norm.weight"].shape == (4096,)
    assert shapes["lm_head.weight"].shape == (32000, 4096)
    assert (shapes["d2t"].shape, shapes["d2t"].dtype) == ((32000,), np.int64)
    assert (shapes["t2d"].shape, shapes["t2d"].dtype) == ((128256,), np.bool_)


@pytest.mark.parametrize("kind", [*KINDS.values(), EAGLE2])
def test_tensors_are_those_of_their_shapes(kind):
    head, _ = head_and_target(kind)
    tensors, shapes = to_tensors(kind, head), tensor_shapes(kind)
    assert {k: (x.shape, x.dtype) for k, x in tensors.items()} == {
        k: (x.shape, x.dtype) for k, x in shapes.items()
    }


def own(head):
    return {name: x for name, x in head.items() if name != "lm_head"}


def assert_same(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected)):
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(ours, theirs)


@pytest.fixture(scope="module")
def target(tmp_path_factory, tiny_model):
    return load_target(write_target(tmp_path_factory.mktemp("target"), tiny_model, num_layers=5))


@pytest.mark.parametrize("kind", [FULL, NARROW, EAGLE2])
def test_heads_come_back_exactly_in_both_formats(tmp_path, target, kind):
    head, _ = head_and_target(kind)
    export_head(tmp_path / "a", kind, head, jnp.float32)
    save_head(tmp_path / "b", kind, head)
    prints = set()
    for name in "ab":
        found = read_head(tmp_path / name)
        assert found[0] == read_config(tmp_path / name) == kind
        assert_same(found[1], own(head))
        loaded = load_head(tmp_path / name, target)
        prints |= {loaded.fingerprint, head_fingerprint(kind, head)}
        assert ("lm_head" in loaded.params) == (not kind.own_output)
    assert len(prints) == 1
    export_head(tmp_path / "a", kind, loaded.params, jnp.float32)  # replaces it, rows left out
    assert_same(read_head(tmp_path / "a")[1], own(head))


def respell(folder):
    """The head in a folder as speculators would have written it."""
    tensors = load_file(folder / "model.safetensors")
    tensors = {name.replace("midlayer.", "layers.0."): x for name, x in tensors.items()}
    tensors["embed_tokens.weight"] = np.ones((64, 32), np.float32)
    save_file(tensors, folder / "model.safetensors")
    data = json.loads((folder / "config.json").read_text())
    other = {"speculators_model_type": "eagle3", "architectures": ["Eagle3Speculator"]}
    outer = ("draft_vocab_size", "norm_before_residual", "eagle_aux_hidden_state_layer_ids")
    other |= {name: data.pop(name) for name in outer}
    (folder / "config.json").write_text(json.dumps(other | {"transformer_layer_config": data}))


def test_a_head_of_the_other_spelling(tmp_path, target):
    kind = dataclasses.replace(NARROW, norm_before_residual=True, steps=7)
    head, _ = head_and_target(kind)
    export_head(tmp_path / "head", kind, head, jnp.float32)
    respell(tmp_path / "head")
    loaded = load_head(tmp_path / "head", target)
    assert loaded.config == kind
    assert_same(loaded.params, own(head))


def test_what_a_published_head_does_not_say_is_its_target_s(tmp_path, target):
    kind = dataclasses.replace(NARROW, taps=(), target_layers=None)
    head, _ = head_and_target(kind)
    export_head(tmp_path / "head", kind, head, jnp.float32)
    assert read_config(tmp_path / "head") == kind
    assert load_head(tmp_path / "head", target).config.taps == published_taps(5)


class TestMaps:
    """The draft vocabulary: what is missing, and what does not fit."""

    @pytest.fixture
    def folder(self, tmp_path):
        head, _ = head_and_target(NARROW)
        export_head(tmp_path / "head", NARROW, head, jnp.float32)
        return tmp_path / "head"

    def change(self, folder, remove=(), **tensors):
        path = folder / "model.safetensors"
        kept = {k: v for k, v in load_file(path).items() if k not in remove}
        save_file(kept | tensors, path)
        return {**kept, **tensors}

    def refuse(self, target, folder, message):
        with pytest.raises(HeadError, match=message) as error:
            load_head(folder, target)
        assert "\n" not in str(error.value)

    @pytest.mark.parametrize("zeros", [False, True])
    @pytest.mark.parametrize("lost", ["d2t", "t2d"])
    def test_one_map_is_enough(self, target, folder, lost, zeros):
        before = load_head(folder, target).params["draft_ids"]
        shape = load_file(folder / "model.safetensors")[lost]
        if zeros:
            self.change(folder, **{lost: np.zeros_like(shape)})
        else:
            self.change(folder, remove=[lost])
        np.testing.assert_array_equal(load_head(folder, target).params["draft_ids"], before)

    def test_no_map(self, target, folder):
        self.change(folder, remove=["d2t", "t2d"])
        self.refuse(target, folder, "lack a map from their 23 draft tokens to the target's 64")
        self.change(folder, d2t=np.zeros(23, np.int64))
        self.refuse(target, folder, "have a map of zeros from their 23 draft tokens")

    def test_a_whole_vocabulary_needs_none(self, target, tmp_path):
        head, _ = head_and_target(FULL)
        export_head(tmp_path / "head", FULL, head, jnp.float32)
        zeros = {"d2t": np.zeros(64, np.int64), "t2d": np.zeros(64, np.bool_)}
        self.change(tmp_path / "head", **zeros)
        assert_same(load_head(tmp_path / "head", target).params, head)
        self.change(tmp_path / "head", d2t=np.eye(1, 64, 3, np.int64)[0])
        self.refuse(target, tmp_path / "head", "must map draft tokens to ascending tokens")

    @pytest.mark.parametrize(
        ("at", "token", "message"),
        [
            (22, 64, "does not map into the target's: d2t makes draft token 22 token 64 of 0..63"),
            (22, 1 << 40, "d2t makes draft token 22 token 1099511627776 of 0..63"),
            (0, -1, "d2t makes draft token 0 token -1 of 0..63"),
            (22, 0, "must map draft tokens to ascending tokens of the target"),
        ],
    )
    def test_a_map_that_leads_elsewhere(self, target, folder, at, token, message):
        d2t = load_file(folder / "model.safetensors")["d2t"].copy()
        d2t[at] = token - at
        self.change(folder, d2t=d2t)
        self.refuse(target, folder, message)

    def test_maps_that_disagree(self, target, folder):
        t2d = load_file(folder / "model.safetensors")["t2d"]
        self.change(folder, t2d=~t2d)
        self.refuse(target, folder, "d2t and t2d in .* name different tokens")
        self.change(folder, remove=["d2t"])
        self.refuse(target, folder, "t2d in .* marks 41 tokens, not 23")

    @pytest.mark.parametrize(
        ("tensors", "message"),
        [
            ({"d2t": np.zeros(22, np.int64)}, r"d2t in .* has shape \(22,\)"),
            ({"t2d": np.zeros(65, np.bool_)}, r"t2d in .* has shape \(65,\)"),
            ({"d2t": np.zeros(23, np.float32)}, "d2t in .* is stored as F32"),
            ({"t2d": np.zeros(64, np.int64)}, "t2d in .* is stored as I64"),
            (
                {"midlayer.mlp.extra": np.zeros(3)},
                "have midlayer.mlp.extra, unknown to draft heads",
            ),
            ({"fc.weight": np.ones((32, 64), np.float32)}, r"fc\.weight .* has shape \(32, 64\)"),
        ],
    )
    def test_tensors_that_do_not_fit(self, target, folder, tensors, message):
        self.change(folder, **tensors)
        self.refuse(target, folder, message)

    def test_a_tensor_is_missing(self, target, folder):
        self.change(folder, remove=["midlayer.hidden_norm.weight"])
        self.refuse(target, folder, r"lack midlayer\.hidden_norm\.weight")

    def test_pickled_weights(self, target, folder):
        os.replace(folder / "model.safetensors", folder / "pytorch_model.bin")
        self.refuse(target, folder, "pickled weights, which are never read: convert them")

    def test_another_target(self, target, folder):
        for changes, message in (
            ({"vocab_size": 65}, "target of vocab_size 65, this target's is 64"),
            ({"num_target_layers": 6}, "target of layer count 6, this target's is 5"),
            ({"target_fingerprint": "0f"}, "trained on target 0f"),
        ):
            path = folder / "config.json"
            before = path.read_text()
            path.write_text(json.dumps(json.loads(before) | changes))
            if "vocab_size" in changes:
                self.change(
                    folder, t2d=np.pad(load_file(folder / "model.safetensors")["t2d"], (0, 1))
                )
            self.refuse(target, folder, message)
            path.write_text(before)
            if "vocab_size" in changes:
                self.change(folder, t2d=load_file(folder / "model.safetensors")["t2d"][:64])
