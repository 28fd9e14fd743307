"""Text to token ids and back, and the chat template, as transformers' fast tokenizers do it.

Without transformers: its import takes seconds, and these two libraries are what it uses itself.
"""

import datetime
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from jaxtyping import Array, Int
from jinja2 import TemplateError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jspec.models.config import TargetError, as_ids, read_json

Message = dict[str, Any]  # {"role": "system" | "user" | "assistant", "content": text, ...}


class Tokenizer:
    """A target's tokenizer and chat template.

    Attributes:
      eos_ids: the tokens that end a generation: those of generation_config.json, else of
        config.json, else the tokenizer's own end token.
      vocab_size: one more than the largest token id (the model's may be padded beyond it).
      bos_id: the token that begins a text, where the tokenizer names one.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        chat_template: str | None = None,
        special_tokens: dict[str, str] | None = None,
        eos_ids: tuple[int, ...] = (),
    ):
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._chat_template = chat_template
        self._special_tokens = special_tokens or {}
        self._template = None
        self.eos_ids = eos_ids
        self.vocab_size = max(backend.get_vocab(with_added_tokens=True).values()) + 1
        self.bos_id = backend.token_to_id(self._special_tokens.get("bos_token", ""))

    @property
    def has_chat_template(self) -> bool:
        """Whether ``chat`` works."""
        return self._chat_template is not None

    @classmethod
    def from_dir(cls, folder: Path) -> "Tokenizer":
        """Reads tokenizer.json and, where they are there, the template and the special tokens.

        Raises:
          TargetError: no tokenizer.json in the folder, or a file that cannot be read.
        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise TargetError(f"{folder} has no tokenizer.json")
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise TargetError(f"{path} cannot be read: {error}") from None
        if not backend.get_vocab_size():
            raise TargetError(f"{path} has no tokens")
        config = read_json(folder / "tokenizer_config.json", {})
        special = {}
        for key, value in config.items():
            if re.fullmatch("(bos|eos|unk|sep|pad|cls|mask)_token", key) and value is not None:
                special[key] = value.get("content") if isinstance(value, dict) else value
        template = config.get("chat_template")
        if isinstance(template, list):
            named = (one for one in template if isinstance(one, dict))
            template = next((t.get("template") for t in named if t.get("name") == "default"), None)
        if (jinja := folder / "chat_template.jinja").is_file():
            try:
                template = jinja.read_text(encoding="utf-8")
            except (OSError, ValueError) as error:
                raise TargetError(f"{jinja} cannot be read: {error}") from None
        for key, value in {"chat_template": template or "", **special}.items():
            if not isinstance(value, str):
                raise TargetError(f"{key} in {folder}/tokenizer_config.json must be a text")
        own_eos = backend.token_to_id(special["eos_token"]) if "eos_token" in special else None
        eos_ids = (
            as_ids(read_json(folder / "generation_config.json", {}).get("eos_token_id"))
            or as_ids(read_json(folder / "config.json", {}).get("eos_token_id"))
            or as_ids(own_eos)
        )
        return cls(backend, template, special, eos_ids)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids of raw text, with the begin token where the model has one.

        Special tokens that are written out in the text become those tokens.

        Raises:
          ValueError: a text that UTF-8 cannot hold, or that the tokenizer has no tokens for.
        """
        text.encode()  # the library's own error is a TypeError about types
        try:
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except Exception as error:  # the library raises nothing narrower
            raise ValueError(f"the target's tokenizer refuses the text: {error}") from None

    def decode(
        self, ids: Sequence[int] | Int[Array | np.ndarray, " n"], skip_special: bool = True
    ) -> str:
        """The text of ids. Bytes that are not UTF-8 become U+FFFD, unknown ids nothing."""
        return self._backend.decode([int(i) for i in ids], skip_special_tokens=skip_special)

    def chat(
        self, messages: Sequence[Message], add_generation_prompt: bool = True, **kwargs: Any
    ) -> str:
        """The messages as the chat template writes them.

        Args:
          messages: {"role", "content"} each.
          add_generation_prompt: end with the opening of an assistant turn.
          **kwargs: further variables of the template, as ``enable_thinking=False``.

        Raises:
          ValueError: the target has no chat template, or the template refuses the messages.
        """
        if self._chat_template is None:
            raise ValueError("the target has no chat template: give it raw text")
        variables = {"tools": None, "documents": None, **self._special_tokens, **kwargs}
        try:
            if self._template is None:
                self._template = _environment().from_string(self._chat_template)
            return self._template.render(
                messages=list(messages), add_generation_prompt=add_generation_prompt, **variables
            )
        except Exception as error:  # a template is a program: it can fail in any way
            raise ValueError(f"the chat template fails: {error}") from None

    def encode_chat(self, messages: Sequence[Message], **kwargs: Any) -> list[int]:
        """The ids of ``chat(messages, **kwargs)``: the template writes special tokens itself."""
        return self.encode(self.chat(messages, **kwargs), add_special_tokens=False)

    def token_id(self, token: str) -> int:
        """The id of a token by its name.

        Raises:
          ValueError: there is none of that name.
        """
        found = self._backend.token_to_id(token)
        if found is None:
            raise ValueError(f"the target's tokenizer has no token {token!r}")
        return found

    def token_bytes(self) -> list[bytes]:
        """What each id adds to decoded text: UTF-8 bytes, which may end inside a character.

        Special tokens, and ids without a token, add ``b""``. (A SentencePiece decoder also drops
        one space at the very start of a text.)
        """
        added = self._backend.get_added_tokens_decoder()
        to_bytes = _byte_level if "ByteLevel" in repr(self._backend.decoder) else _sentencepiece
        table = [b""] * self.vocab_size
        for token, i in self._backend.get_vocab(with_added_tokens=True).items():
            if i not in added or not added[i].special:
                table[i] = to_bytes(token)
        return table


def _byte_level(token: str) -> bytes:
    if not _BYTE_OF.keys() >= set(token):
        return token.encode()
    return bytes(_BYTE_OF[char] for char in token)


def _sentencepiece(token: str) -> bytes:
    if byte := re.fullmatch("<0x([0-9A-F]{2})>", token):
        return bytes.fromhex(byte[1])
    return token.replace("▁", " ").encode()


def _byte_alphabet() -> dict[str, int]:
    """Byte-level BPE writes each byte as one visible character: itself, or one from 256 on."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(b): b for b in visible} | {chr(256 + i): b for i, b in enumerate(hidden)}


_BYTE_OF = _byte_alphabet()


class _Generation(Extension):
    """``{% generation %}``, which marks the assistant's part in some templates: no effect here."""

    tags = frozenset({"generation"})

    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    """What the hub's chat templates expect to find."""

    def raise_exception(message):
        raise TemplateError(message)

    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        # Jinja's own filter escapes HTML characters
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, LoopControlExtension]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment
