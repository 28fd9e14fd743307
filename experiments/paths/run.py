"""Trees whose nodes know their path, against trees whose depths each have one row, and against chains.

    python -m experiments.paths.run acceptance offpath --heads NAME=HEAD ...    # by replay
    python -m experiments.paths.run speed levels --heads NAME=HEAD ... [--dtype bf16]   # on a quiet machine
    python -m experiments.paths.run report                                      # tables and figure

HEAD is a directory or a shipped head. ``jetspec`` drafts for jetspec and ddtree, ``dflash`` for dflash, ``eagle3`` for
eagle3; every NAME that begins with ``domino``, a head with a correction, drafts for domino and both forms of dartree.
Prompts and protocol are those of experiments/jetspec. Cells that are in ``results.jsonl`` are not made again.
"""

import argparse
import dataclasses
import statistics
import time
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax

from experiments.cells import Cells
from experiments.jetspec.acceptance import counts, make_tables, record_bench, replay_tables
from experiments.jetspec.run import BENCHES, BUDGETS, NEW, PROMPTS, SAMPLINGS, SPEED_BUDGETS
from experiments.lanes import AR, time_lanes
from experiments.paths.offpath import offpath
from experiments.paths.report import write_report
from jspec.benches import load_bench
from jspec.checkpoint import Head, load_head
from jspec.decode import decode_round, propose
from jspec.device import device_name, keep_compilations, weights_dtype
from jspec.driver import outcome
from jspec.method import Method
from jspec.methods import ar, dartree, ddtree, dflash, domino, eagle3, jetspec
from jspec.models.load import load_target
from jspec.prefill import admit
from jspec.recording import replay_states
from jspec.state import Plan, new_state

HERE = Path(__file__).parent
FACTORIES = {
    "dflash": dflash,
    "jetspec": jetspec,
    "ddtree": ddtree,
    "domino": domino,
    "dartree": dartree,
    "dartree_fixed": partial(dartree, variant="fixed"),
    "eagle3": eagle3,
}
TABLED = {"dflash": "chain", "jetspec": "jetspec", "ddtree": "exact"}  # replayed from tables
DRAFTS = {"dflash": ("dflash",), "jetspec": ("jetspec", "ddtree"), "eagle3": ("eagle3",)}
CORRECTED = ("domino", "dartree", "dartree_fixed")
TURNS = 30


class Lane(NamedTuple):
    """A method and whose weights it drafts with."""

    head_name: str
    head: Head
    method: str

    def make(self, budget, **options) -> Method:
        return FACTORIES[self.method](self.head.config, budget, **options)

    def budgets(self, budgets):
        """A chain has one budget: its depth and the root."""
        chain = self.method in ("dflash", "domino")
        return (1 + self.head.config.depth,) if chain else budgets

    @property
    def keys(self):
        weights = self.head.fingerprint[:8]
        return {"head": self.head_name, "method": self.method, "weights": weights}


def lanes_of(heads):
    return [
        Lane(name, head, method)
        for name, head in heads.items()
        for method in (CORRECTED if name.startswith("domino") else DRAFTS[name])
    ]


def taps_of(heads):
    return tuple(sorted({tap for head in heads.values() for tap in head.config.taps}))


class Recorded:
    """The target's answers to a bench's prompts, made when first asked for."""

    def __init__(self, target, heads, temperature, bench):
        self.taps, self._made = taps_of(heads), None
        deepest = max(lane.make(max(BUDGETS)).needs.depth for lane in lanes_of(heads))
        options = {"sampling": SAMPLINGS[temperature], "new": NEW, "depth": deepest}
        self._make = partial(record_bench, target, bench, PROMPTS, self.taps, **options)

    def __call__(self):
        self._made = self._made or self._make()
        return self._made

    def seen_by(self, head):
        """With the head's own taps alone."""
        columns = [self.taps.index(tap) for tap in head.config.taps]
        return [dataclasses.replace(one, taps=one.taps[:, columns]) for one in self()]


def acceptance(target, heads, cells):
    for temperature in SAMPLINGS:
        for bench in BENCHES:
            recorded, tables = Recorded(target, heads, temperature, bench), {}
            for lane in lanes_of(heads):
                for budget in lane.budgets(BUDGETS):
                    keys = {"part": "acceptance", "T": temperature, "bench": bench}
                    keys |= {"budget": budget} | lane.keys
                    if not cells.has(**keys):
                        cells.add(**keys, **replayed(target, lane, budget, recorded, tables))


def replayed(target, lane, budget, recorded, tables):
    """What a cell keeps of a lane's rounds; ``tables`` are made once a head."""
    if lane.method in TABLED:
        if lane.head_name not in tables:
            given = (lane.head.config, lane.head.params, target.params, recorded(), recorded.taps)
            tables[lane.head_name] = make_tables(*given, new=NEW, width=max(BUDGETS) - 1)
        given = target, recorded(), tables[lane.head_name], TABLED[lane.method], budget
        found = counts(replay_tables(*given, new=NEW))
        return found | {"passes": found["rounds"]}
    plan = Plan(target.config, lane.make(budget))
    params = {"target": target.params, "head": lane.head.params}
    states = replay_states(plan, params, recorded.seen_by(lane.head), max_new_tokens=NEW)
    passes = [int(state.draft_passes) for state in states]
    return counts([outcome(state, 0) for state in states]) | {"passes": passes}


def off_path(target, heads, cells):
    for bench in BENCHES:
        recorded = Recorded(target, heads, "0", bench)
        for name, head in heads.items():
            keys = {"part": "offpath", "bench": bench, "head": name}
            keys |= {"weights": head.fingerprint[:8]}
            if name == "eagle3" or cells.has(**keys):
                continue
            given = (head.config, head.params, target.params, recorded(), recorded.taps)
            cells.add(**keys, counts=offpath(*given, new=NEW))


def speed(target, heads, cells, dtype):
    lanes = {AR: (Plan(target.config, ar()), {"target": target.params})}
    for lane in lanes_of(heads):
        params = {"target": target.params, "head": lane.head.params}
        for budget in lane.budgets(SPEED_BUDGETS[dtype]):
            plan = Plan(target.config, lane.make(budget))
            lanes[lane.method, lane.head_name, budget] = plan, params
    drafters = " ".join(head.fingerprint[:8] for head in heads.values())
    time_lanes(target, lanes, cells, {"dtype": dtype, "weights": drafters}, BENCHES)


def levels(target, heads, cells, dtype):
    """Times of a draft and of its round on the same state, and of a draft cut to its first level; of a step of ar."""
    [prompt] = load_bench("humaneval", 1)
    ids = prompt.encode(target.tokenizer)
    cases = [(None, 1)]
    cases += [(lane, b) for lane in lanes_of(heads) for b in lane.budgets((8, 64))]
    for lane, budget in cases:
        keys = {"part": "levels", "dtype": dtype, "budget": budget}
        keys |= lane.keys if lane else {"method": "ar"}
        if cells.has(**keys):
            continue
        method = lane.make(budget) if lane else ar()
        calls = {"round": (decode_round, method), "draft": (propose, method)}
        if lane and method.needs.depth > 1:
            calls["first level"] = (propose, lane.make(budget, depth=1))
        params = {"target": target.params} | ({"head": lane.head.params} if lane else {})
        cells.add(
            **keys,
            depth=method.needs.depth,
            machine=device_name(),
            seconds=in_turns(target, params, calls, ids),
        )
        jax.clear_caches()


def in_turns(target, params, calls, ids):
    """Median seconds of jitted steps, {name: (step, method)}, on a state after the prompt ``ids``."""
    steps = {}
    for name, (step, method) in calls.items():
        plan = Plan(target.config, method)
        state = new_state(plan, params, 1, 512, jax.random.key(0))
        state = admit(plan, params, state, 0, ids, 0, 64)
        call = partial(jax.jit(step, static_argnums=0), plan, params, state)
        jax.block_until_ready(call())
        steps[name] = call
    seconds = {name: [] for name in steps}
    for _ in range(TURNS):
        for name, call in steps.items():
            start = time.perf_counter()
            jax.block_until_ready(call())
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(times) for name, times in seconds.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parts = ["acceptance", "offpath", "speed", "levels", "report"]
    parser.add_argument("parts", nargs="+", choices=parts)
    parser.add_argument("--heads", nargs="*", default=[], help="name=head")
    parser.add_argument("--dtype", choices=list(SPEED_BUDGETS), default="fp32", help="of speed")
    args = parser.parse_args()
    named = dict(given.partition("=")[::2] for given in args.heads)
    if wrong := [n for n in named if n not in DRAFTS and not n.startswith("domino")]:
        parser.error(f"no method drafts with a head called {wrong[0]!r}: see --help")
    cells = Cells(HERE / "results.jsonl")
    if set(args.parts) - {"report"}:
        keep_compilations()
        target = load_target("smollm2-135m", weights_dtype(args.dtype))
        heads = {name: load_head(where or name, target) for name, where in named.items()}
        if "acceptance" in args.parts:
            acceptance(target, heads, cells)
        if "offpath" in args.parts:
            off_path(target, heads, cells)
        if "speed" in args.parts:
            speed(target, heads, cells, args.dtype)
        if "levels" in args.parts:
            levels(target, heads, cells, args.dtype)
    if "report" in args.parts:
        write_report(cells, HERE)


if __name__ == "__main__":
    main()
