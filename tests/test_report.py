import io
import json
import os

import numpy as np
import pytest
from rich.console import Console

from jspec import report
from jspec.driver import Finished
from jspec.exactness import Difference

ONE = Finished(
    index=0,
    prompt_tokens=5,
    tokens=[1, 2, 3],
    rounds=2,
    emitted=4,
    verified=6,
    by_depth=[2, 1, 1],
    by_rank=[1, 1],
    by_source=[0, 2],
    trace=[3, 1],
    seconds=0.5,
)
TWO = Finished(
    index=1,
    prompt_tokens=1,
    tokens=[4] * 6,
    rounds=6,
    emitted=6,
    verified=6,
    by_depth=[6, 0, 0],
    by_rank=[0, 0],
    by_source=[0, 0],
    trace=[1] * 6,
    seconds=1.5,
)


def test_metrics_are_pooled_over_prompts():
    both = [ONE, TWO]
    assert report.acceptance_length(both) == 10 / 8
    assert report.accepted_by_depth(both) == [1.0, 1 / 8, 1 / 8]
    assert sum(report.accepted_by_depth(both)) == report.acceptance_length(both)
    assert report.accepted_by_rank(both) == [0.5, 0.5]
    assert report.accepted_by_source(both) == {"head": 0.0, "retrieved": 1.0}


def test_metrics_of_nothing_are_zero():
    assert report.acceptance_length([]) == 0.0
    assert report.accepted_by_depth([]) == []
    assert report.accepted_by_source([TWO]) == {"head": 0.0, "retrieved": 0.0}


@pytest.mark.parametrize(
    ("difference", "compared", "same", "where"),
    [
        (None, True, True, None),
        (None, False, None, None),
        (Difference(4, 0.25), True, False, {"position": 4, "gap": 0.25, "excused": False}),
        (Difference(4, 1e-4), True, False, {"position": 4, "gap": 1e-4, "excused": True}),
        (Difference(4, float("inf")), True, False, {"position": 4, "gap": None, "excused": False}),
    ],
)
def test_a_prompts_result(difference, compared, same, where):
    result = report.summarize_prompt("a", "text", ONE, difference, compared)
    assert result == {
        "id": "a",
        "prompt_tokens": 5,
        "tokens": [1, 2, 3],
        "text": "text",
        "rounds": 2,
        "acceptance_length": 2.0,
        "seconds": 0.5,
        "identical_to_ar": same,
        "first_difference": where,
    }


def test_json_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "out.json"
    report.write_json(path, {"a": "ä\u2028", "b": [1.5, None]})
    assert json.loads(path.read_text(encoding="utf-8")) == {"a": "ä\u2028", "b": [1.5, None]}
    before = path.read_bytes()
    with pytest.raises(ValueError):
        report.write_json(path, {"a": float("nan")})
    assert path.read_bytes() == before
    link = tmp_path / "link.json"
    link.symlink_to(path)
    report.write_json(link, {})
    assert link.is_symlink() and json.loads(path.read_text()) == {}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link.json", "out.json"]
    report.write_json(report.Path(os.devnull), {})
    assert not os.path.isfile(os.devnull)


def test_paths_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("kept")
    report.check_writable(tmp_path / "new.json")
    report.check_writable(tmp_path / "file")
    report.check_writable(report.Path(os.devnull))
    assert (tmp_path / "file").read_text() == "kept"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
    for wrong in (tmp_path, tmp_path / "no" / "out.json", tmp_path / "file" / "out.json"):
        with pytest.raises(ValueError, match=f"cannot write {wrong}: "):
            report.check_writable(wrong)


def test_odd_paths(tmp_path):
    longest = tmp_path / ("x" * 255)
    report.check_writable(longest)
    report.write_json(longest, {})
    assert longest.read_text() == "{}\n"
    circle = tmp_path / "circle"
    circle.symlink_to(circle)
    for wrong in (circle, tmp_path / ("x" * 256)):
        with pytest.raises(ValueError, match=f"cannot write {wrong}: "):
            report.check_writable(wrong)
        with pytest.raises(OSError, match=f"cannot write {wrong}: "):
            report.write_json(wrong, {})
    os.mkfifo(tmp_path / "pipe")
    report.check_writable(tmp_path / "pipe")  # without a reader


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_a_full_device():
    report.check_writable(report.Path("/dev/full"))
    with pytest.raises(OSError, match="cannot write /dev/full: No space left on device"):
        report.write_json(report.Path("/dev/full"), {})


def small_report(**summary):
    return {
        "target": "[bold]x[/]",
        "method": "prompt_lookup",
        "head": None,
        "budget": 4,
        "smart": True,
        "graft": False,
        "accel": "cpu",
        "device": "abacus, 2 cores",
        "dtype": "fp32",
        "temperature": 0.8,
        "batch": 1,
        "results": [
            report.summarize_prompt("[a]", "", ONE, None, True),
            report.summarize_prompt("b", "", TWO, Difference(3, 0.001), True),
            report.summarize_prompt("c", "", TWO, None, False),
        ],
        "summary": {
            "acceptance_length": 1.25,
            "accepted_by_depth": [1.0, 0.5, 0.25],
            "bucket_histogram": {"1": 5, "2": 0, "4": 3},
            "tokens_per_second": 30.0,
            "ar_tokens_per_second": 20.0,
            "speedup": 1.5,
            "identical_to_ar": "1/2",
            "excused": 1,
            "compile_seconds": 2.0,
            "prefill_seconds": 0.5,
            "step_seconds": None,
        }
        | summary,
    }


def printed(content):
    out = io.StringIO()
    report.print_report(content, Console(file=out, width=120))
    return out.getvalue()


def test_the_tables_say_what_the_report_says():
    text = printed(small_report())
    for part in (
        "[a]",
        "same",
        "differ at 3, gap 1.0e-03",
        "[bold]x[/], fp32, temperature 0.8, batch 1",
        "cpu: abacus, 2 cores",
        "prompt_lookup, budget 4, smart on",
        "1.25 tokens a round",
        "0.50 0.25",
        "5 of 1, 3 of 4",
        "30.0 tokens/s, 1.50x autoregressive decoding (20.0 tokens/s)",
        "1/2 (1 more but for near-ties)",
        "compile and warm up 2.0 s, prefill 0.5 s",
    ):
        assert part in text, part
    assert "steps of a round" not in text


def test_the_tables_without_a_baseline_and_with_steps():
    none = dict.fromkeys(("ar_tokens_per_second", "speedup", "identical_to_ar", "excused"))
    steps = {"propose": 1.0, "verify": 2.0, "accept_commit": 0.5, "absorb_observe": 0.5}
    text = printed(small_report(**none, step_seconds=steps))
    assert "autoregressive" not in text and "identical" not in text
    assert "propose 25.0 %, verify 50.0 %, accept_commit 12.5 %, absorb_observe 12.5 %" in text


def test_markdown_tables():
    text = report.markdown_table(["bench", "tau"], [["gsm8k", 1.234], ["math", 2]])
    assert text == "| bench | tau |\n| :-- | --: |\n| gsm8k | 1.23 |\n| math | 2 |\n"


def test_the_bootstrap_interval_covers():
    rng = np.random.default_rng(1)
    hits = 0
    for trial in range(100):
        rounds = rng.integers(20, 60, 40)
        tokens = rng.poisson(2.0 * rounds)
        low, high = report.ratio_interval(tokens, rounds, samples=400, seed=trial)
        assert low < tokens.sum() / rounds.sum() < high
        hits += low <= 2.0 <= high
    assert 85 <= hits <= 100
    assert report.ratio_interval([3.0], [2.0]) == (1.5, 1.5)
    assert report.ratio_interval([1, 5], [1, 1]) == report.ratio_interval([1, 5], [1, 1])
