"""What a single prompt gains when a head, retrieval from its own text and SMART are combined: against ``ar`` in turns.

    python -m experiments.combined.run speed     # quiet machine, about an hour
    python -m experiments.combined.run report    # the table, from results.jsonl

Greedy, fp32 on a CPU and bf16 elsewhere. Thresholds are the usual ones, or those that ``jspec.thresholds`` calibrated.
Cells that are in ``results.jsonl`` are not made again.
"""

import argparse
from pathlib import Path

from experiments.cells import Cells
from experiments.lanes import AR, CAPACITY, speed_lines, time_lanes
from experiments.smart.run import BENCHES, Bench
from jspec.device import DTYPES, keep_compilations, weights_dtype
from jspec.methods import ar, smart
from jspec.thresholds.store import ready_graft

HERE = Path(__file__).parent
LOOKUP, TREE, GRAFTED = "prompt_lookup", "ddtree", "ddtree, grafted with text"
PLAIN = ((LOOKUP, 4), (TREE, 4), (GRAFTED, 4), (GRAFTED, 8), (GRAFTED, 16))
UNDER_SMART = ((LOOKUP, 32), (TREE, 32), (GRAFTED, 8), (GRAFTED, 16), (GRAFTED, 32))


def make(bench, name, budget):
    """A method of the default target's causal head, by its name here."""
    if name != GRAFTED:
        return bench.methods()[name](budget)
    names = bench.target.fingerprint, bench.head.fingerprint
    return ready_graft(bench.methods()[TREE](budget), *names, retrieve="text")


def speed(bench, cells):
    lanes = {AR: (bench.plan(ar()), bench.params)}
    for name, budget in PLAIN:
        lanes[name, None, budget] = bench.plan(make(bench, name, budget)), bench.params
    for name, budget in UNDER_SMART:
        plan = bench.plan(smart(make(bench, name, budget)))
        lanes[name, "under SMART", budget] = plan, bench.with_cost(plan, 1, CAPACITY)
    dtype = next(name for name, kind in DTYPES.items() if kind == weights_dtype("auto"))
    keys = {"dtype": dtype, "weights": bench.head.fingerprint[:8]}
    time_lanes(bench.target, lanes, cells, keys, BENCHES)


def report(cells):
    lines = [
        "# A head, retrieval and SMART combined",
        "",
        "`ddtree` drafts with the shipped causal head; grafted, its trees share the budget with matches of the prompt",
        "and the answer so far (`jspec.graft`). Under SMART a budget is a ceiling. What SMART learned from a prompt it",
        "keeps for the next one.",
        "",
        *speed_lines(cells, dict.fromkeys(row["dtype"] for row in cells.rows), BENCHES),
    ]
    (HERE / "README.md").write_text("\n".join(lines) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="+", choices=["speed", "report"])
    parts = parser.parse_args().parts
    cells = Cells(HERE / "results.jsonl")
    keep_compilations()
    if "speed" in parts:
        speed(Bench(), cells)
    if "report" in parts:
        report(cells)


if __name__ == "__main__":
    main()
