"""Tables and the figure of experiments/roofline, from its cells."""

from collections import defaultdict
from itertools import pairwise
from pathlib import Path

from matplotlib.figure import Figure

from experiments.cells import Cells
from experiments.lanes import save_figure
from jspec.aot import TARGETS
from jspec.cost.estimate import CHIPS, Chip
from jspec.report import markdown_table

H100 = Chip(989e12, 3350e9)  # SXM, dense bf16 (NVIDIA's data sheet)
CAPACITY = 1024  # rows of the cache; all are read
MASKED = (16, 64, 256)
CONTEXT = 4096


def write_report(cells: Cells, folder: Path) -> None:
    """Writes ``README.md`` and ``roofline.svg``."""
    counts = defaultdict(dict)
    for row in cells.rows:
        counts[row["target"], row["kind"]][row["budget"]] = row["flops"], row["bytes"]
    for target in dict.fromkeys(row["target"] for row in cells.rows):
        budgets = {row["budget"] for row in cells.rows if row["target"] == target}
        counts[target, "H100"] = by_arithmetic(target, sorted(budgets))
    lines = [
        "# Where a round of verification turns from memory to arithmetic: estimates",
        "",
        "No device was used. Counts are of the compiled round of prompt lookup (verify, accept, commit), one prompt,",
        f"bf16, {CAPACITY} cache rows, attention by XLA, as the TPU's own compiler counts them for 2 and 4 layers,",
        "taken further to all layers. For the H100 they are arithmetic: two operations a weight and row, and all",
        "weights and the cache read once. Divided by the published peaks, none of which a real round reaches, they",
        "say when operations take longer than bytes: up to there a row more is nearly free.",
        "",
        markdown_table(
            [
                "target",
                "chip",
                "GB a round at 1",
                "GFLOP at 1",
                "GFLOP a row more",
                "turns at rows",
                "at 64",
                "at 256",
            ],
            [line(*key, by_budget) for key, by_budget in counts.items()],
        ),
        "The last two columns: the round's time at so many rows over that at one row.",
        "",
        "![Time of a round by rows](roofline.svg)",
        "",
        "## What a mask costs to read",
        "",
        f"Bytes a node, for each layer's attention, with a context of {CONTEXT} rows: the packed bits of the nodes'",
        "own ancestors beside one length a prompt, a dense mask of one byte a key, and an additive one in fp32.",
        "",
        markdown_table(["nodes", "packed bits", "bytes", "fp32"], [mask_bytes(n) for n in MASKED]),
    ]
    (folder / "README.md").write_text("\n".join(lines))
    draw(counts, folder / "roofline.svg")


def by_arithmetic(target, budgets):
    """Operations and bytes of a round by its rows."""
    config = TARGETS[target]
    features = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    layer = config.hidden_size * (2 * features[0] + 2 * features[1] + 3 * config.ffn_size)
    weights = config.num_layers * layer + config.vocab_size * config.hidden_size
    cache = 2 * config.num_layers * CAPACITY * features[1]
    attention = 4 * config.num_layers * CAPACITY * features[0]
    return {n: (n * (2 * weights + attention), 2.0 * (weights + cache)) for n in budgets}


def seconds(chip, counts):
    flops, read = counts
    return max(flops / chip.flops, read / chip.bandwidth)


def turning_point(chip: Chip, by_budget: dict[int, tuple[float, float]]) -> float | None:
    """Rows at which operations take as long as bytes, both linear between two budgets; None: at none of them."""
    gaps = [(n, f / chip.flops - b / chip.bandwidth) for n, (f, b) in sorted(by_budget.items())]
    for (low, before), (high, after) in pairwise(gaps):
        if before < 0 <= after:
            return low + (high - low) * before / (before - after)
    return None


def chip_of(name):
    return H100 if name == "H100" else CHIPS[name]


def line(target, name, by_budget):
    chip, (least, most) = chip_of(name), (min(by_budget), max(by_budget))
    flops, read = by_budget[least]
    slope = (by_budget[most][0] - flops) / max(most - least, 1)
    turn = turning_point(chip, by_budget)
    times = [
        seconds(chip, by_budget[n]) / seconds(chip, by_budget[least]) if n in by_budget else ""
        for n in (64, 256)
    ]
    bound = by_budget[most][0] / chip.flops < by_budget[most][1] / chip.bandwidth
    turned = f"{turn:.0f}" if turn is not None else f"above {most}" if bound else f"below {least}"
    return [target, name, read / 1e9, flops / 1e9, slope / 1e9, turned, *times]


def mask_bytes(nodes):
    keys = CONTEXT + nodes
    return [nodes, -(-nodes // 32) * 4, keys, 4 * keys]


def draw(counts, path):
    targets = list(dict.fromkeys(target for target, _ in counts))
    figure = Figure(figsize=(5 * max(len(targets), 1), 3.6))
    panels = figure.subplots(1, max(len(targets), 1), sharey=True, squeeze=False)[0]
    for panel, target in zip(panels, targets, strict=False):
        for (owner, name), by_budget in counts.items():
            if owner == target:
                chip, rows = chip_of(name), sorted(by_budget)
                one = seconds(chip, by_budget[rows[0]])
                panel.plot(
                    rows, [seconds(chip, by_budget[n]) / one for n in rows], marker=".", label=name
                )
        panel.set(title=target, xscale="log", yscale="log", xlabel="rows of a round")
        panel.set_xticks(rows, rows)
        panel.minorticks_off()
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("time over that of one row (estimate)")
    panels[0].legend(fontsize=7)
    save_figure(figure, path)
