import gguf
import jax
import numpy as np
import pytest
from golden_text import CHATS
from hub import tensors

from jspec.models import gguf as gguf_module
from jspec.models.config import RopeScaling, TargetError
from jspec.models.load import load_target, locate, read_params

TO_GGUF = {hub: name for name, hub in (gguf_module._TOP | gguf_module._LAYER).items()}
CHAT_TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


def gguf_name(name):
    if not name.startswith("model.layers."):
        return TO_GGUF[name]
    block, rest = name.removeprefix("model.layers.").split(".", 1)
    return f"blk.{block}.{TO_GGUF[rest]}"


def permute(rows, heads):
    """As llama.cpp stores q and k: each head's rows as pairs, one from either half."""
    half = rows.shape[0] // heads // 2
    order = [
        h * 2 * half + side * half + i for h in range(heads) for i in range(half) for side in (0, 1)
    ]
    return rows[order]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("JSPEC_CACHE", str(tmp_path / "cache"))


def write_gguf(path, config, weights, store=None, architecture=None, tensors=()):
    """A GGUF file of a config and its hub-named weights, with a tokenizer of 61 tokens."""
    writer = gguf.GGUFWriter(path, architecture or config.arch)
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_positions)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.ffn_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    if config.rope_scaling:
        writer.add_rope_scaling_type(gguf.RopeScalingType(config.rope_scaling.kind))
        writer.add_rope_scaling_factor(config.rope_scaling.factor)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123"
    writer.add_token_list(["<s>", "</s>", *letters, "ab", "abc", "<tool>"])
    writer.add_token_types([3, 3] + [1] * 58 + [4])
    writer.add_token_merges(["a b", "ab c"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template(CHAT_TEMPLATE)
    for name, array in weights.items():
        if config.arch == "llama" and "q_proj" in name:
            array = permute(array, config.num_heads)
        if config.arch == "llama" and "k_proj" in name:
            array = permute(array, config.num_kv_heads)
        kind = store if store and array.ndim == 2 else None
        data = gguf.quants.quantize(array, kind) if kind else array
        writer.add_tensor(gguf_name(name), data, raw_dtype=kind)
    for name, array in dict(tensors).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_weights_come_back_exactly(tiny_model, tmp_path, arch, tied):
    scaling = RopeScaling("linear", 2.5)
    config, params = tiny_model(arch, tie_embeddings=tied, rope_scaling=scaling, eos_ids=(1,))
    path = write_gguf(tmp_path / "tiny.gguf", config, tensors(config, params))
    target = load_target(path)
    assert target.config == config
    jax.tree.map(np.testing.assert_array_equal, read_params(locate(str(path)), config)[0], params)


def test_the_tokenizer_and_template_come_along(tiny_model, tmp_path):
    config, params = tiny_model()
    tokenizer = load_target(
        write_gguf(tmp_path / "t.gguf", config, tensors(config, params))
    ).tokenizer
    assert tokenizer.encode("abca<tool>b</s>") == [59, 2, 60, 3, 1]
    assert tokenizer.decode([59, 2, 60, 3, 1]) == "abca<tool>b"
    assert tokenizer.chat(CHATS[0]) == "What is 2 + 2?"
    assert tokenizer.eos_ids == (1,)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_1"])
def test_stored_types_are_dequantised_exactly(tiny_model, tmp_path, kind):
    config, params = tiny_model("qwen3", ffn_size=64)
    weights = tensors(config, params)
    store = gguf.GGMLQuantizationType[kind]
    path = write_gguf(tmp_path / "tiny.gguf", config, weights, store)
    stored, _ = read_params(locate(str(path)), config)
    for name, array in tensors(config, stored).items():
        expected = weights[name]
        if expected.ndim == 2:
            expected = gguf.dequantize(gguf.quants.quantize(expected, store), store)
        np.testing.assert_array_equal(array, expected)


def test_llama3_scaling_is_read_from_its_tensor(tiny_model, tmp_path):
    config, params = tiny_model(head_dim=8, rope_theta=5e5)
    weights = tensors(config, params)
    # with theta 5e5 and head_dim 8 the four wavelengths are 6, 167, 4443 and 118,143 tokens
    turns = 8192 / (2 * np.pi * 5e5 ** (np.arange(4) / 4))
    kept = np.clip((turns - 1) / 3, 0, 1)
    divisors = {"rope_freqs.weight": (1 / (kept + (1 - kept) / 8)).astype(np.float32)}
    target = load_target(write_gguf(tmp_path / "tiny.gguf", config, weights, tensors=divisors))
    assert target.config.rope_scaling == RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)


def test_a_file_is_converted_once(tiny_model, tmp_path, monkeypatch):
    config, params = tiny_model()
    path = write_gguf(tmp_path / "tiny.gguf", config, tensors(config, params))
    first = load_target(path)
    monkeypatch.setattr(gguf_module, "convert", None)
    again = load_target(path.rename(tmp_path / "renamed.gguf"))
    assert again.fingerprint == first.fingerprint
    (folder,) = (tmp_path / "cache" / "targets").glob("[!.]*")
    assert {f.name for f in folder.iterdir()} == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }


class TestBadFiles:
    """Each one is a clear line, and nothing is left in the cache."""

    @pytest.fixture
    def model(self, tiny_model):
        config, params = tiny_model()
        return config, tensors(config, params)

    @pytest.fixture(autouse=True)
    def nothing_is_kept(self, tmp_path):
        yield
        left = [f for f in (tmp_path / "cache").rglob("*") if f.suffix != ".lock" and f.is_file()]
        assert not left

    def refuse(self, path, message):
        with pytest.raises(TargetError, match=message) as caught:
            load_target(path)
        assert "\n" not in str(caught.value)

    def test_an_unsupported_architecture(self, model, tmp_path):
        path = write_gguf(tmp_path / "g.gguf", *model, architecture="gemma3")
        self.refuse(path, r"'gemma3' is not supported \(supported: llama, qwen2, qwen3\)")

    @pytest.mark.parametrize("keep", [0, 3, 30, 1000, -500])
    def test_a_truncated_file(self, model, tmp_path, keep):
        path = write_gguf(tmp_path / "t.gguf", *model)
        path.write_bytes(path.read_bytes()[:keep])
        self.refuse(path, "is not a whole GGUF file")

    def test_not_a_gguf_file(self, tmp_path):
        path = tmp_path / "text.gguf"
        path.write_text("Once upon a time, there was a file of another kind. " * 9)
        self.refuse(path, "is not a whole GGUF file")

    def test_an_unknown_tensor(self, model, tmp_path):
        extra = {"blk.0.ffn_gate_exps.weight": np.ones((4, 4), np.float32)}
        path = write_gguf(tmp_path / "x.gguf", *model, tensors=extra)
        self.refuse(path, r"tensor that jspec does not know: blk\.0\.ffn_gate_exps\.weight")

    def test_an_unknown_tokenizer(self, model, tmp_path, monkeypatch):
        monkeypatch.setattr(gguf.GGUFWriter, "add_tokenizer_pre", lambda self, name: None)
        monkeypatch.setattr(gguf.GGUFWriter, "add_tokenizer_model", lambda self, name: None)
        self.refuse(write_gguf(tmp_path / "x.gguf", *model), "tokenizer None is not supported")
