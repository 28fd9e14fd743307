import dataclasses
import json

import jax
import numpy as np
import pytest

from jspec.heads.config import Correction, HeadConfig, HeadError
from jspec.heads.published import (
    config_from_json,
    config_to_json,
    from_tensors,
    tensor_shapes,
    to_tensors,
)
from tests.heads.samples import KINDS, config, head_and_target

QWEN3_8B = {  # the keys of a published head's config.json
    "architectures": ["DFlashDraftModel"],
    "attention_bias": False,
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "block_size": 16,
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
    "dtype": "bfloat16",
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "layer_types": ["full_attention"] * 5,
    "max_position_embeddings": 40960,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 5,
    "num_key_value_heads": 8,
    "num_target_layers": 36,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
DFLASH = HeadConfig(
    hidden_size=4096,
    ffn_size=12288,
    num_layers=5,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    block_size=16,
    causal=False,
    mask_token_id=151669,
    taps=(1, 9, 17, 25, 33),
    target_layers=36,
    vocab_size=151936,
    rope_theta=1e6,
)


DOMINO = {  # what a published Domino head has besides
    "projector_type": "domino",
    "pure_draft_prefix_len": 1,
    "emb_dim": 256,
    "gru_hidden_dim": 1024,
    "shift_label": True,
}


def with_own(**own):
    return QWEN3_8B | {"dflash_config": QWEN3_8B["dflash_config"] | own}


def test_a_published_config():
    assert config_from_json(QWEN3_8B) == DFLASH
    assert config_from_json(with_own(causal_head=True)) == dataclasses.replace(DFLASH, causal=True)


def test_a_published_config_of_domino():
    ours = config_from_json(with_own(**DOMINO))
    assert ours == dataclasses.replace(
        DFLASH, shift_labels=True, correction=Correction(gru_size=1024, rank=256, prefix=1)
    )
    assert ours.depth == 16
    old = with_own(projector_type="causal_v5", gru_hidden_dim=1024, shift_label=True)
    assert config_from_json(old | {"emb_dim": 256}) == ours
    unshifted = config_from_json(with_own(**DOMINO | {"shift_label": False}))
    assert unshifted == dataclasses.replace(ours, shift_labels=False)
    assert config_to_json(unshifted, "bfloat16")["dflash_config"]["shift_label"] is False
    written = config_to_json(ours, "bfloat16")["dflash_config"]
    assert written == QWEN3_8B["dflash_config"] | DOMINO | {"causal_head": False}


def test_spellings_that_are_around():
    causal = dataclasses.replace(DFLASH, causal=True)
    flat = QWEN3_8B | QWEN3_8B["dflash_config"]
    del flat["dflash_config"]
    assert config_from_json(flat) == DFLASH
    assert config_from_json(flat | {"causal_head": True}) == causal
    assert config_from_json(with_own(causal=True)) == causal
    assert config_from_json(with_own(target_hidden_size=4096)) == DFLASH
    newer = {k: v for k, v in QWEN3_8B.items() if not k.startswith("rope_")}
    newer["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e6}
    assert config_from_json(newer) == DFLASH
    bare = {k: v for k, v in QWEN3_8B.items() if "sliding" not in k and k != "layer_types"}
    assert config_from_json(bare) == DFLASH


@pytest.mark.parametrize("declared", [True, False])
def test_layers_listed_as_sliding_are_so(declared):
    kinds = ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"]
    data = QWEN3_8B | {"layer_types": kinds, "sliding_window": 2048, "use_sliding_window": declared}
    assert config_from_json(data).windows == (2048, None, 2048, None, 2048)


@pytest.mark.parametrize("kind", [*KINDS.values(), config(target_fingerprint="0f", taps=(1,))])
def test_configs_come_back(kind):
    text = json.dumps(config_to_json(kind, "float32"))
    assert config_from_json(json.loads(text)) == kind


def test_what_is_written_is_what_is_published():
    ours = config_to_json(dataclasses.replace(DFLASH, causal=True), "bfloat16")
    theirs = with_own(causal_head=True)
    for key in ("auto_map", "eos_token_id", "max_position_embeddings"):
        del theirs[key]
    assert ours == theirs


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": None}, "lacks an integer 'hidden_size'"),
        ({"block_size": None}, "needs an integer block_size, got None"),
        ({"block_size": True}, "needs an integer block_size, got True"),
        ({"num_target_layers": "36"}, "needs an integer num_target_layers, got '36'"),
        ({"dflash_config": [1]}, "dflash_config in config.json must be an object"),
        ({"dflash_config": {"mask_token_id": 1}}, "needs target_layer_ids"),
        ({"dflash_config": {"target_layer_ids": [1]}}, "needs an integer mask_token_id"),
        (with_own(target_layer_ids=[1, "9"]), "needs target_layer_ids"),
        (with_own(target_layer_ids=[1, 36]), r"taps must be target layers 0\.\.35, got 36"),
        (with_own(mask_token_id=151936), "mask id must be in the vocabulary"),
        (with_own(target_hidden_size=2048), "narrower or wider"),
        (with_own(causal_head="yes"), "must be true or false"),
        (with_own(use_swa=True), "use_swa in config.json is not supported"),
        (with_own(draft_shift=True), "draft_shift in config.json is not supported"),
        (with_own(projector_type="markov"), "projector_type 'markov' in config.json is not supp"),
        (with_own(**DOMINO | {"emb_dim": None}), "needs an integer emb_dim, got None"),
        (with_own(**DOMINO | {"gru_hidden_dim": 1.5}), "needs an integer gru_hidden_dim, got 1.5"),
        (with_own(**DOMINO | {"gru_hidden_dim": 0}), "the correction's gru_size must be in 1"),
        (with_own(shift_label=1), "shift_label in config.json must be true or false, got 1"),
        ({"model_type": "llama"}, "layers of type 'llama' are not supported"),
        ({"attention_bias": True}, "attention_bias is not supported"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope type 'yarn'"),
        ({"layer_types": ["full_attention"]}, "layer_types in config.json must list 5"),
        ({"layer_types": ["sliding_attention"] * 5}, "needs an integer sliding_window, got None"),
        ({"layer_types": None, "use_sliding_window": True}, "needs layer_types"),
        ({"draft_vocab_size": 1.5}, "needs an integer draft_vocab_size"),
        ({"target_fingerprint": 3}, "target_fingerprint in config.json must be text"),
        ({"rope_theta": ""}, "rope_theta in config.json must be a number, got ''"),
        ({"rope_theta": True}, "rope_theta in config.json must be a number, got True"),
        ({"rope_theta": "8"}, "rope_theta in config.json must be a number, got '8'"),
        ({"rope_theta": 0}, "rope_theta must be positive"),
        ({"rms_norm_eps": False}, "rms_norm_eps in config.json must be a number"),
        ({"num_hidden_layers": True}, "lacks an integer 'num_hidden_layers'"),
        ({"num_key_value_heads": 5}, "32 query heads cannot share 5"),
    ],
)
def test_configs_that_are_refused(changes, message):
    with pytest.raises(HeadError, match=message):
        config_from_json(QWEN3_8B | changes)


@pytest.mark.parametrize("name", ["causal", "narrow", "domino", "causal domino"])
def test_tensors_have_the_published_names_and_come_back(name):
    kind = KINDS[name]
    head, _ = head_and_target(kind)
    tensors = to_tensors(kind, head)
    more = 4 * ("domino" in name) + (kind.draft_vocab_size is not None)
    assert len(tensors) == 11 * kind.num_layers + 3 + more
    shapes = tensor_shapes(kind)
    assert {k: (x.shape, x.dtype) for k, x in tensors.items()} == {
        k: (x.shape, x.dtype) for k, x in shapes.items()
    }
    query, hidden = kind.num_heads * kind.head_dim, kind.hidden_size
    assert shapes["fc.weight"].shape == (hidden, len(kind.taps) * hidden)
    assert shapes["layers.0.self_attn.o_proj.weight"].shape == (hidden, query)
    assert shapes["layers.0.self_attn.k_norm.weight"].shape == (kind.head_dim,)
    assert shapes["layers.0.mlp.down_proj.weight"].shape == (hidden, kind.ffn_size)
    back = from_tensors(kind, tensors)
    head.pop("lm_head", None)
    jax.tree.map(np.testing.assert_array_equal, back, head)


def test_the_size_of_a_published_head():
    sizes = [np.prod(x.shape) for x in tensor_shapes(DFLASH).values()]
    assert (len(sizes), sum(sizes)) == (58, 1_048_626_432)
    shapes = tensor_shapes(config_from_json(with_own(**DOMINO)))
    more = {name: x.shape for name, x in shapes.items() if name not in tensor_shapes(DFLASH)}
    assert more == {
        "prefix_gru.weight_ih_l0": (3072, 4096),
        "prefix_gru.weight_hh_l0": (3072, 1024),
        "embed_proj.0.weight": (256, 5120),
        "embed_proj.2.weight": (151936, 256),
    }
