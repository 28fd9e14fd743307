"""``python -m jspec.cost`` and ``--smart on`` on a tiny target."""

import json
import re
import xml.etree.ElementTree as ElementTree

import matplotlib
import pytest
from rich.console import Console
from tiny_target import write_target

import jspec
from jspec import run
from jspec.cost import __main__ as command
from jspec.cost import profile as profiles
from jspec.cost import store
from jspec.cost.draw import draw_profiles, print_profile
from jspec.cost.options import parse
from jspec.cost.profile import read_profile


@pytest.fixture(scope="module")
def folder(tiny_model, tmp_path_factory):
    return write_target(tmp_path_factory.mktemp("tiny"), tiny_model)


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """Where profiles are kept."""
    monkeypatch.setattr(profiles, "cache_dir", lambda: tmp_path / "cache")
    for module in (run, command):
        monkeypatch.setattr(module, "keep_compilations", lambda: None)
    return tmp_path / "cache" / "cost"


@pytest.fixture
def measured(monkeypatch):
    """Settings that were measured; the times are made up: of a machine where rows cost nothing."""
    made = []

    def measure(plan, params, setting, **options):
        made.append(setting)
        rows = setting.buckets
        times = tuple(0.03 + 1e-4 * n for n in rows)
        return profiles.Profile(setting, rows, times, (0.01,) * len(rows), (1e-3,), 0.001)

    monkeypatch.setattr(store, "measure_profile", measure)
    return made


def test_it_measures_prints_draws_and_keeps(folder, kept, capsys, tmp_path):
    figure = tmp_path / "costs.svg"
    argv = ["--target", str(folder), "--budget", "2", "--seconds", "0", "--figure", str(figure)]
    assert command.main([*argv, "--capacity", "64"]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    [path] = kept.iterdir()
    profile = read_profile(path)
    assert profile.rows == (1, 2) and profile.setting.capacity == 64
    assert str(path) in said.out and "closed form: lambda" in said.out
    assert f"{1e3 * profile.verify[0]:.1f}" in said.out
    assert ElementTree.parse(figure).getroot().tag.endswith("svg")


def test_the_grid(folder, kept, measured, capsys, tmp_path):
    figure = tmp_path / "costs.png"
    argv = ["--target", str(folder), "--budget", "4", "--grid", "--figure", str(figure)]
    assert command.main(argv) == 0
    cells = [(setting.batch, setting.capacity) for setting in measured]
    assert cells == [(1, 200), (4, 200), (8, 200)]  # as far as the tiny target's context goes
    assert len(list(kept.iterdir())) == 3
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out.count("closed form: lambda") == 3


WRONG = {
    "--batch must be 1 or above": ["--batch", "0"],
    "--batch must be at most": ["--batch", "5000"],
    "--capacity must be 32 or above, got 3": ["--capacity", "3"],
    "--seconds must be in 0..3600": ["--seconds", "-1"],
    "--figure must end in .svg or .png, got a.pdf": ["--figure", "a.pdf"],
    "--estimate must be one of v4, v5e, v5p, v6e, tpu7x": ["--estimate", "v3"],
    "cannot write no/such/a.svg": ["--figure", "no/such/a.svg"],
    "no method 'best'": ["--method", "best"],
    "has nothing to choose with a budget of 1": ["--method", "ar"],
    "--batch: expected a whole number": ["--batch", "x"],
    "--target must not be empty": ["--target", ""],
}


@pytest.mark.parametrize("says", WRONG)
def test_a_user_s_error_is_one_line(folder, kept, says, capsys):
    argv = WRONG[says]
    argv = argv if "--target" in argv else ["--target", str(folder), *argv]
    assert command.main(argv) == 2
    said = capsys.readouterr()
    assert said.err.startswith("jspec: error: ") and says in said.err
    assert said.err.count("\n") == 1 and said.out == ""


def test_smart_on_the_command_line(folder, kept, measured, capsys, tmp_path):
    """It measures once, decodes the same tokens, and says that it is on."""
    argv = ["--target", str(folder), "--max-new-tokens", "24", "--method", "token_recycling"]
    argv += ["--prompt", "one two one two", "--budget", "4", "--json", str(tmp_path / "out.json")]
    reports = {}
    for smart in ("on", "on", "off"):
        assert run.main([*argv, "--smart", smart]) == 0
        said = capsys.readouterr()
        assert f"budget 4, smart {smart}" in said.out and said.err.startswith("jspec: compiling")
        reports[smart] = json.loads((tmp_path / "out.json").read_text())
        assert reports[smart]["smart"] == (smart == "on")
        assert reports[smart]["summary"]["identical_to_ar"] == "1/1"
    assert len(measured) == 1
    assert measured[0].method == "smart(token_recycling)" and measured[0].batch == 1
    on, off = (reports[x]["results"][0]["tokens"] for x in ("on", "off"))
    assert on == off


@pytest.mark.parametrize("argv", [["--method", "ar"], ["--budget", "1"]])
def test_smart_has_nothing_to_choose_with_one_row(folder, kept, argv, capsys):
    assert run.main(["--target", str(folder), "--smart", "on", *argv]) == 2
    assert "--smart on has nothing to choose" in capsys.readouterr().err


def test_smart_in_python(folder, kept, measured):
    target = jspec.load(folder)
    [plain] = jspec.generate_text(target, "one two one two", max_new_tokens=12)
    method = jspec.token_recycling(4)
    options = {"max_new_tokens": 12, "smart": True}
    [ours] = jspec.generate_text(target, "one two one two", method, **options)
    assert ours.text == plain.text
    assert [setting.budget for setting in measured] == [4]
    [same] = jspec.generate_text(target, "one two one two", jspec.ar(), **options)
    assert same.text == plain.text and len(measured) == 1
    with pytest.raises(ValueError, match="batch must be 1 or above"):
        jspec.generate_text(target, "one", method, batch=0, **options)


def test_an_estimate_says_so_wherever_it_is_shown(measured, tmp_path, capsys):
    setting = profiles.Setting(
        "tpu: v5e",
        "0.10",
        "t",
        None,
        "bfloat16",
        "auto",
        "m",
        "",
        4,
        3,
        "greedy",
        1,
        512,
        (1, 2, 4),
    )
    times = (0.001, 0.001, 0.002)
    one = profiles.Profile(setting, (1, 2, 4), times, (0.0,) * 3, (1e-4, 2e-4), 0.0, True)
    print_profile(one, Console(width=120))
    said = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert "estimated, not measured" in said and "a draft 0.10 to 0.20 ms" in said
    with matplotlib.rc_context({"svg.fonttype": "none"}):  # text as text
        draw_profiles([one], tmp_path / "a.svg")
    assert "(estimate)" in (tmp_path / "a.svg").read_text()


def test_an_estimate_is_shown_and_not_kept(folder, kept, capsys):
    argv = ["--target", str(folder), "--budget", "2", "--estimate", "v5e", "--capacity", "64"]
    assert command.main(argv) == 0
    said = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert "bfloat16, greedy; estimated, not measured on tpu: v5e" in said
    assert not kept.exists()


def test_options_of_a_run():
    options = parse(["--batch", "4", "--budget", "9", "--temperature", "0.5"])
    given = options.run_options()
    assert (given.batch, given.budget, given.temperature, given.smart) == (4, 9, 0.5, "on")
    assert options.cells == [(4, 256)]
    assert parse(["--grid"]).cells == [(b, c) for c in (512, 1024) for b in (1, 4, 8)]
