"""Tables and the figure of experiments/smart, from its cells."""

import math
import statistics
from collections import defaultdict
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from experiments.cells import Cells
from experiments.lanes import save_figure
from jspec.report import markdown_table, ratio_interval

NOT_RUN = "Not run yet.\n"


def write_report(cells: Cells, folder: Path) -> None:
    """Writes ``README.md`` and, where there are speeds, ``speed.svg``."""
    found = defaultdict(list)
    for row in cells.rows:
        found[row["part"]].append(row)
    devices = sorted({row["device"] for row in cells.rows if "device" in row})
    lines = [
        "# SMART: a node only while it pays",
        "",
        "SmolLM2-135M-Instruct (Q4_1 weights), greedy. Made by `python -m experiments.smart.run`.",
        *(f"Measured on {device}." for device in devices),
        "",
        "## Does the cost model predict a round?",
        "",
        "A profile is measured: rounds without a draft, and a draft, with 33 tokens known. Then rounds that draft are",
        "timed in all row buckets with half a cache of text. Relative errors of the predicted round in per cent: the",
        "table's, and that of the paper's closed form, fitted to the same profile. Wanted is a median of at most 10 %.",
        "",
        predictions(found["predict"]),
        "## Speed against autoregressive decoding",
        "",
        "Seconds of `ar` over the method's on the same prompts, groups in turns in one process; in brackets 95 %",
        "bootstrap over groups. SMART has a budget of 60; a fixed budget whose rounds are predicted to cost far more",
        "than they can bring is not run (-). No upper bound of SMART should be below 0.97.",
        "",
        speeds(found["speed"]),
        verdict(found["speed"]),
        "## What it gains over fixed budgets",
        "",
        "Geometric means over groups; in brackets, the methods by benches that were run at this fixed budget. The",
        "paper has +15.4 % in compute-bound batches, nothing at batch 1 on a GPU.",
        "",
        gains(found["speed"]),
        "## What the controller itself costs",
        "",
        "What SMART adds to propose, absorb and observe, over a round that verifies 32 rows a prompt. Wanted is at",
        "most 1 %.",
        "",
        overheads(found["controller"]),
        "## A drafter that is always right, and one that never is",
        "",
        extremes(found["extremes"]),
        "## The published rule and the exact one",
        "",
        "By replay and the cost table, batch 1: tokens over the plain rounds that all rounds cost by the model.",
        "",
        rules(found["rules"]),
        "By decoding: geometric means over benches of the speed against `ar`.",
        "",
        real_rules(found["rules_for_real"]),
    ]
    if found["speed"]:
        draw(found["speed"], folder / "speed.svg")
        lines += ["![Speedup against batch](speed.svg)", ""]
    (folder / "README.md").write_text("\n".join(lines), encoding="utf-8")


def predictions(rows):
    if not rows:
        return NOT_RUN
    table, errors = [], {"table": [], "closed": []}
    for key in sorted({(r["batch"], r["capacity"]) for r in rows}):
        mine = [r for r in rows if (r["batch"], r["capacity"]) == key]
        off = {k: [abs(r[k] / r["round"] - 1) for r in mine] for k in errors}
        for k, values in off.items():
            errors[k] += values
        table.append([*key, *(100 * f(off[k]) for k in off for f in (statistics.median, max))])
    table.append(
        ["all", "", *(100 * f(errors[k]) for k in errors for f in (statistics.median, max))]
    )
    header = ["batch", "cache", "table, median", "worst", "closed form, median", "worst"]
    return markdown_table(header, table)


def ratios(rows, lane):
    """(seconds of ar, seconds of a lane) of the groups that have both."""
    return [
        (r["seconds"]["ar"], r["seconds"][lane]) for r in rows if r["seconds"].get(lane) is not None
    ]


def grouped(rows):
    """Groups of cells by batch, method and bench."""
    found = defaultdict(list)
    for row in rows:
        found[row["batch"], row["method"], row["bench"]].append(row)
    return dict(sorted(found.items()))


def lanes_of(rows):
    return sorted({x for r in rows for x in r["seconds"]} - {"ar"}, key=lambda x: (x != "smart", x))


def speeds(rows):
    if not rows:
        return NOT_RUN
    lanes, table = lanes_of(rows), []
    for key, mine in grouped(rows).items():
        line = [str(key[0]), *key[1:]]
        for lane in lanes:
            pairs = ratios(mine, lane)
            if not pairs:
                line.append("-")
                continue
            tops, bottoms = zip(*pairs)
            cell = f"{sum(tops) / sum(bottoms):.2f}"
            if lane == "smart":
                low, high = ratio_interval(tops, bottoms)
                cell += f" [{low:.2f}, {high:.2f}]"
            line.append(cell)
        others = [(r, x) for r in mine for x in r["same"] if x != "ar"]
        same = sum(r["same"][x] for r, x in others)
        total = sum(r["prompts"] for r, _ in others)
        table.append([*line, f"{same}/{total}"])
    return markdown_table(["batch", "method", "bench", *lanes, "as ar"], table)


def verdict(rows):
    """Whether what is wanted holds, in one paragraph."""
    if not rows:
        return ""
    low, speed, best = [], [], []
    for key, mine in grouped(rows).items():
        tops, bottoms = zip(*ratios(mine, "smart"))
        speed.append(sum(tops) / sum(bottoms))
        if ratio_interval(tops, bottoms)[1] < 0.97:
            low.append(" ".join(map(str, key)))
        fixed = [
            sum(a for a, _ in pairs) / sum(b for _, b in pairs)
            for lane in lanes_of(mine)
            if lane != "smart" and (pairs := ratios(mine, lane))
        ]
        best.append(speed[-1] / max([1.0, *fixed]))
    return (
        f"Cells below 0.97: {', '.join(low) or 'none'} of {len(speed)}. Geometric mean "
        f"{geometric(speed):.3f}; of the best fixed budget in hindsight, not drafting among them, "
        f"{geometric(best):.3f} in the mean and {min(best):.3f} at worst.\n"
    )


def geometric(values):
    return math.exp(statistics.mean(map(math.log, values)))


def gains(rows):
    if not rows:
        return NOT_RUN
    fixed = [lane for lane in lanes_of(rows) if lane != "smart"]
    table = []
    for batch in sorted({r["batch"] for r in rows}):
        line = [batch]
        for lane in fixed:
            some = [r for r in rows if r["batch"] == batch and lane in r["seconds"]]
            both = [r["seconds"][lane] / r["seconds"]["smart"] for r in some]
            kinds = {(r["method"], r["bench"]) for r in some}
            line.append(f"{100 * (geometric(both) - 1):+.1f} % ({len(kinds)})" if both else "-")
        table.append(line)
    return markdown_table(["batch", *(f"over {lane}" for lane in fixed)], table)


def overheads(rows):
    if not rows:
        return NOT_RUN
    table = [
        [r["batch"], r["method"], 1e3 * r["added"], 1e3 * r["round"], 100 * r["added"] / r["round"]]
        for r in rows
    ]
    return markdown_table(["batch", "method", "added, ms", "round, ms", "share, %"], table)


def extremes(rows):
    if not rows:
        return NOT_RUN
    table = []
    for r in rows:
        sizes, drafted = r["rows"], np.asarray(r["drafted"])
        late = sizes[20:] or sizes[-1:]
        table.append(
            [
                r["drafter"],
                len(sizes),
                " ".join(map(str, sizes[:20])),
                f"{statistics.median(late):g}",
                int((drafted[20:] > 0).sum()),
                "yes" if r["same"] else "no",
            ]
        )
    header = ["drafter", "rounds", "rows of the first 20", "median after", "drafts after", "as ar"]
    return markdown_table(header, table)


def rules(rows):
    if not rows:
        return NOT_RUN
    benches = sorted({r["bench"] for r in rows})
    found = {}
    for r in rows:
        speed = sum(r["emitted"]) / sum(r["spent"])
        found.setdefault((r["rule"], r["benefit"], r["alpha"]), {})[r["bench"]] = speed
    table = [
        [*key, *(mine.get(b, "-") for b in benches), geometric(list(mine.values()))]
        for key, mine in sorted(found.items())
    ]
    return markdown_table(["rule", "benefit", "alpha", *benches, "mean"], table)


def real_rules(rows):
    if not rows:
        return NOT_RUN
    lanes, table = lanes_of(rows), []
    for batch in sorted({r["batch"] for r in rows}):
        mine = [r for r in rows if r["batch"] == batch]
        means = [geometric([a / b for a, b in ratios(mine, lane)]) for lane in lanes]
        table.append([batch, *means])
    return markdown_table(["batch", *lanes], table)


def draw(rows, path):
    """Speedup against batch, with SMART and with fixed budgets, a panel a method."""
    methods = sorted({r["method"] for r in rows})
    batches = sorted({r["batch"] for r in rows})
    figure = Figure(figsize=(3.4 * len(methods), 3.2))
    panels = figure.subplots(1, len(methods), sharey=True, squeeze=False)[0]
    for panel, method in zip(panels, methods):
        for lane in lanes_of(rows):
            line = []
            for batch in batches:
                mine = [r for r in rows if (r["batch"], r["method"]) == (batch, method)]
                line.append(geometric([a / b for a, b in ratios(mine, lane)] or [math.nan]))
            name = "SMART" if lane == "smart" else f"budget {lane}"
            panel.plot(batches, line, marker="o", lw=2.5 if lane == "smart" else 1, label=name)
        panel.axhline(1, color="grey", lw=0.8)
        panel.set(title=method, xlabel="batch", xscale="log")
        panel.set_xticks(batches, batches)
        panel.minorticks_off()
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("times as fast as ar")
    panels[0].legend(fontsize=8)
    save_figure(figure, path)
