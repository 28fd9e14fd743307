"""The README's code runs, and its tables say what is so."""

import re
from pathlib import Path

import pytest
from tiny_target import write_target

import jspec
from jspec import job
from jspec.cost import profile
from jspec.options import Options

TEXT = Path("README.md").read_text(encoding="utf-8")


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)


def run_code(target, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    monkeypatch.setattr(jspec, "load", lambda name: {"smollm2-135m": target}[name])
    monkeypatch.setattr(profile, "cache_dir", lambda: folder)  # costs are not the user's own
    scope = {}
    for block in blocks("python"):
        exec(block, scope)
    printed = capsys.readouterr().out
    assert repr(scope["answers"][0].text) in printed
    (answer,) = jspec.generate_text(target, "Count from 1 to 20.", max_new_tokens=48)
    assert answer.text in printed and "✓" in printed


def test_the_code_runs_in_order(tiny_model, tmp_path, monkeypatch, capsys):
    target = jspec.load(write_target(tmp_path, tiny_model))
    run_code(target, tmp_path, monkeypatch, capsys)


@pytest.mark.slow
def test_the_code_runs_as_it_stands(smollm2, tmp_path, monkeypatch, capsys):
    run_code(smollm2, tmp_path, monkeypatch, capsys)


def test_there_are_two_set_up_commands():
    assert [block.strip() for block in blocks("sh")] == [
        "pip install -e . && python -m jspec.run",
        "pip install -e '.[test]' && pytest -n 2 --dist loadfile",
    ]


def test_the_composed_round_is_short():
    steps = next(block for block in blocks("python") if "def one_round" in block)
    body = steps[steps.index("@jax.jit") : steps.index("while not")]
    assert 8 <= len([line for line in body.splitlines() if line.strip()]) <= 15


def test_every_method_and_option_is_listed():
    there = re.findall(r"^\| `(\w+)` \|.*\| yes \|$", TEXT, re.MULTILINE)
    assert there == list(job.METHODS)
    for name in Options.__dataclass_fields__:
        flag = "--" + name.replace("_", "-")
        assert f"`{flag}" in TEXT or f"`--no-{name}`" in TEXT, flag
