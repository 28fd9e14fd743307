"""``python -m jspec.cost``: measures what a round costs on this machine, prints, draws and keeps it."""

import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from jspec.cost.draw import draw_profiles, print_profile
from jspec.cost.estimate import estimate_profile
from jspec.cost.options import CostOptions, parse
from jspec.cost.profile import Profile, profile_path
from jspec.cost.store import ready_profile
from jspec.cost.table import make_cost
from jspec.device import keep_compilations, pick_accelerator, weights_dtype
from jspec.job import Job, choose, cost_setting, find_method, make_plan
from jspec.models.load import load_target
from jspec.options import exit_status
from jspec.report import check_writable
from jspec.sampling import Sampling
from jspec.text import target_stops


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns the exit status: 0, 2 for a user's error or a full disk or memory, 130 for Ctrl-C."""

    def work():
        options = parse(argv)
        if options.figure is not None:
            check_writable(Path(options.figure))
        profiles = measure_all(options, Console(width=None if sys.stdout.isatty() else 120))
        if options.figure is not None:
            draw_profiles(profiles, Path(options.figure))

    return exit_status(work)


def measure_all(options: CostOptions, console: Console) -> list[Profile]:
    """Measures every cell that is asked for, prints its table, and keeps it; or estimates them, and keeps none.

    Raises:
      ValueError: a target, a head or a method that does not fit.
    """
    if options.method is not None:
        find_method(options.run_options())
    pick_accelerator(options.accel)
    keep_compilations()
    dtype = "bf16" if options.estimate and options.dtype == "auto" else options.dtype
    target = load_target(options.target, weights_dtype(dtype))
    chosen = choose(options.run_options(), target)
    head, plan = make_plan(chosen, target, Sampling(options.temperature))
    longest = target.config.max_positions
    cells = dict.fromkeys((batch, min(capacity, longest)) for batch, capacity in options.cells)
    profiles = []
    for batch, capacity in cells:
        given = options.run_options(method=chosen.method, head=chosen.head, batch=batch)
        job = Job(given, target, head, plan, [], [], target_stops(target))
        setting = cost_setting(job, capacity)
        if options.estimate:
            params = {**job.params, "cost": make_cost([1], [1.0])}
            profiles.append(estimate_profile(plan, params, setting, options.estimate))
        else:
            with_stops = {"stops": job.stops, "seconds": options.seconds}
            profiles.append(ready_profile(plan, job.params, setting, anew=True, **with_stops))
        print_profile(profiles[-1], console)
        kept = profile_path(setting)
        if not options.estimate and kept.exists():
            console.print(f"kept as {kept}\n", soft_wrap=True, markup=False, highlight=False)
    return profiles


if __name__ == "__main__":
    sys.exit(main())
