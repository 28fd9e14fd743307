"""The log of a run: ``log.jsonl``, a JSON object a line, one for each evaluation."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jspec.files import put

_NAME = "log.jsonl"


def read_log(folder: Path) -> list[dict[str, Any]]:
    """The rows of a run, oldest first; a line that a kill has cut short is left out.

    Raises:
      ValueError: the log cannot be read.
    """
    path, rows = folder / _NAME, []
    if not path.exists():
        return rows
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            rows.append(row)
    return rows


def forget_after(folder: Path, step: int) -> None:
    """Leaves out the rows of later steps, which come again, and lines cut short."""
    kept = [json.dumps(row) + "\n" for row in read_log(folder) if row["step"] <= step]
    put(folder / _NAME, lambda file: file.write("".join(kept).encode()))


def add_row(folder: Path, row: Mapping[str, Any]) -> None:
    """Adds a row."""
    with (folder / _NAME).open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
