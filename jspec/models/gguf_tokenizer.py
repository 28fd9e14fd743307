"""The hub's tokenizer files from the vocabulary, merges or scores that a GGUF file carries."""

import json
from collections.abc import Mapping
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from jspec.models.config import TargetError

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4  # GGUF token types

# How text is cut into words before byte-level BPE, by the name GGUF gives the rule; published as
# part of each model. {digits} is where Qwen 2 and Llama 3 differ.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_REGEX = {"qwen2": _WORDS.format(digits=""), "llama-bpe": _WORDS.format(digits="{1,3}")}
_BYTE_LEVEL = ("gpt-2", "smollm", *_REGEX)


def tokenizer_files(fields: Mapping[str, Any]) -> dict[str, str]:
    """``tokenizer.json`` and ``tokenizer_config.json`` as text, by file name.

    Args:
      fields: GGUF metadata key to plain Python value.

    Raises:
      TargetError: the metadata has no tokenizer, or one of a kind that is not supported.
    """
    info = {key.removeprefix("tokenizer.ggml."): value for key, value in fields.items()}
    tokens = info.get("tokens")
    if not tokens:
        raise TargetError("the GGUF file has no tokenizer")
    if not (isinstance(tokens, list) and all(isinstance(t, str) for t in tokens)):
        raise TargetError("the tokens in the GGUF file are not a list of texts")
    if len(set(tokens)) < len(tokens):  # the library would not return from it
        raise TargetError("the GGUF file names a token twice")
    try:
        return _files(info, tokens)
    except TargetError:
        raise
    except Exception as error:  # whatever is wrong with merges, scores, types or ids
        raise TargetError(f"the tokenizer in the GGUF file is damaged: {error!r}") from None


def _files(info: Mapping[str, Any], tokens: list[str]) -> dict[str, str]:
    types = info.get("token_type") or [_NORMAL] * len(tokens)
    model = info.get("model")
    if model == "gpt2":
        tokenizer = _byte_level(info, tokens)
    elif model == "llama":
        tokenizer = _sentencepiece(info, tokens, types)
    else:
        raise TargetError(f"tokenizer {model!r} is not supported (supported: gpt2, llama)")
    special = (_CONTROL, _UNKNOWN) if model == "llama" else (_CONTROL,)
    for token, kind in zip(tokens, types):
        if kind in special:
            tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif kind == _USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, special=False, normalized=False)])
    bos = _named(info, "bos")
    by_default = model == "llama" or info.get("pre") == "llama-bpe"
    if bos and info.get("add_bos_token", by_default):
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A",
            pair=f"{bos} $A {bos} $B",
            special_tokens=[(bos, info["bos_token_id"])],
        )
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "bos_token": bos,
        "eos_token": _named(info, "eos"),
        "unk_token": _named(info, "unknown"),
        "pad_token": _named(info, "padding"),
        "chat_template": info.get("tokenizer.chat_template"),
    }
    config = {key: value for key, value in config.items() if value is not None}
    return {
        "tokenizer.json": tokenizer.to_str(),
        "tokenizer_config.json": json.dumps(config, indent=2, ensure_ascii=False),
    }


def _named(info, role):
    token = info.get(f"{role}_token_id")
    return None if token is None else info["tokens"][token]


def _byte_level(info, tokens):
    rule = info.get("pre", "gpt-2")
    if rule not in _BYTE_LEVEL:
        raise TargetError(
            f"tokenizer rule {rule!r} is not supported (supported: {', '.join(_BYTE_LEVEL)})"
        )
    merges = [tuple(merge.split(" ")) for merge in info.get("merges", ())]
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab, merges, ignore_merges=rule == "llama-bpe"))
    if rule == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    steps = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=rule not in _REGEX)]
    if rule in _REGEX:
        steps.insert(0, pre_tokenizers.Split(Regex(_REGEX[rule]), "isolated"))
    elif rule == "smollm":
        steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(info, tokens, types):
    """Pieces with scores as BPE with merges: pairs that make better-scored pieces come first."""
    if len(info["scores"]) != len(tokens):
        raise ValueError(f"{len(info['scores'])} scores for {len(tokens)} tokens")
    vocab = {token: i for i, token in enumerate(tokens)}
    known = {token for token, kind in zip(tokens, types) if kind == _NORMAL}
    merges = [
        (-info["scores"][vocab[piece]], piece[:cut], piece[cut:])
        for piece in known
        for cut in range(1, len(piece))
        if piece[:cut] in known and piece[cut:] in known
    ]
    tokenizer = Tokenizer(
        models.BPE(
            vocab,
            [(left, right) for _, left, right in sorted(merges)],
            unk_token=_named(info, "unknown"),
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    steps = [normalizers.Replace(" ", "▁")]
    pieces = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if info.get("add_space_prefix", True):
        steps.insert(0, normalizers.Prepend("▁"))
        pieces.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.decoder = decoders.Sequence(pieces)
    return tokenizer
