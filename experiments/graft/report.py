"""Tables of experiments/graft, from its cells."""

import statistics
from pathlib import Path

from experiments.cells import Cells
from jspec.report import markdown_table, ratio_interval
from jspec.tree import RETRIEVED

NOT_RUN = "Not run yet.\n"
BASE = "alone"


def write_report(cells: Cells, folder: Path) -> None:
    """Writes ``README.md``."""
    rows = [row for row in cells.rows if row["part"] == "decoded"]
    for row in rows:
        if row["bench"] == "long":
            row["bench"] = f"long: {row['prompt'].split('/')[0]}"
    devices = sorted({row["device"] for row in rows})
    lines = [
        "# Graft: retrieved nodes where the drafter is unsure",
        "",
        "SmolLM2-135M-Instruct (Q4_1 weights), greedy, one prompt at a time, by decoding. Made by",
        "`python -m experiments.graft.run`. `graft` has the table of successors, cold for each prompt; `table kept`:",
        "one table through all prompts; `text`: matches of the text instead; `both`: both. The last two forms are",
        "those that the paper finds worse. Budgets count the root and are equal for all forms.",
        *(f"Measured on {device}." for device in devices),
        "",
        "## Acceptance length",
        "",
        "Tokens a round, bonus included, and how much that is over the method alone; in brackets 95 % bootstrap over",
        "prompts. The paper has +7.4 % to +21.8 % over EAGLE-3.",
        "",
        lengths(rows),
        "## Where accepted tokens come from, and passes saved",
        "",
        "All prompts: the share of accepted nodes that retrieval brought (those that the drafter had, and that were",
        "pruned, among them), draft passes a round, and speed against `ar` (seconds of `ar` over the method's).",
        "",
        sources(rows),
    ]
    (folder / "README.md").write_text("\n".join(lines), encoding="utf-8")


def lanes_of(rows):
    """Forms in the order in which they were run."""
    return [lane for lane in rows[0]["rounds"] if lane != "ar"]


def groups(rows):
    """Rows by method and budget, in the order in which they were run."""
    found = {}
    for row in rows:
        found.setdefault((row["method"], row["budget"]), []).append(row)
    return found


def tau(rows, lane):
    return sum(r["emitted"][lane] for r in rows) / sum(r["rounds"][lane] for r in rows)


def gain(rows, lane):
    """Tokens a round over those of the method alone, with its interval: texts are equal, so rounds tell."""
    ours, base = ([r["rounds"][x] for r in rows] for x in (lane, BASE))
    low, high = ratio_interval(base, ours)
    return 100 * (sum(base) / sum(ours) - 1), 100 * (low - 1), 100 * (high - 1)


def lengths(rows):
    if not rows:
        return NOT_RUN
    benches = list(dict.fromkeys(row["bench"] for row in rows))
    table = []
    for (method, budget), mine in groups(rows).items():
        for lane in lanes_of(mine):
            line, taus = [method, budget, lane], []
            for bench in benches:
                some = [r for r in mine if r["bench"] == bench]
                if not some:
                    line.append("not run yet")
                    continue
                taus.append(tau(some, lane))
                cell = f"{taus[-1]:.2f}"
                if lane != BASE:
                    cell += " {:+.1f} % [{:+.1f}, {:+.1f}]".format(*gain(some, lane))
                line.append(cell)
            table.append([*line, statistics.mean(taus)])
    return markdown_table(["method", "budget", "form", *benches, "mean"], table)


def sources(rows):
    if not rows:
        return NOT_RUN
    table = []
    for (method, budget), mine in groups(rows).items():
        for lane in lanes_of(mine):
            counts = [sum(x) for x in zip(*(r["sources"][lane] for r in mine))]
            rounds = sum(r["rounds"][lane] for r in mine)
            seconds = [sum(r["seconds"][x] for r in mine) for x in ("ar", lane)]
            same = sum(r["same"][lane] for r in mine)
            table.append(
                [
                    method,
                    budget,
                    lane,
                    f"{100 * counts[RETRIEVED] / max(sum(counts), 1):.0f} %",
                    sum(r["passes"][lane] for r in mine) / rounds,
                    seconds[0] / seconds[1],
                    f"{same}/{len(mine)}",
                ]
            )
    header = ["method", "budget", "form", "retrieved", "passes a round", "speed", "as ar"]
    return markdown_table(header, table)
