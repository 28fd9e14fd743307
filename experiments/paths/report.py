"""Tables and figure of experiments/paths, from its cells."""

import itertools
import statistics
from pathlib import Path

import numpy as np

from experiments.cells import Cells
from experiments.jetspec.acceptance import tau
from experiments.jetspec.run import BENCHES, BUDGETS, NEW, PROMPTS, SAMPLINGS, SPEED_BUDGETS
from experiments.lanes import draw_acceptance, speed_lines
from jspec.report import markdown_table, ratio_interval

QUALITY = ("humaneval", "gsm8k", "mtbench")  # what a head is judged by
WANTED = {8: 1.9, 32: 2.3, 64: 2.5}  # of dartree, greedy, mean over those


def write_report(cells: Cells, folder: Path) -> None:
    """Writes ``README.md`` and ``paths.svg``."""
    found = Found(cells)
    lines = [
        "# Path-conditioned trees on SmolLM2-135M-Instruct",
        "",
        "Q4_1 weights, computed with in fp32. Made by `python -m experiments.paths.run`.",
        f"Acceptance length by replay, {PROMPTS} prompts a bench, {NEW} new tokens; budgets count the root.",
        "In brackets: 95 % bootstrap over prompts. A pass is one of the head's, and of domino and dartree a level too.",
        "",
    ]
    for temperature in SAMPLINGS:
        rows = [found.row(kind, temperature) for kind in found.kinds]
        if rows := [row for row in rows if row]:
            header = ["method", "head", "budget", *BENCHES, "mean", "passes a round"]
            lines += [f"## Acceptance length, temperature {temperature}", ""]
            lines += [markdown_table(header, rows)]
    lines += claims(found) + offpath_lines(cells) + level_lines(cells)
    lines += speed_lines(cells, SPEED_BUDGETS, BENCHES)
    lines += ["![Acceptance length against budget](paths.svg)", ""]
    (folder / "README.md").write_text("\n".join(lines))
    curves = {bench: {} for bench in BENCHES}
    for kind, bench in itertools.product(found.kinds, BENCHES):
        if one := found.cell("0", kind, bench):
            curves[bench].setdefault(" ".join(kind[:2]), []).append((kind[2], tau(one)))
    draw_acceptance(curves, BUDGETS, folder / "paths.svg")


class Found:
    """The acceptance cells by (temperature, kind, bench); a kind is (method, head, budget)."""

    def __init__(self, cells):
        rows = [row for row in cells.rows if row["part"] == "acceptance"]
        kinds = [(row["method"], row["head"], row["budget"]) for row in rows]
        self.kinds = list(dict.fromkeys(kinds))
        self._by = {(r["T"], kind, r["bench"]): r for kind, r in zip(kinds, rows, strict=True)}

    def cell(self, temperature, kind, bench):
        return self._by.get((temperature, kind, bench))

    def mean(self, temperature, kind, benches=BENCHES):
        """Over benches; None where one is missing."""
        there = [self.cell(temperature, kind, bench) for bench in benches]
        return statistics.mean(map(tau, there)) if all(there) else None

    def row(self, kind, temperature):
        there = [self.cell(temperature, kind, bench) for bench in BENCHES]
        if not all(there):
            return None
        numbers = []
        for one in there:
            low, high = ratio_interval(one["emitted"], one["rounds"])
            numbers.append(f"{tau(one):.2f} [{low:.2f}, {high:.2f}]")
        passes = sum(sum(x["passes"]) for x in there) / sum(sum(x["rounds"]) for x in there)
        return [*kind, *numbers, self.mean(temperature, kind), passes]


def claims(found):
    """dartree against the chains, as its paper has it, and against what its head is to reach."""
    rows = []
    chains = [kind for kind in found.kinds if kind[0] in ("domino", "dflash")]
    for kind in found.kinds:
        if not kind[0].startswith("dartree"):
            continue
        mine, row = found.mean("0", kind), list(kind)
        same = [c for c in chains if c[:2] == ("domino", kind[1])]
        for chain in (same, [c for c in chains if c[0] == "dflash"]):
            base = found.mean("0", chain[0]) if chain else None
            row.append(f"{100 * (mine / base - 1):+.1f} %" if mine and base else "")
        reached = found.mean("0", kind, QUALITY)
        row += [reached or "", WANTED.get(kind[2], "")]
        rows.append(row)
    if not rows:
        return []
    header = ["method", "head", "budget", "over its domino chain", "over dflash"]
    header += ["mean of " + ", ".join(QUALITY), "wanted"]
    note = (
        "Acceptance length at temperature 0, mean over the benches. "
        "The paper has +27.9 % over Domino and +98.6 % over DFlash."
    )
    return ["## What a tree of corrected nodes gains", "", note, "", markdown_table(header, rows)]


def offpath_lines(cells):
    rows = []
    found = [row for row in cells.rows if row["part"] == "offpath"]
    for head in dict.fromkeys(row["head"] for row in found):
        these = [row["counts"] for row in found if row["head"] == head]
        for kind in these[0]:
            right, judged = np.sum([one[kind] for one in these], axis=0)
            share = right / np.maximum(judged, 1)
            cells_of_depths = [f"{x:.3f}" if n else "" for x, n in zip(share, judged, strict=True)]
            rows.append([head, kind, *cells_of_depths, f"{right.sum() / judged.sum():.3f}"])
    if not rows:
        return []
    depths = len(rows[0]) - 3
    note = (
        "The share of right drafts by depth where all before them are right, at every root of the greedy answers to all"
        " benches: by the slot's row alone, and corrected by the path; on the row's own best path, and off it."
    )
    header = ["head", "draft", *map(str, range(1, depths + 1)), "all"]
    return ["## Off the best path", "", note, "", markdown_table(header, rows)]


def level_lines(cells):
    found = [row for row in cells.rows if row["part"] == "levels"]
    lines = []
    for dtype in dict.fromkeys(row["dtype"] for row in found):
        these = [row for row in found if row["dtype"] == dtype]
        step = next((r["seconds"]["round"] for r in these if r["method"] == "ar"), None)
        if step is None:
            continue
        rows = []
        for row in these:
            times, depth = row["seconds"], row["depth"]
            if row["method"] == "ar":
                continue
            level = None
            if "first level" in times:
                level = (times["draft"] - times["first level"]) / (depth - 1)
            numbers = [times["draft"], times["draft"] / times["round"]]
            shown = [f"{1e3 * numbers[0]:.1f}", f"{100 * numbers[1]:.0f} %"]
            shown += (
                [f"{1e3 * level:.2f}", f"{level / step:.3f}"] if level is not None else ["", ""]
            )
            rows.append([row["method"], row["head"], row["budget"], depth, *shown])
        header = ["method", "head", "budget", "depth", "draft, ms", "share of the round"]
        header += ["a further level, ms", "of a step of ar"]
        note = f"{these[0]['machine']}. Batch 1, medians; a step of ar takes {1e3 * step:.1f} ms."
        lines += [f"## What drafting costs, {dtype}", "", note, "", markdown_table(header, rows)]
    return lines
