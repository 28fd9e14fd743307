"""JetSpec's and DFlash's heads on the default target: acceptance length, and speed against autoregressive decoding.

    python -m experiments.jetspec.run acceptance --heads causal=DIR bidirectional=DIR   # by replay
    python -m experiments.jetspec.run speed --heads ...                                 # on a quiet machine
    python -m experiments.jetspec.run report                                            # table and figure

{causal, bidirectional} heads x {chain, jetspec, exact} trees, temperatures 0 and 1. Cells that are in
``results.jsonl`` are not made again.
"""

import argparse
import statistics
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from experiments.cells import Cells
from jspec.benches import load_bench
from jspec.checkpoint import load_head
from jspec.device import device_name, keep_compilations
from jspec.driver import decode_all
from jspec.methods import ar, ddtree, dflash, jetspec, prompt_lookup
from jspec.models.load import load_target
from jspec.recording import record, replay
from jspec.report import markdown_table, ratio_interval
from jspec.sampling import Sampling
from jspec.state import Plan

HERE = Path(__file__).parent
BENCHES = ("humaneval", "gsm8k", "mtbench", "math")
BUDGETS = (8, 16, 32, 64, 128)
SPEED_BUDGETS = (4, 8, 16)
TREES = {"chain": dflash, "jetspec": jetspec, "exact": ddtree}
SAMPLINGS = {"0": Sampling(), "1": Sampling(temperature=1.0)}
PROMPTS, NEW = 40, 128
REPEATS, SPEED_NEW = 3, 64


def method_of(head, tree, budget):
    """A method; a chain has one budget, its depth and the root."""
    if head is None:
        return prompt_lookup(budget)
    return TREES[tree](head.config, budget)


def acceptance(target, heads, cells):
    params = {name: {"target": target.params, "head": head.params} for name, head in heads.items()}
    cases = [("prompt_lookup", None, b) for b in BUDGETS]
    for name, head in heads.items():
        cases += [(name, "chain", head.config.block_size)]
        cases += [(name, tree, b) for tree in ("jetspec", "exact") for b in BUDGETS]
    for temperature, sampling in SAMPLINGS.items():
        for bench in BENCHES:
            recordings = {}
            for name, tree, budget in cases:
                keys = {"part": "acceptance", "T": temperature, "bench": bench}
                keys |= {"head": name, "tree": tree, "budget": budget}
                if cells.has(**keys):
                    continue
                head = heads.get(name)
                plan = Plan(target.config, method_of(head, tree, budget), sampling)
                given = params.get(name, {"target": target.params})
                taps = plan.method.needs.taps
                if taps not in recordings:
                    # The deepest drafter says how far the text must run on.
                    deepest = Plan(target.config, prompt_lookup(128), sampling)
                    needs = deepest.method.needs
                    keeping = deepest.method._replace(
                        needs=needs.__class__(depth=needs.depth, taps=taps)
                    )
                    deepest = Plan(target.config, keeping, sampling)
                    prompts = [p.encode(target.tokenizer) for p in load_bench(bench, PROMPTS)]
                    recordings[taps] = record(deepest, given, prompts, max_new_tokens=NEW, batch=16)
                done = replay(plan, given, recordings[taps], max_new_tokens=NEW)
                cells.add(
                    **keys,
                    emitted=[one.emitted for one in done],
                    rounds=[one.rounds for one in done],
                    by_depth=np.sum([one.by_depth for one in done], axis=0).tolist(),
                    by_rank=np.sum([one.by_rank for one in done], axis=0).tolist(),
                )


def speed(target, heads, cells):
    params = {"target": target.params}
    lanes = {("ar", None, 1): (Plan(target.config, ar()), params)}
    for budget in SPEED_BUDGETS:
        plan = Plan(target.config, prompt_lookup(budget))
        lanes["prompt_lookup", None, budget] = plan, params
        for name, head in heads.items():
            given = params | {"head": head.params}
            for tree in ("jetspec", "exact"):
                plan = Plan(target.config, TREES[tree](head.config, budget))
                lanes[name, tree, budget] = plan, given
    for bench in BENCHES:
        for number, prompt in enumerate(load_bench(bench, 5)):
            if cells.has(part="speed", bench=bench, prompt=number):
                continue
            ids = prompt.encode(target.tokenizer)
            seconds = {lane: [] for lane in lanes}
            for _ in range(REPEATS):
                texts = set()
                for lane, (plan, given) in lanes.items():
                    options = {"max_new_tokens": SPEED_NEW, "capacity": 512}
                    [one], run = decode_all(plan, given, [ids], **options)
                    texts.add(tuple(one.tokens))
                    seconds[lane].append(run.decode_seconds / len(one.tokens))
                assert len(texts) == 1, f"{bench} {number}: not ar's tokens"
            medians = [[*lane, statistics.median(times)] for lane, times in seconds.items()]
            cells.add(part="speed", bench=bench, prompt=number, seconds=medians)


def report(cells):
    found = [row for row in cells.rows if row["part"] == "acceptance"]
    lines = [
        "# JetSpec and DFlash heads on SmolLM2-135M-Instruct",
        "",
        f"Q4_1 weights, computed with in fp32; {device_name()}. Made by `python -m experiments.jetspec.run`.",
        f"Acceptance length by replay, {PROMPTS} prompts a bench, {NEW} new tokens; budgets count the root.",
        "In brackets: 95 % bootstrap over prompts.",
        "",
    ]
    kinds = list(dict.fromkeys((row["head"], row["tree"], row["budget"]) for row in found))

    def cell(temperature, kind, bench):
        head, tree, budget = kind
        return cells.find(
            part="acceptance", T=temperature, head=head, tree=tree, budget=budget, bench=bench
        )

    for temperature in SAMPLINGS:
        rows = []
        for kind in kinds:
            there = [cell(temperature, kind, bench) for bench in BENCHES]
            if not all(there):
                continue
            numbers = []
            for one in there:
                low, high = ratio_interval(one["emitted"], one["rounds"])
                tau = sum(one["emitted"]) / sum(one["rounds"])
                numbers.append(f"{tau:.2f} [{low:.2f}, {high:.2f}]")
            mean = statistics.mean(sum(one["emitted"]) / sum(one["rounds"]) for one in there)
            rows.append([f"{kind[0]} {kind[1] or ''}", kind[2], *numbers, mean])
        lines += [f"## Acceptance length, temperature {temperature}", ""]
        lines += [markdown_table(["head and tree", "budget", *BENCHES, "mean"], rows)]
    lines += ["## Where nodes are accepted, temperature 0, all benches", ""]
    rows = []
    for kind in kinds:
        there = [cell("0", kind, bench) for bench in BENCHES]
        if not all(there) or kind[2] not in (8, 32):
            continue
        rounds = sum(sum(one["rounds"]) for one in there)
        depths = np.sum([one["by_depth"][1:8] for one in there], axis=0) / rounds
        ranks = np.sum([one["by_rank"][:4] for one in there], axis=0)
        shares = ranks / max(1, np.sum([one["by_rank"] for one in there]))
        rows.append(
            [
                f"{kind[0]} {kind[1] or ''}",
                kind[2],
                " ".join(f"{x:.2f}" for x in depths),
                " ".join(f"{x:.2f}" for x in shares),
            ]
        )
    header = [
        "head and tree",
        "budget",
        "rounds that reach depth 1..7",
        "accepted nodes of rank 1..4",
    ]
    lines += [markdown_table(header, rows)]
    fast = [row for row in cells.rows if row["part"] == "speed"]
    if fast:
        lines += [
            "## Speed against autoregressive decoding",
            "",
            f"Greedy, batch 1, {SPEED_NEW} new tokens, decoding only: each prompt's median of {REPEATS} alternating",
            "runs; medians over 5 prompts of a bench. Below 1 the method loses time. Every text equals ar's.",
            "",
        ]
        table = {}
        for row in fast:
            plain = next(t for head, _, _, t in row["seconds"] if head == "ar")
            for head, tree, budget, seconds in row["seconds"]:
                name = (f"{head} {tree or ''}", budget)
                table.setdefault(name, {}).setdefault(row["bench"], []).append(plain / seconds)
        rows = [
            [*name, *(statistics.median(by.get(bench, [float("nan")])) for bench in BENCHES)]
            for name, by in table.items()
            if name[0] != "ar "
        ]
        lines += [markdown_table(["head and tree", "budget", *BENCHES], rows)]
    lines += ["![Acceptance length against budget](acceptance.svg)", ""]
    (HERE / "README.md").write_text("\n".join(lines))
    draw(cells, kinds, cell)


def draw(cells, kinds, cell):
    figure, axes = plt.subplots(1, len(BENCHES), figsize=(13, 3.4), sharey=True)
    for axis, bench in zip(axes, BENCHES, strict=True):
        for name in dict.fromkeys(kind[:2] for kind in kinds):
            points = [
                (kind[2], sum(one["emitted"]) / sum(one["rounds"]))
                for kind in kinds
                if kind[:2] == name and (one := cell("0", kind, bench))
            ]
            axis.plot(*zip(*points), marker=".", label=f"{name[0]} {name[1] or ''}")
        axis.set(title=bench, xscale="log", xlabel="budget (rows verified)")
        axis.set_xticks(BUDGETS, BUDGETS)
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("acceptance length, temperature 0")
    axes[0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(HERE / "acceptance.svg", metadata={"Date": None})


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="+", choices=["acceptance", "speed", "report"])
    parser.add_argument(
        "--heads", nargs="*", default=[], help="name=DIR, or the name of a shipped head"
    )
    args = parser.parse_args()
    cells = Cells(HERE / "results.jsonl")
    if {"acceptance", "speed"} & set(args.parts):
        keep_compilations()
        target = load_target("smollm2-135m")
        heads = {
            name: load_head(where or name, target)
            for name, _, where in (given.partition("=") for given in args.heads)
        }
        if "acceptance" in args.parts:
            acceptance(target, heads, cells)
        if "speed" in args.parts:
            speed(target, heads, cells)
    if "report" in args.parts:
        report(cells)


if __name__ == "__main__":
    main()
