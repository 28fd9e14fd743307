import itertools
import json
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from golden_io import GOLDEN
from golden_text import CHATS, STRINGS, TEMPLATE_VARIABLES, TEMPLATES
from hub import byte_tokenizer
from tokenizers import decoders, models

from jspec.models.config import TargetError
from jspec.models.tokenizer import Tokenizer

EXPECTED = json.loads((GOLDEN / "tokenizer.json").read_text())


@pytest.fixture(scope="module")
def smollm2_tokenizer(smollm2):
    return smollm2.tokenizer


def small_backend():
    """One token a byte, then three added tokens."""
    backend = byte_tokenizer(256)
    backend.add_special_tokens(["<s>", "</s>"])
    backend.add_tokens(["<think>"])
    return backend


def write_tokenizer(folder, **config):
    folder.mkdir(exist_ok=True)
    small_backend().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_ids_and_text_are_those_of_transformers(smollm2_tokenizer):
    for text, ids, decoded in zip(STRINGS, EXPECTED["ids"], EXPECTED["decoded"], strict=True):
        assert smollm2_tokenizer.encode(text) == ids, text
        assert smollm2_tokenizer.decode(ids) == decoded, text
        assert smollm2_tokenizer.decode(ids, skip_special=False) == text


def test_chats_are_those_of_transformers(smollm2_tokenizer):
    for (messages, generate), expected in zip(
        itertools.product(CHATS, (True, False)), EXPECTED["chats"], strict=True
    ):
        text = smollm2_tokenizer.chat(messages, add_generation_prompt=generate)
        assert text == expected["text"]
        ids = smollm2_tokenizer.encode_chat(messages, add_generation_prompt=generate)
        assert ids == expected["ids"]


def test_templates_render_as_in_transformers(smollm2_tokenizer):
    special = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    for (template, messages), expected in zip(
        itertools.product(TEMPLATES, CHATS), EXPECTED["templates"], strict=True
    ):
        tokenizer = Tokenizer(small_backend(), template, special)
        assert tokenizer.chat(messages, **TEMPLATE_VARIABLES) == expected


def test_token_bytes_join_to_the_decoded_text(smollm2_tokenizer):
    table = smollm2_tokenizer.token_bytes()
    assert len(table) == smollm2_tokenizer.vocab_size == 49152
    for text in STRINGS:
        ids = smollm2_tokenizer.encode(text)
        joined = b"".join(table[i] for i in ids).decode(errors="replace")
        assert joined == smollm2_tokenizer.decode(ids)
    assert table[:17] == [b""] * 17  # the special tokens
    assert all(table[17:])


def test_arrays_and_unknown_ids_are_decoded(smollm2_tokenizer):
    ids = smollm2_tokenizer.encode("ab 12")
    assert smollm2_tokenizer.decode(np.array(ids, np.int32)) == "ab 12"
    assert smollm2_tokenizer.decode(jnp.array(ids)) == "ab 12"
    assert smollm2_tokenizer.decode([*ids, 49152, 60000]) == "ab 12"  # of a padded vocabulary


def test_byte_level_tokens_cover_every_byte_once():
    tokenizer = Tokenizer(small_backend())
    table = tokenizer.token_bytes()
    assert sorted(table[:256]) == [bytes([byte]) for byte in range(256)]
    assert table[256:] == [b"", b"", b"<think>"]


def test_added_tokens_are_decoded_like_the_others():
    backend = small_backend()
    backend.add_tokens(["Ġx", "ðé", "日"])
    tokenizer = Tokenizer(backend)
    for token in ("Ġx", "ðé", "日"):
        i = backend.token_to_id(token)
        assert tokenizer.token_bytes()[i].decode(errors="replace") == tokenizer.decode([i])


def test_a_tokenizer_that_refuses_a_text():
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="<unk>"))
    with pytest.raises(ValueError, match="the target's tokenizer refuses the text"):
        Tokenizer(backend).encode("b")


def test_token_bytes_of_sentencepiece():
    vocab = {"<unk>": 0, "▁a": 1, "b▁▁": 2, "<0xE2>": 3, "<0x0A>": 4, "é": 5}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [], byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    backend.add_special_tokens(["<unk>"])
    table = Tokenizer(backend).token_bytes()
    assert table == [b"", b" a", b"b  ", b"\xe2", b"\n", "é".encode()]


def test_truncation_and_padding_of_the_file_are_not_applied(tmp_path):
    backend = small_backend()
    backend.enable_truncation(2)
    backend.enable_padding(length=9)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert len(Tokenizer.from_dir(tmp_path).encode("four")) == 4


def test_end_tokens_come_from_the_first_file_that_names_them(tmp_path):
    folder = write_tokenizer(tmp_path, eos_token={"content": "</s>", "special": True})
    assert Tokenizer.from_dir(folder).eos_ids == (257,)
    (folder / "config.json").write_text('{"eos_token_id": 7}')
    assert Tokenizer.from_dir(folder).eos_ids == (7,)
    (folder / "generation_config.json").write_text('{"eos_token_id": [8, 9]}')
    assert Tokenizer.from_dir(folder).eos_ids == (8, 9)


def test_where_the_template_comes_from(tmp_path):
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "list"}]
    folder = write_tokenizer(tmp_path, chat_template=named)
    assert Tokenizer.from_dir(folder).chat([]) == "list"
    folder = write_tokenizer(tmp_path, chat_template="{{ eos_token }}", eos_token="</s>")
    assert Tokenizer.from_dir(folder).chat([]) == "</s>"
    (folder / "chat_template.jinja").write_text("file")
    assert Tokenizer.from_dir(folder).chat([]) == "file"


def test_no_template_or_a_refusing_one_is_one_clear_line(tmp_path):
    tokenizer = Tokenizer.from_dir(write_tokenizer(tmp_path))
    with pytest.raises(ValueError, match=r"^the target has no chat template"):
        tokenizer.encode_chat(CHATS[0])
    with pytest.raises(ValueError, match=r"^the chat template fails: roles must alternate$"):
        Tokenizer(small_backend(), "{{ raise_exception('roles must alternate') }}").chat(CHATS[0])
    with pytest.raises(ValueError, match=r"^the chat template fails"):
        Tokenizer(small_backend(), "{% if %}").chat(CHATS[0])
    with pytest.raises(ValueError, match=r"^the chat template fails"):
        Tokenizer(small_backend(), "{{ messages.append(1) }}").chat(CHATS[0])  # sandboxed
    for template in ("{{ 1 / 0 }}", "{{ messages + 1 }}", "{{ raise_exception() }}"):
        with pytest.raises(ValueError, match=r"^the chat template fails"):
            Tokenizer(small_backend(), template).chat(CHATS[0])


@pytest.mark.parametrize(
    "config",
    [
        {"chat_template": 5},
        {"chat_template": [{"name": "default", "template": 5}]},
        {"bos_token": 5},
        {"eos_token": {}},
        {"eos_token": {"content": [1]}},
    ],
)
def test_settings_of_a_wrong_type(tmp_path, config):
    with pytest.raises(TargetError, match=rf"{next(iter(config))} in .* must be a text$"):
        Tokenizer.from_dir(write_tokenizer(tmp_path, **config))


def test_text_that_utf8_cannot_hold():
    with pytest.raises(ValueError, match="surrogates not allowed"):
        Tokenizer(small_backend()).encode("half a \ud83d")


def test_unreadable_files_are_one_clear_line(tmp_path):
    with pytest.raises(TargetError, match=r"has no tokenizer\.json$"):
        Tokenizer.from_dir(tmp_path)
    folder = write_tokenizer(tmp_path)
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(TargetError, match=r"chat_template\.jinja cannot be read"):
        Tokenizer.from_dir(folder)
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(TargetError, match=r"tokenizer_config\.json cannot be read"):
        Tokenizer.from_dir(folder)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(TargetError, match=r"tokenizer\.json cannot be read"):
        Tokenizer.from_dir(folder)


def test_loading_needs_neither_transformers_nor_torch():
    code = (
        "import sys, jspec.models.load; print({'transformers', 'torch', 'gguf'} & set(sys.modules))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "set()"


@pytest.mark.parity
@pytest.mark.filterwarnings("ignore")
def test_golden_is_what_transformers_says_now():
    pytest.importorskip("torch")
    import make_golden

    assert make_golden.run_tokenizer(make_golden.smollm2_folder()) == EXPECTED
