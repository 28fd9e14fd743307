import dataclasses
import functools
import json
import math

import jax
import numpy as np
import pytest

from jspec.models.config import (
    ModelConfig,
    RopeScaling,
    TargetError,
    from_gguf,
    from_hf,
    read_json,
    to_hf,
)

HF = {
    "model_type": "llama",
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
GGUF = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.context_length": 512,
    "llama.embedding_length": 32,
    "llama.feed_forward_length": 48,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": float(np.float32(1e-5)),
    "llama.rope.freq_base": 10000.0,
    "tokenizer.ggml.tokens": ["a"] * 61,
    "tokenizer.ggml.eos_token_id": 2,
}
EXPECTED = ModelConfig(
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
    max_positions=512,
    eos_ids=(2,),
)


def test_hub_and_gguf_say_the_same():
    assert from_hf(HF) == EXPECTED
    assert from_gguf(GGUF, tie_embeddings=False) == EXPECTED


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rope_theta": 5e5}, {"rope_theta": 5e5}),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, {"rope_theta": 5e5}),
        ({"rope_theta": 500000, "rope_scaling": None}, {"rope_theta": 5e5}),
        (
            {"rope_scaling": {"type": "linear", "factor": 2}},
            {"rope_scaling": RopeScaling("linear", 2.0)},
        ),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 2, "rope_theta": 1e6}},
            {"rope_scaling": RopeScaling("linear", 2.0), "rope_theta": 1e6},
        ),
        (
            {"rope_scaling": LLAMA3, "rope_theta": 5e5},
            {"rope_scaling": RopeScaling("llama3", 32.0, 1.0, 4.0, 8192), "rope_theta": 5e5},
        ),
        (
            {"rope_parameters": LLAMA3 | {"rope_theta": 5e5}},
            {"rope_scaling": RopeScaling("llama3", 32.0, 1.0, 4.0, 8192), "rope_theta": 5e5},
        ),
        ({"head_dim": 16}, {"head_dim": 16}),
        ({"head_dim": None}, {"head_dim": 8}),
        ({"num_key_value_heads": None}, {"num_kv_heads": 4}),
        ({"tie_word_embeddings": True}, {"tie_embeddings": True}),
        ({"eos_token_id": [2, 5]}, {"eos_ids": (2, 5)}),
        ({"eos_token_id": None}, {"eos_ids": ()}),
        ({"model_type": "qwen2", "use_sliding_window": False}, {"arch": "qwen2", "qkv_bias": True}),
        (
            {"model_type": "qwen2", "sliding_window": 4096, "layer_types": ["full_attention"] * 2},
            {"arch": "qwen2", "qkv_bias": True},
        ),
        ({"model_type": "qwen3"}, {"arch": "qwen3", "qk_norm": True, "head_dim": 128}),
    ],
)
def test_hub_keys(changes, expected):
    assert from_hf(HF | changes) == dataclasses.replace(EXPECTED, **expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gemma3_text"}, "'gemma3_text' is not supported .*llama, qwen2, qwen3"),
        ({"model_type": None}, "None is not supported"),
        ({"hidden_size": None}, "lacks an integer 'hidden_size'"),
        ({"hidden_act": "gelu"}, "activation 'gelu'"),
        ({"attention_bias": True}, "attention_bias is not supported for llama"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"rope_scaling": {"type": "yarn", "factor": 4}}, "rope type 'yarn'"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 4}}, "rope type 'dynamic'"),
        ({"rope_scaling": {"type": "linear"}}, "linear rope scaling needs 'factor'"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "differ between layers"),
        ({"partial_rotary_factor": 0.5}, "partial rotary"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial rotary"),
        ({"use_sliding_window": True}, "sliding-window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding-window"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq-quantised"),
        ({"num_key_value_heads": 3}, "4 query heads cannot share 3"),
        ({"head_dim": 7}, "head_dim must be even"),
        ({"head_dim": [1]}, "config.json cannot be understood"),
        ({"head_dim": -2}, "head_dim must be 1 or above, got -2"),
        ({"rope_parameters": 5}, "config.json cannot be understood"),
        ({"rms_norm_eps": None}, "rms_norm_eps in config.json must be a number, got None"),
        ({"rms_norm_eps": math.nan}, "norm_eps must be positive, got nan"),
        ({"rope_theta": "x"}, "rope_theta in config.json must be a number, got 'x'"),
        ({"max_position_embeddings": math.inf}, "config.json cannot be understood"),
        ({"quantization_config": "x"}, "config.json cannot be understood"),
        ({"layer_types": 5}, "config.json cannot be understood"),
        ({"num_attention_heads": 0}, "integer 'num_attention_heads' in 1..1048576"),
        ({"num_hidden_layers": 0}, "integer 'num_hidden_layers' in 1..1048576"),
        ({"num_hidden_layers": 10**30}, "integer 'num_hidden_layers' in 1..1048576"),
        ({"vocab_size": -1}, "integer 'vocab_size' in 1..1048576"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor .* must be positive, got 0"),
        ({"rope_scaling": LLAMA3 | {"high_freq_factor": 1}}, "low_freq_factor below"),
        ({"eos_token_id": "</s>"}, "end tokens must be integers, got '</s>'"),
        ({"eos_token_id": [[2]]}, "end tokens must be integers"),
    ],
)
def test_what_is_not_served_is_refused_in_one_line(changes, message):
    with pytest.raises(TargetError, match=message) as caught:
        from_hf(HF | changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("scaling", [None, {"type": "linear", "factor": 2.5}, LLAMA3])
@pytest.mark.parametrize("tied", [False, True])
def test_to_hf_is_read_back(arch, scaling, tied):
    config = from_hf(
        HF | {"model_type": arch, "rope_scaling": scaling, "tie_word_embeddings": tied}
    )
    assert from_hf(json.loads(json.dumps(to_hf(config)))) == config


def test_a_config_is_a_static_argument():
    @functools.partial(jax.jit, static_argnums=0)
    def head_dim(config):
        return config.head_dim

    linear = dataclasses.replace(EXPECTED, rope_scaling=RopeScaling("linear", 2.0))
    assert head_dim(EXPECTED) == head_dim(linear) == 8
    assert len({EXPECTED, linear, dataclasses.replace(EXPECTED)}) == 2


def llama3_divisors(factor, theta=5e5, head_dim=64, original=8192):
    """By wavelength, as the Llama 3 model cards define it."""
    divisors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * math.pi * theta ** (i / head_dim)
        smooth = (original / wavelength - 1) / (4 - 1)
        if wavelength < original / 4:
            divisors.append(1.0)
        elif wavelength > original / 1:
            divisors.append(factor)
        else:
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return divisors


def test_gguf_rope_scaling():
    wide = GGUF | {"llama.attention.key_length": 64, "llama.rope.freq_base": 5e5}
    config = from_gguf(wide, tie_embeddings=True, rope_divisors=llama3_divisors(32.0))
    assert config.rope_scaling == RopeScaling("llama3", 32.0, 1.0, 4.0, 8192)
    assert config.head_dim == 64 and config.tie_embeddings
    with pytest.raises(TargetError, match="rope_freqs"):
        from_gguf(wide, tie_embeddings=True, rope_divisors=llama3_divisors(32.0, original=4096))
    linear = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    config = from_gguf(GGUF | linear, tie_embeddings=True)
    assert config.rope_scaling == RopeScaling("linear", 4.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general.architecture": "gemma3"}, "'gemma3' is not supported .*llama, qwen2, qwen3"),
        ({"llama.block_count": None}, r"metadata lacks llama\.block_count"),
        ({"llama.rope.scaling.type": "yarn"}, "rope scaling 'yarn'"),
        ({"llama.rope.dimension_count": 4}, "partial rotary"),
        ({"llama.attention.value_length": 16}, "keys and values"),
        ({"llama.attention.head_count": [4, 4]}, "the GGUF metadata cannot be understood"),
        ({"llama.block_count": 0}, "num_layers must be 1 or above"),
    ],
)
def test_gguf_metadata_that_is_not_served(changes, message):
    with pytest.raises(TargetError, match=message):
        from_gguf(GGUF | changes, tie_embeddings=False)


def test_gguf_qwen3_and_several_end_tokens():
    fields = {key.replace("llama.", "qwen3."): value for key, value in GGUF.items()}
    fields |= {"general.architecture": "qwen3", "tokenizer.ggml.eot_token_id": 7}
    config = from_gguf(fields, tie_embeddings=True)
    assert config.arch == "qwen3" and config.qk_norm and not config.qkv_bias
    assert config.eos_ids == (2, 7)


def test_read_json(tmp_path):
    path = tmp_path / "config.json"
    assert read_json(path, {"a": 1}) == {"a": 1}
    with pytest.raises(TargetError, match=r"has no config\.json"):
        read_json(path)
    for content in ("{", "[]", "\xff", "[" * 100_000):
        path.write_text(content, encoding="latin-1")
        with pytest.raises(TargetError, match=r"config\.json"):
            read_json(path)


@pytest.mark.parity
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("scaling", ["default", "linear", "llama3"])
def test_configs_that_transformers_writes(arch, scaling, tmp_path):
    from transformers import AutoConfig

    rope = {"rope_type": scaling, "rope_theta": 5e5}
    rope |= {"linear": {"factor": 2.0}, "llama3": LLAMA3}.get(scaling, {})
    theirs = AutoConfig.for_model(arch, rope_parameters=rope, num_hidden_layers=3)
    theirs.save_pretrained(tmp_path)
    ours = from_hf(read_json(tmp_path / "config.json"))
    assert ours.arch == theirs.model_type
    assert ours.hidden_size == theirs.hidden_size
    assert ours.num_layers == 3
    assert ours.num_kv_heads == theirs.num_key_value_heads
    heads = theirs.num_attention_heads
    assert ours.head_dim == getattr(theirs, "head_dim", theirs.hidden_size // heads)
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
    assert (ours.rope_scaling.kind if ours.rope_scaling else "default") == scaling
    assert ours.tie_embeddings == theirs.tie_word_embeddings
    assert ours.max_positions == theirs.max_position_embeddings
