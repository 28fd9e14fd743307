"""``python -m jspec.thresholds``: decodes prompts, finds graft's best thresholds, prints and keeps them."""

import dataclasses
import sys
from collections.abc import Sequence

import numpy as np
from rich.console import Console

from jspec.benches import BENCHES, Prompt, load_bench
from jspec.cost.table import draft_seconds, verify_seconds
from jspec.device import keep_compilations, pick_accelerator, weights_dtype
from jspec.job import Job, add_costs, choose, find_method, make_method, read_all
from jspec.methods import graft, smart
from jspec.methods.graft import CHECKPOINTS, default_thresholds
from jspec.models.load import load_target
from jspec.options import exit_status
from jspec.sampling import Sampling
from jspec.state import Plan
from jspec.text import encode_prompt, target_stops
from jspec.thresholds.measure import measure_rounds
from jspec.thresholds.options import FIRST, LAST, ThresholdOptions, parse
from jspec.thresholds.search import GRID, best_thresholds, forced
from jspec.thresholds.store import (
    Thresholds,
    Use,
    graft_options,
    thresholds_path,
    use_of,
    write_thresholds,
)


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns the exit status: 0, 2 for a user's error or a full disk or memory, 130 for Ctrl-C."""
    return exit_status(
        lambda: calibrate(parse(argv), Console(width=None if sys.stdout.isatty() else 120))
    )


def calibrate(options: ThresholdOptions, console: Console) -> Thresholds:
    """Calibrates, prints and keeps.

    Raises:
      ValueError: a target, a head, a method or prompts that do not fit.
    """
    asked = options.run_options()
    if options.method is not None:
        find_method(asked)
    if options.prompts is None and options.bench is None:
        prompts = default_prompts()[: options.limit]
    else:
        prompts = read_all(asked)
    pick_accelerator(options.accel)
    keep_compilations()
    target = load_target(options.target, weights_dtype(options.dtype))
    asked = choose(asked, target)
    head, drafter = make_method(asked, target)
    if drafter.budget == 1:
        raise ValueError(f"--method {drafter.name} with a budget of 1 has no room for graft")
    sampling = Sampling(options.temperature)
    names = target.fingerprint, head and head.fingerprint
    use = use_of(drafter, *names, sampling.greedy, options.retrieve)
    plan = Plan(target.config, graft(drafter, **graft_options(use)), sampling)
    ids = [encode_prompt(target, prompt) for prompt in prompts]
    job = Job(asked, target, head, plan, prompts, ids, target_stops(target))
    found = search(job, drafter, use)
    write_thresholds(thresholds_path(use), found)
    console.print(f"{len(ids)} prompts, {found.rounds} rounds, budget {use.budget}")
    names = ("edges",) if use.place == "tail" else [f"checkpoint {d}" for d in found.checkpoints]
    for name, value in zip(names, found.values, strict=True):
        console.print(f"{name}: below {value:.2f}")
    console.print(
        f"tokens a round: {found.tokens:.2f} expected, {found.unpruned:.2f} without pruning"
    )
    kept = thresholds_path(use)
    console.print(f"kept as {kept}", soft_wrap=True, markup=False, highlight=False)
    return found


def default_prompts() -> list[Prompt]:
    """Prompts of all benches, but for those that the experiments measure."""
    return [prompt for name in BENCHES for prompt in load_bench(name, LAST)[FIRST:]]


def search(job: Job, drafter, use: Use) -> Thresholds:
    """Measures rounds, and picks the thresholds that yield the most tokens a second.

    Seconds count only where thresholds save passes of a draft: then they are those of a cost profile.

    Args:
      job: its plan's method is ``graft`` of the drafter.
      drafter: the method inside.
      use: what they are for.

    Raises:
      ValueError: answers that are too short.
    """
    usual = default_thresholds(use.place)
    tail = use.place == "tail"
    watched = () if tail else tuple(d for d in CHECKPOINTS if d < drafter.needs.depth)
    rounds = measure_rounds(
        job.plan,
        job.params,
        drafter,
        watched,
        np.asarray(GRID)[:, None] if tail else forced(len(watched), len(usual)),
        job.ids,
        max_new_tokens=job.options.max_new_tokens,
        batch=job.options.batch,
        seed=job.options.seed,
        stops=job.stops,
    )
    if tail:
        mean = rounds.tokens.mean(axis=0)
        at = int(np.argmax(mean))
        values, tokens, unpruned = (GRID[at],), float(mean[at]), float(mean[0])
    else:
        values, tokens = best_thresholds(rounds, round_seconds(job, rounds.passes))
        values += usual[len(values) :]  # checkpoints beyond the drafter's reach
        unpruned = float(rounds.tokens[:, -1].mean())
    return Thresholds(
        use,
        CHECKPOINTS,
        values,
        prompts=len(job.ids),
        rounds=len(rounds.tokens),
        tokens=tokens,
        unpruned=unpruned,
    )


def round_seconds(job: Job, passes):
    """Seconds of a round whose draft takes so many passes; 1 for all where they are the same."""
    if np.ptp(passes) == 0:
        return np.ones(len(passes))
    plan = dataclasses.replace(job.plan, method=smart(job.plan.method))
    cost = add_costs(job._replace(plan=plan)).profile.cost()
    verify = float(verify_seconds(cost, np.float32(job.options.batch * plan.method.budget)))
    drafts = [float(draft_seconds(cost, round(float(n)))) for n in passes]
    return verify + float(cost.fixed) + np.array(drafts)


if __name__ == "__main__":
    sys.exit(main())
