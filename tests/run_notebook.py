"""Runs a notebook's cells in order in one namespace, as ``python tests/run_notebook.py FILE.ipynb``."""

import ast
import json
import sys
from pathlib import Path


def read_cells(path):
    """The notebook's cells: ``(kind, source)``."""
    cells = json.loads(Path(path).read_text(encoding="utf-8"))["cells"]
    return [(cell["cell_type"], "".join(cell["source"])) for cell in cells]


def run(path):
    scope = {"__name__": "__main__"}
    for number, (kind, source) in enumerate(read_cells(path)):
        if kind != "code":
            continue
        tree = ast.parse(source)
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, f"{path}:{number}", "exec"), scope)
        if last is not None:
            show(eval(compile(ast.Expression(last.value), f"{path}:{number}", "eval"), scope))


def show(value):
    """What a notebook shows of a cell's last expression."""
    rich = getattr(value, "_repr_html_", None)
    if value is not None:
        print((rich and rich()) or repr(value))


if __name__ == "__main__":
    run(sys.argv[1])
