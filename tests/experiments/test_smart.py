"""The report of experiments/smart says what its cells say."""

import json

import pytest

from experiments.cells import Cells
from experiments.smart.report import write_report


def rows():
    for rows, seconds in ((1, 0.03), (2, 0.05)):
        yield {
            "part": "predict",
            "batch": 1,
            "capacity": 512,
            "rows": rows,
            "round": seconds,
            "table": seconds * 1.1,
            "closed": seconds * 0.7,
            "device": "abacus",
        }
    for batch in (1, 8):
        for group in range(3):
            yield {
                "part": "speed",
                "batch": batch,
                "method": "ddtree",
                "bench": "math",
                "group": group,
                "prompts": batch,
                "seconds": {"ar": 2.0, "smart": 2.5 if batch == 8 else 1.0, "16": 4.0},
                "same": {"ar": batch, "smart": batch, "16": batch - 1},
            }
    yield {"part": "controller", "batch": 1, "method": "ddtree", "added": 0.001, "round": 0.05}
    sizes, drafted = [1] * 25, [1] * 5 + [0] * 20
    yield {"part": "extremes", "drafter": "random", "same": True, "rows": sizes, "drafted": drafted}
    for alpha in (0.5, 0.8):
        yield {
            "part": "rules",
            "rule": "marginal",
            "benefit": "sum",
            "alpha": alpha,
            "bench": "math",
            "emitted": [20, 10],
            "spent": [10 * alpha, 5 * alpha],
        }
    seconds = {"ar": 1.0, "exact": 0.5, "marginal": 0.8}
    yield {"part": "rules_for_real", "batch": 8, "bench": "math", "seconds": seconds}


def report(tmp_path, cells):
    (tmp_path / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in cells))
    write_report(Cells(tmp_path / "results.jsonl"), tmp_path)
    return (tmp_path / "README.md").read_text()


@pytest.mark.filterwarnings("error")
def test_a_report_says_what_the_cells_say(tmp_path):
    text = report(tmp_path, list(rows()))
    for line in (
        "Measured on abacus.",
        "| all |  | 10.00 | 10.00 | 30.00 | 30.00 |",
        "| 1 | ddtree | math | 2.00 [2.00, 2.00] | 0.50 | 3/6 |",
        "| 8 | ddtree | math | 0.80 [0.80, 0.80] | 0.50 | 45/48 |",
        "Cells below 0.97: 8 ddtree math of 2. Geometric mean 1.265;",
        "1.265 in the mean and 0.800 at worst",
        "| 1 | +300.0 % (1) |",
        "| 8 | +60.0 % (1) |",
        "| 1 | ddtree | 1.00 | 50.00 | 2.00 |",
        "| random | 25 | 1 1 1 1 1",
        "| marginal | sum | 0.50 | 4.00 | 4.00 |",
        "| 8 | 2.00 | 1.25 |",
    ):
        assert line in text, line
    assert "Not run yet" not in text
    assert (tmp_path / "speed.svg").exists()


def test_what_was_not_run_is_said(tmp_path):
    text = report(tmp_path, [])
    assert text.count("Not run yet.") == 7
    assert not (tmp_path / "speed.svg").exists()
