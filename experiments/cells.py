"""Results of experiments, one cell a line, so that a run that was stopped goes on where it was."""

import json
from pathlib import Path
from typing import Any


class Cells:
    """Finished cells in a file of JSON lines, by their keys; ``where`` they were made is written into each."""

    def __init__(self, path: Path, **where: Any):
        self._path, self._where = path, where
        self.rows = [json.loads(x) for x in path.read_text().splitlines()] if path.exists() else []

    def has(self, **keys: Any) -> bool:
        """Whether a cell with these values is there."""
        return any(keys.items() <= row.items() for row in self.rows)

    def find(self, **keys: Any) -> dict[str, Any] | None:
        """The cell with these values, if it is there."""
        return next((row for row in self.rows if keys.items() <= row.items()), None)

    def add(self, **row: Any) -> None:
        """Keeps a cell."""
        row = row | self._where
        self.rows.append(row)
        with self._path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps({k: v for k, v in row.items() if not isinstance(v, list)}), flush=True)
