"""What experiments with heads share: speed against ``ar`` in turns, its table, and the figure of acceptance lengths."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from experiments.cells import Cells
from jspec.benches import load_bench
from jspec.device import device_name
from jspec.driver import decode_all
from jspec.models.load import Target
from jspec.report import markdown_table
from jspec.state import Plan

Lane = tuple[str, str | None, int]  # a head or a method, a tree, a budget
REPEATS, PROMPTS, NEW, CAPACITY = 3, 5, 64, 512
AR = ("ar", None, 1)


def time_lanes(
    target: Target,
    lanes: Mapping[Lane, tuple[Plan, dict[str, Any]]],
    cells: Cells,
    keys: dict[str, Any],
    benches: Iterable[str],
) -> None:
    """Adds a cell a prompt: each lane's median seconds a token, and whether its text is that of the lane ``AR``.

    What a lane's method remembers of a prompt it has for the next one (not where a run was started again).

    Args:
      target: whose tokenizer reads the prompts.
      lanes: plans and what their steps take; ``AR`` among them.
      cells: those that are there are not made again.
      keys: of the cells, beside bench and prompt.
      benches: whose first prompts are decoded.
    """
    warm, memory = False, {}
    for bench in benches:
        for number, prompt in enumerate(load_bench(bench, PROMPTS)):
            mine = {"part": "speed", "bench": bench, "prompt": number} | keys
            if cells.has(**mine):
                continue
            ids = prompt.encode(target.tokenizer)
            seconds = {lane: [] for lane in lanes}
            texts, learned = {}, {}
            for repeat in range(0 if warm else -1, REPEATS):  # -1 warms up
                for lane, (plan, given) in lanes.items():
                    options = {"max_new_tokens": NEW, "capacity": CAPACITY}
                    options["memory"] = memory.get(lane)
                    [one], run = decode_all(plan, given, [ids], **options)
                    texts[lane], learned[lane] = one.tokens, run.memory()
                    if repeat >= 0:
                        seconds[lane].append(run.decode_seconds / len(one.tokens))
            warm, memory = True, learned
            medians = [
                [*lane, statistics.median(times), texts[lane] == texts[AR]]
                for lane, times in seconds.items()
            ]
            cells.add(**mine, machine=device_name(), seconds=medians)


def speed_lines(cells: Cells, dtypes: Iterable[str], benches: Sequence[str]) -> list[str]:
    """The speed cells of each dtype as Markdown: ratios to ``ar``, medians over a bench's prompts."""
    lines = []
    for dtype in dtypes:
        found = [row for row in cells.rows if row["part"] == "speed" and row["dtype"] == dtype]
        if not found:
            continue
        plain, table, same = {}, {}, []
        for row in found:
            base = next(entry[3] for entry in row["seconds"] if entry[0] == "ar")
            plain.setdefault(row["bench"], []).append(1 / base)
            for head, tree, budget, seconds, equal in row["seconds"]:
                if head != "ar":
                    name = (f"{head} {tree or ''}", budget)
                    table.setdefault(name, {}).setdefault(row["bench"], []).append(base / seconds)
                    same.append(equal)
        lines += [
            f"## Speed against autoregressive decoding, {dtype}",
            "",
            f"{', '.join(dict.fromkeys(row['machine'] for row in found))}.",
            f"Greedy, batch 1, {NEW} new tokens, decoding only: each prompt's median of {REPEATS} alternating",
            f"runs; medians over {PROMPTS} prompts of a bench, and their geometric mean. Below 1 a method loses time.",
            f"{sum(same)} of {len(same)} texts equal ar's of the same dtype.",
            "",
        ]

        def medians(by):
            found = [statistics.median(by.get(bench, [float("nan")])) for bench in benches]
            return [*found, statistics.geometric_mean(found)]

        rows = [["ar, tokens/s", 1, *medians(plain)]]
        rows += [[*name, *medians(by)] for name, by in table.items()]
        lines += [markdown_table(["head and tree", "budget", *benches, "mean"], rows)]
    return lines


def draw_acceptance(
    curves: Mapping[str, Mapping[str, Sequence[tuple[int, float]]]],
    budgets: Sequence[int],
    path: Path,
) -> None:
    """Acceptance length against budget, a panel a bench.

    Args:
      curves: ``{bench: {name: [(budget, acceptance length), ...]}}``.
      budgets: the axis' ticks.
      path: of the SVG.
    """
    figure = Figure(figsize=(13, 3.4))
    panels = figure.subplots(1, len(curves), sharey=True, squeeze=False)[0]
    for panel, (bench, lines) in zip(panels, curves.items(), strict=True):
        for name, points in lines.items():
            panel.plot(*zip(*sorted(points), strict=True), marker=".", label=name)
        panel.set(title=bench, xscale="log", xlabel="budget (rows verified)")
        panel.set_xticks(budgets, budgets)
        panel.minorticks_off()
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("acceptance length, temperature 0")
    panels[0].legend(fontsize=7)
    save_figure(figure, path)


def save_figure(figure: Figure, path: Path) -> None:
    """Writes an SVG that is the same for the same figure."""
    figure.tight_layout()
    with matplotlib.rc_context({"svg.hashsalt": "jspec"}):
        figure.savefig(path, metadata={"Date": None})
