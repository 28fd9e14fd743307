"""The reports of experiments/graft and experiments/rejection say what their cells say; their prompts are long."""

import json

import pytest

from experiments.cells import Cells
from experiments.graft.report import write_report
from experiments.graft.run import long_prompts
from experiments.rejection.run import COLUMNS, report


def cells(tmp_path, rows):
    (tmp_path / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Cells(tmp_path / "results.jsonl")


def row(bench, prompt, rounds):
    """A prompt of 60 new tokens: ``rounds`` of ar, of the method alone and of graft."""
    lanes = ("ar", "alone", "graft")
    return {
        "part": "decoded",
        "method": "jetspec",
        "budget": 8,
        "bench": bench,
        "prompt": prompt,
        "rounds": dict(zip(lanes, rounds)),
        "emitted": dict.fromkeys(lanes, 60),
        "sources": {"ar": [0, 0], "alone": [30, 0], "graft": [30, 10]},
        "passes": {"ar": 0, "alone": rounds[1], "graft": rounds[2] // 2},
        "seconds": {"ar": 3.0, "alone": 2.0, "graft": 1.5},
        "same": {"ar": True, "alone": True, "graft": prompt != "b"},
        "device": "abacus",
    }


def test_the_report_of_graft(tmp_path):
    rows = [row("math", "a", (60, 30, 20)), row("math", "b", (60, 30, 20))]
    rows.append(row("long", "edit/heapq", (60, 20, 10)))
    write_report(cells(tmp_path, rows), tmp_path)
    text = (tmp_path / "README.md").read_text()
    for line in (
        "Measured on abacus.",
        "| method | budget | form | math | long: edit | mean |",
        "| jetspec | 8 | alone | 2.00 | 3.00 | 2.50 |",
        "| jetspec | 8 | graft | 3.00 +50.0 % [+50.0, +50.0] | 6.00 +100.0 % [+100.0, +100.0] | 4.50 |",
        "| jetspec | 8 | alone | 0 % | 1.00 | 1.50 | 3/3 |",
        "| jetspec | 8 | graft | 25 % | 0.50 | 2.00 | 2/3 |",
    ):
        assert line in text, line
    assert "Not run yet" not in text
    write_report(cells(tmp_path, []), tmp_path)
    assert (tmp_path / "README.md").read_text().count("Not run yet.") == 2


def test_the_report_of_rejection_rules(tmp_path):
    keys = {"bench": "math", "budget": 8, "temperature": 0.5, "rounds": 10, "device": "abacus"}
    rows = [keys | {"prompt": p} | dict(zip(COLUMNS, (20, 15, 18, 19))) for p in "ab"]
    report(cells(tmp_path, rows), tmp_path)
    text = (tmp_path / "README.md").read_text()
    found = "2.00 [2.00, 2.00] | 1.50 [1.50, 1.50] | 1.80 [1.80, 1.80] | 1.90 [1.90, 1.90]"
    assert f"| 0.5 | 8 | {found} |" in text
    assert f"| 1 | 16 | {' | '.join(['not run yet'] * 4)} |" in text


def test_long_prompts_are_long():
    found = long_prompts()
    assert len({prompt.id for prompt in found}) == len(found) == 15
    for prompt in found:
        text = prompt.text or prompt.messages[0]["content"]
        assert 3000 < len(text) < 12_000


@pytest.mark.slow
def test_rejection_rules_are_measured(smollm2):
    """One round on the real target: nobody emits less than a token or more than the tree is deep."""
    import jax

    from experiments.rejection.run import measured
    from jspec.checkpoint import load_head, shipped_head
    from jspec.methods import ddtree
    from jspec.prefill import admit
    from jspec.sampling import Sampling
    from jspec.state import Plan, new_state

    head = load_head(shipped_head(smollm2, causal=True), smollm2)
    params = {"target": smollm2.params, "head": head.params}
    plan = Plan(smollm2.config, ddtree(head.config, 4), Sampling(1.0), buckets=())
    state = new_state(plan, params, 1, 256, jax.random.key(0))
    state = admit(plan, params, state, 0, smollm2.tokenizer.encode("The sky is"), 0, 8)
    found, state = measured(plan, head.config, params, state, jax.random.key(1))
    assert set(found) == set(COLUMNS)
    assert all(1 <= float(value) <= 4 for value in found.values())
    assert int(state.known[0]) > 3
