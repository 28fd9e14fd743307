"""A cost profile as a table for the terminal, and as a figure."""

import statistics
from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.figure import Figure  # and not pyplot: in a notebook that is the reader's
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from jspec.cost.measure import DISTURBED
from jspec.cost.profile import Profile
from jspec.files import put


def print_profile(profile: Profile, console: Console) -> None:
    """Prints the measured table, the closed form beside it, and how far off each is."""
    setting, fit = profile.setting, profile.fit
    kind = "estimated, not measured" if profile.estimate else "measured"
    console.print(
        escape(
            f"{setting.method}, budget {setting.budget}, batch {setting.batch}, cache of "
            f"{setting.capacity} rows, {setting.dtype}, {setting.draw}; {kind} on {setting.device}"
        )
    )
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("rows", "verify, ms", "spread, %", "closed form, ms", "off by, %"):
        table.add_column(name, justify="right")
    for rows, seconds, spread, said in zip(
        profile.rows, profile.verify, profile.spread, fit.verify(profile.rows)
    ):
        numbers = (1e3 * seconds, 100 * spread, 1e3 * said, 100 * (said / seconds - 1))
        table.add_row(str(rows), *(f"{x:.1f}" for x in numbers))
    console.print(table)
    draft = sorted(set(profile.draft))
    shown = " to ".join(f"{1e3 * x:.2f}" for x in (draft[0], draft[-1])[: len(draft)])
    console.print(f"a draft {shown} ms, the rest of a round {1e3 * profile.fixed:.2f} ms")
    console.print(
        f"closed form: lambda {fit.weight:.3g} s, gamma {fit.gamma:.3g} s, delta {fit.delta:.3g}, "
        f"rho {fit.rho:.3g}; off by {100 * fit.median_error:.1f} % in the median, "
        f"{100 * fit.worst_error:.1f} % at most"
    )
    if profile.disturbed > DISTURBED:
        off = 100 * profile.disturbed
        console.print(
            f"something else was running: times were off by up to {off:.0f} %; measure again"
        )
    if errors := profile.table_errors():
        console.print(
            "table: a row count from those around it is off by "
            f"{100 * statistics.median(errors):.1f} % in the median, {100 * max(errors):.1f} % at most"
        )


def draw_profiles(profiles: Sequence[Profile], path: Path) -> None:
    """Draws measured tables and closed forms into an .svg or .png file, all of it or nothing.

    Raises:
      OSError: it cannot be written.
    """
    figure = Figure(figsize=(11, 4))
    whole, single = figure.subplots(1, 2)
    for number, profile in enumerate(profiles):
        color, setting = f"C{number}", profile.setting
        rows, verify = np.asarray(profile.rows), np.asarray(profile.verify)
        between = np.geomspace(rows[0], rows[-1], 100)
        name = f"batch {setting.batch}, cache {setting.capacity}"
        name += " (estimate)" if profile.estimate else ""
        for axis, by in ((whole, np.ones_like), (single, np.asarray)):
            inner = np.interp(between, rows, np.maximum.accumulate(verify))
            axis.plot(rows, 1e3 * verify / by(rows), "o", color=color, label=name)
            axis.plot(between, 1e3 * inner / by(between), color=color, lw=1)
            said = profile.fit.verify(between)
            axis.plot(between, 1e3 * said / by(between), "--", color=color, lw=1)
    whole.set(title="a verify forward", ylabel="ms")
    single.set(title="the same, by row", ylabel="ms a row")
    for axis in (whole, single):
        axis.set(xlabel="rows", xscale="log", yscale="log")
        ticks = profiles[0].rows
        axis.set_xticks(ticks, ticks)
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    whole.legend(fontsize=8, title="line: table; dashed: closed form", title_fontsize=8)
    figure.suptitle(profiles[0].setting.device, fontsize=9)
    figure.tight_layout()
    undated = {"Date": None} if path.suffix == ".svg" else {}
    with matplotlib.rc_context({"svg.hashsalt": "jspec"}):  # the same profiles, the same file
        put(
            path, lambda f: figure.savefig(f, format=path.suffix[1:], metadata=undated), shared=True
        )
