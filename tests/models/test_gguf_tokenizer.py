"""Tokenizers built from GGUF metadata, against slow ones that follow the algorithm's definition."""

import itertools
import json
import random

import pytest
import regex
from golden_text import STRINGS

from jspec.models.config import TargetError
from jspec.models.gguf_tokenizer import tokenizer_files
from jspec.models.tokenizer import _BYTE_OF, Tokenizer

DAMAGED = {"tokens": ["a", "b"], "model": "gpt2", "pre": "smollm", "merges": []}
CHAR_OF = {byte: char for char, byte in _BYTE_OF.items()}
GPT2_WORDS = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def build(tmp_path, **fields):
    """The tokenizer of some ``tokenizer.ggml`` metadata."""
    fields = {f"tokenizer.ggml.{key}": value for key, value in fields.items()}
    for name, content in tokenizer_files(fields).items():
        (tmp_path / name).write_text(content, encoding="utf-8")
    return Tokenizer.from_dir(tmp_path)


def merge(symbols, cost):
    """Merges the neighbours of least cost (the first of equals) until no pair has one."""
    symbols = list(symbols)
    while pairs := [
        (cost(left, right), i)
        for i, (left, right) in enumerate(itertools.pairwise(symbols))
        if cost(left, right) is not None
    ]:
        _, i = min(pairs)
        symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]
    return symbols


def test_smollm2_is_digits_one_by_one_then_gpt2_words_then_merges(smollm2):
    built = json.loads(smollm2.tokenizer._backend.to_str())
    vocab = built["model"]["vocab"]
    ranks = {tuple(pair): i for i, pair in enumerate(built["model"]["merges"])}
    special = {token["content"] for token in built["added_tokens"]}
    for text in STRINGS:
        ids = []
        for part in regex.split(f"({'|'.join(map(regex.escape, special))})", text):
            pieces = [] if part in special else regex.split(r"(\p{N})", part)
            ids += [vocab[part]] if part in special else []
            for word in (word for piece in pieces for word in regex.findall(GPT2_WORDS, piece)):
                chars = [CHAR_OF[byte] for byte in word.encode()]
                ids += [vocab[t] for t in merge(chars, lambda *pair: ranks.get(pair))]
        assert smollm2.tokenizer.encode(text) == ids, text


BYTES = sorted(_BYTE_OF)


@pytest.mark.parametrize(
    ("rule", "text", "words"),
    [
        ("gpt-2", "I'LL pay 1234\n\n x", ["I", "'", "LL", "Ġpay", "Ġ1234", "ĊĊ", "Ġx"]),
        ("smollm", "pay 12x3", ["pay", "Ġ", "1", "2", "x", "3"]),
        ("qwen2", "I'LL pay 12\n\n (x", ["I", "'LL", "Ġpay", "Ġ", "1", "2", "ĊĊ", "Ġ(", "x"]),
        ("llama-bpe", "pay 12345?\n", ["pay", "Ġ", "123", "45", "?Ċ"]),
    ],
)
def test_rules_cut_words_as_published(tmp_path, rule, text, words):
    tokenizer = build(tmp_path, model="gpt2", pre=rule, tokens=BYTES, merges=[])
    cut = tokenizer._backend.pre_tokenizer.pre_tokenize_str(text)
    assert [word for word, _ in cut] == words
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_qwen2_text_is_composed_first(tmp_path):
    tokenizer = build(tmp_path, model="gpt2", pre="qwen2", tokens=BYTES, merges=[])
    assert tokenizer.decode(tokenizer.encode("e\u0301")) == "\u00e9"


def test_begin_token_where_the_model_has_one(tmp_path):
    fields = {"model": "gpt2", "tokens": ["<s>", "a"], "token_type": [3, 1], "merges": []}
    fields |= {"bos_token_id": 0, "eos_token_id": 0}
    assert build(tmp_path, pre="gpt-2", **fields).encode("a") == [1]
    assert build(tmp_path, pre="llama-bpe", **fields).encode("a") == [0, 1]
    assert build(tmp_path, pre="llama-bpe", add_bos_token=False, **fields).encode("a") == [1]
    with_begin = build(tmp_path, pre="gpt-2", add_bos_token=True, **fields)
    assert with_begin.encode("a") == [0, 1]
    assert with_begin.encode("a", add_special_tokens=False) == [1]


@pytest.mark.parametrize("seed", range(5))
def test_sentencepiece_merges_the_best_scored_neighbours(tmp_path, seed):
    rng = random.Random(seed)
    letters = "▁abc"
    pieces = set(letters)
    while len(pieces) < 60:  # each piece is made of two others, as training makes them
        pieces.add(rng.choice(sorted(pieces)) + rng.choice(sorted(pieces)))
    tokens = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), *sorted(pieces)]
    scores = [0.0] * 258 + rng.sample(range(-1000, 0), len(pieces))
    tokenizer = build(
        tmp_path,
        model="llama",
        tokens=tokens,
        scores=scores,
        token_type=[2, 3] + [6] * 256 + [1] * len(pieces),
        bos_token_id=1,
        unknown_token_id=0,
    )
    score = dict(zip(tokens, scores))

    def cost(left, right):
        return -score[left + right] if left + right in pieces else None

    table = tokenizer.token_bytes()
    for _ in range(200):
        text = "".join(rng.choices("abc é🙂", weights=[5, 5, 5, 3, 1, 1], k=rng.randrange(1, 30)))
        ids = [1]
        for symbol in merge(f"▁{text}".replace(" ", "▁"), cost):
            spelled = [f"<0x{byte:02X}>" for byte in symbol.encode()]
            ids += [tokens.index(t) for t in ([symbol] if symbol in pieces else spelled)]
        assert tokenizer.encode(text) == ids, text
        assert tokenizer.decode(ids) == text
        assert b"".join(table[i] for i in ids).decode() == " " + text


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "has no tokenizer"),
        ({"tokens": ["a"], "model": "t5"}, "'t5' is not supported .*gpt2, llama"),
        ({"tokens": ["a"], "model": "gpt2", "pre": "tekken"}, "rule 'tekken' .*smollm, qwen2"),
        (DAMAGED | {"tokens": "ab"}, "not a list of texts"),
        (DAMAGED | {"tokens": [1, 2]}, "not a list of texts"),
        (DAMAGED | {"tokens": ["a", "a"]}, "names a token twice"),
        (DAMAGED | {"merges": ["a c"]}, "tokenizer in the GGUF file is damaged"),
        (DAMAGED | {"merges": ["a"]}, "tokenizer in the GGUF file is damaged"),
        (DAMAGED | {"bos_token_id": 9}, "tokenizer in the GGUF file is damaged"),
        (DAMAGED | {"token_type": 3}, "tokenizer in the GGUF file is damaged"),
        ({"tokens": ["a", "b"], "model": "llama"}, "tokenizer in the GGUF file is damaged"),
        (
            {"tokens": ["a", "b"], "model": "llama", "scores": [1.0]},
            "tokenizer in the GGUF file is damaged",
        ),
    ],
)
def test_tokenizers_that_are_not_supported(tmp_path, fields, message):
    with pytest.raises(TargetError, match=message):
        build(tmp_path, **fields)


@pytest.mark.parity
def test_the_qwen2_rule_is_that_of_transformers():
    from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

    from jspec.models.gguf_tokenizer import _REGEX

    assert _REGEX["qwen2"] == PRETOKENIZE_REGEX
