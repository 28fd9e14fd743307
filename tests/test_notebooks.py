"""The notebooks are clean, and run from top to bottom."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import run_notebook
from tiny_target import write_target

ROOT = Path(__file__).parents[1]
PATHS = {path.stem: path for path in sorted((ROOT / "colab").glob("*.ipynb"))}


def run(name, folder, **env):
    """What a notebook prints in a process and a folder of its own."""
    done = subprocess.run(
        [sys.executable, "-W", "error", ROOT / "tests" / "run_notebook.py", PATHS[name]],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return done.stdout


@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
def test_is_a_notebook_without_outputs(path):
    book = json.loads(path.read_text(encoding="utf-8"))
    assert (book["nbformat"], book["nbformat_minor"]) == (4, 5)
    assert book["metadata"]["kernelspec"]["name"] == "python3"
    names = [cell["id"] for cell in book["cells"]]
    assert len(set(names)) == len(names) and all(re.fullmatch(r"[\w-]{1,64}", x) for x in names)
    for cell in book["cells"]:
        assert all(isinstance(line, str) for line in cell["source"])
        assert all(line.endswith("\n") for line in cell["source"][:-1])
        wanted = {"cell_type", "id", "metadata", "source"}
        if cell["cell_type"] == "code":
            wanted |= {"execution_count", "outputs"}
            assert cell["outputs"] == [] and cell["execution_count"] is None
            ast.parse("".join(cell["source"]))  # no magics: it runs as plain Python too
        assert cell.keys() == wanted and cell["metadata"] == {}


def test_they_begin_alike():
    """The install cell, and the one that picks an accelerator."""
    first = [
        [text for kind, text in run_notebook.read_cells(p) if kind == "code"]
        for p in PATHS.values()
    ]
    assert list(PATHS) == ["quickstart", "train_a_head"]
    assert first[0][:2] == first[1][:2] and "pick_accelerator(ACCEL)" in first[0][1]


@pytest.mark.slow
def test_quickstart_runs(tmp_path):
    printed = run("quickstart", tmp_path)
    assert "2 of 2 texts are the same" in printed
    assert "✓" in printed and "<svg" in printed


@pytest.mark.slow
def test_train_a_head_runs(tiny_model, tmp_path):
    sizes = {"num_layers": 8, "max_positions": 512}  # layers enough for five taps
    target = write_target(tmp_path / "target", tiny_model, **sizes)
    small = {"JSPEC_TARGET": str(target), "JSPEC_MASK": "<s>", "JSPEC_SMALL": "1"}
    printed = run("train_a_head", tmp_path, **small)
    assert "'identical_to_ar': '2/2'" in printed
    before, after = map(float, re.findall(r"trained: acceptance length ([\d.]+) \(tree", printed))
    assert 1 <= before < after
    assert (tmp_path / "a_head" / "before_after.svg").read_text().count("<path") > 10
    rows = (tmp_path / "a_head" / "run" / "log.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows] == [20, 40, 60]
    run("train_a_head", tmp_path, **small)  # again: every stage finds its work done
