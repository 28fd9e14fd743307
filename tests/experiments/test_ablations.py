"""The variants' options, and what the report makes of results."""

import argparse
import json
from types import SimpleNamespace

import numpy as np
import pytest

from experiments.cells import Cells
from experiments.jetspec import ablations
from jspec.train.text import Library, Written


@pytest.fixture
def args(tmp_path):
    folder = tmp_path / "library"
    (folder / "text").mkdir(parents=True)
    (folder / "text.json").write_text(json.dumps({"target": "ff", "taps": []}))
    none = np.zeros((0, 0, 0))
    written = [Written(i, np.arange(9, dtype=np.int32), 4, none) for i in range(164)]
    Library(folder).save(0, written, wide=False)
    return argparse.Namespace(
        work=tmp_path, library=str(folder), also=[], corpus="c", further=["--optim.steps=5"]
    )


def test_every_variant_is_the_base_but_for_its_changes(args):
    target = SimpleNamespace(fingerprint="ff")
    found = {name: ablations.options_of(name, args, target) for name in ablations.VARIANTS}
    base = found["base"]
    assert base.loss.gamma == 4 and base.optim.steps == 5 and base.head.causal
    assert base.run == str(args.work / "base") and base.max_texts is None
    assert found["dpace"].loss.dpace == 0.5 and found["dpace"].loss.gamma == 0
    assert (found["half"].max_texts, found["quarter"].max_texts) == (50, 25)  # 64 are held out
    assert found["corpus"].library == "c" and found["block16"].batch.anchors == 10
    for kind, names in ablations.SEEDS.items():
        for seed, name in enumerate(names):
            one = found[name]
            assert one.head.causal == (kind == "causal")
            assert (one.optim.seed, one.batch.seed) == (seed, seed)
    args.corpus = None
    with pytest.raises(ValueError, match="corpus needs --corpus"):
        ablations.options_of("corpus", args, target)


def test_the_report(tmp_path, monkeypatch):
    monkeypatch.setattr(ablations, "HERE", tmp_path)
    cells = Cells(tmp_path / "ablations.jsonl")
    taus = {"base": 2.0, "causal-1": 2.2, "bidirectional": 1.5, "bidirectional-1": 1.9, "half": 1.6}
    for run in ("old", "new"):
        for name, tau in taus.items():
            log = {"loss": 1.25, "held_out": 1.5, "seconds": 60.0, "slots_per_second": 99.9}
            cells.add(part="training", variant=name, run=run, **log)
            if name == "half" and run == "new":
                continue  # not measured again yet
            for bench in ablations.BENCHES:
                for tree, budget in ablations.COLUMNS:
                    keys = {"part": "acceptance", "bench": bench, "tree": tree, "budget": budget}
                    emitted = [round(10 * (tau if run == "new" else 3.0))] * 4
                    keys |= {"emitted": emitted, "rounds": [10] * 4}
                    cells.add(variant=name, run=run, **keys)
    ablations.report(cells)
    text = (tmp_path / "ABLATIONS.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert any(row.startswith("| seed 1 | 2.20 ") and "+0.20 [+0.20, +0.20]" in row for row in rows)
    assert not any(row.startswith("| half") for row in rows)
    assert any(row.startswith("| causal | 2.100 ± 0.141 (2.00, 2.20)") for row in rows)
    assert any(row.startswith("| difference | +0.400 ± 0.141 (+0.50, +0.30)") for row in rows)
