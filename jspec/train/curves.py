"""The figure of a run: its loss, and the held-out acceptance."""

from pathlib import Path

import matplotlib
from matplotlib.figure import Figure  # and not pyplot: in a notebook that is the reader's

from jspec.train.log import read_log


def draw_curves(folder: Path) -> Path:
    """Draws ``log.jsonl`` of a run into ``curves.svg`` beside it."""
    rows = read_log(folder)
    steps = [row["step"] for row in rows]
    figure = Figure(figsize=(13, 3.4))
    losses, lengths, depths = figure.subplots(1, 3)
    losses.plot(*zip(*((row["step"], row["loss"]) for row in rows if "loss" in row)))
    losses.set(title="training loss", xlabel="step")
    for name in ("tree", "chain"):
        lengths.plot(steps, [row[name] for row in rows], marker=".", label=name)
    lengths.set(title="held-out acceptance length", xlabel="step")
    lengths.legend()
    for depth, reached in enumerate(zip(*(row["tree_by_depth"] for row in rows)), 1):
        depths.plot(steps, reached, label=f"depth {depth}")
    depths.set(title="rounds whose tree is accepted to a depth", xlabel="step")
    depths.legend(fontsize=7)
    for axis in (losses, lengths, depths):
        axis.grid(alpha=0.3)
    figure.tight_layout()
    path = folder / "curves.svg"
    with matplotlib.rc_context({"svg.hashsalt": "jspec"}):  # the same log, the same file
        figure.savefig(path, metadata={"Date": None})
    return path
