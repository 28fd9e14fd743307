"""JetSpec's and DFlash's heads on the default target: acceptance length, and speed against autoregressive decoding.

    python -m experiments.jetspec.run acceptance --heads causal=DIR bidirectional=DIR   # by replay
    python -m experiments.jetspec.run recycling                                         # by decoding
    python -m experiments.jetspec.run speed --heads ... [--dtype bf16]                  # on a quiet machine
    python -m experiments.jetspec.run report                                            # table and figure

{causal, bidirectional} heads x {chain, jetspec, exact} trees, temperatures 0 and 1, and prompt lookup. Token recycling
learns from all that the target says of a tree, so it can't be replayed: it decodes, at fewer budgets. Cells that are in
``results.jsonl`` are not made again.
"""

import argparse
import itertools
import statistics
from pathlib import Path

import numpy as np

from experiments.cells import Cells
from experiments.jetspec.acceptance import (
    TREES,
    bare,
    counts,
    make_tables,
    record_bench,
    replay_tables,
    tau,
)
from experiments.lanes import draw_acceptance, speed_lines, time_lanes
from jspec.benches import load_bench
from jspec.checkpoint import load_head
from jspec.device import keep_compilations, weights_dtype
from jspec.driver import decode_all
from jspec.methods import ar, prompt_lookup, token_recycling
from jspec.models.load import load_target
from jspec.recording import replay
from jspec.report import markdown_table, ratio_interval
from jspec.sampling import Sampling
from jspec.state import Plan

HERE = Path(__file__).parent
BENCHES = ("humaneval", "gsm8k", "mtbench", "math")
BUDGETS = (8, 16, 32, 64, 128)
RECYCLED = (
    ("0", (8, 16, 32, 64)),
    ("1", (8, 16, 32, 64)),
    ("0", (128,)),
    ("1", (128,)),
)  # the dearest last
SPEED_BUDGETS = {"fp32": (4, 8, 16), "bf16": (8, 16, 32)}
LANES = (("causal", "jetspec"), ("causal", "exact"), ("bidirectional", "chain"))
SAMPLINGS = {"0": Sampling(), "1": Sampling(temperature=1.0)}
PROMPTS, NEW, CAPACITY = 40, 128, 512


def acceptance(target, heads, cells):
    cases = [("prompt_lookup", None, b) for b in BUDGETS]
    for name, head in heads.items():
        cases += [
            (name, "chain", head.config.block_size)
        ]  # a chain has one budget: its depth and the root
        cases += [(name, tree, b) for tree in ("jetspec", "exact") for b in BUDGETS]
    taps = tuple(sorted({tap for head in heads.values() for tap in head.config.taps}))
    depth = prompt_lookup(max(BUDGETS)).needs.depth  # deeper than the heads draft
    for temperature, sampling in SAMPLINGS.items():
        for bench in BENCHES:
            recordings, tables = None, {}
            for name, tree, budget in cases:
                keys = {"part": "acceptance", "T": temperature, "bench": bench}
                keys |= {"head": name, "tree": tree, "budget": budget} | weights(heads.get(name))
                if cells.has(**keys):
                    continue
                if recordings is None:
                    shape = {"sampling": sampling, "new": NEW, "depth": depth}
                    recordings = record_bench(target, bench, PROMPTS, taps, **shape)
                if name in heads:
                    if name not in tables:
                        given = (heads[name].config, heads[name].params, target.params)
                        shape = {"new": NEW, "width": max(BUDGETS) - 1}
                        tables[name] = make_tables(*given, recordings, taps, **shape)
                    done = replay_tables(target, recordings, tables[name], tree, budget, new=NEW)
                else:
                    plan = Plan(target.config, prompt_lookup(budget))
                    params = {"target": target.params}
                    done = replay(plan, params, bare(recordings), max_new_tokens=NEW)
                cells.add(**keys, **counts(done))


def weights(*heads):
    """Says in a cell which weights it is about, so that other heads make cells of their own."""
    known = [head.fingerprint[:8] for head in heads if head]
    return {"weights": " ".join(known)} if known else {}


def speed(target, heads, cells, dtype):
    drafters = weights(*heads.values())
    params = {"target": target.params}
    lanes = {("ar", None, 1): (Plan(target.config, ar()), params)}
    for budget in SPEED_BUDGETS[dtype]:
        plan = Plan(target.config, prompt_lookup(budget))
        lanes["prompt_lookup", None, budget] = plan, params
        for name, tree in LANES:
            if tree == "chain" and budget > heads[name].config.block_size:
                continue  # a chain has no more nodes
            plan = Plan(target.config, TREES[tree](heads[name].config, budget))
            lanes[name, tree, budget] = plan, params | {"head": heads[name].params}
    time_lanes(target, lanes, cells, {"dtype": dtype} | drafters, BENCHES)


def recycling(target, cells):
    """Token recycling with a new table a prompt: a row's own, so that the batch changes nothing."""
    params, batch = {"target": target.params}, 10
    for temperature, budgets in RECYCLED:
        for budget, bench in itertools.product(budgets, BENCHES):
            keys = {"part": "acceptance", "T": temperature, "bench": bench}
            keys |= {"head": "token_recycling", "tree": None, "budget": budget}
            if cells.has(**keys):
                continue
            shape = {"buckets": tuple(batch * budget * part // 8 for part in (1, 2, 3, 4, 6, 8))}
            plan = Plan(
                target.config,
                token_recycling(budget, scope="prompt"),
                SAMPLINGS[temperature],
                **shape,
            )
            ids = [prompt.encode(target.tokenizer) for prompt in load_bench(bench, PROMPTS)]
            # One capacity for all benches, so that a program is compiled once.
            options = {"max_new_tokens": NEW, "batch": batch, "capacity": CAPACITY}
            done, _ = decode_all(plan, params, ids, **options)
            emitted, rounds = ([getattr(x, name) for x in done] for name in ("emitted", "rounds"))
            cells.add(**keys, emitted=emitted, rounds=rounds)
            verified = sum(x.verified for x in done) / sum(rounds)
            print(f"{verified:.1f} of {budget} nodes verified a round", flush=True)


def report(cells):
    found = [row for row in cells.rows if row["part"] == "acceptance"]
    lines = [
        "# JetSpec and DFlash heads on SmolLM2-135M-Instruct",
        "",
        "Q4_1 weights, computed with in fp32. Made by `python -m experiments.jetspec.run`.",
        f"Acceptance length by replay, {PROMPTS} prompts a bench, {NEW} new tokens; budgets count the root.",
        "In brackets: 95 % bootstrap over prompts. token_recycling, with a new table a prompt, by decoding.",
        "",
    ]
    if (HERE / "ABLATIONS.md").exists():
        lines += ["What a head's training changes: [ABLATIONS.md](ABLATIONS.md).", ""]
    lanes = list(dict.fromkeys((row["head"], row["tree"]) for row in found))
    kinds = {(row["head"], row["tree"], row["budget"]) for row in found}
    kinds = sorted(kinds, key=lambda kind: (lanes.index(kind[:2]), kind[2]))
    by_key = {(r["T"], r["head"], r["tree"], r["budget"], r["bench"]): r for r in found}

    def cell(temperature, kind, bench):
        return by_key.get((temperature, *kind, bench))

    for temperature in SAMPLINGS:
        rows = []
        for kind in kinds:
            there = [cell(temperature, kind, bench) for bench in BENCHES]
            if not all(there):
                continue
            numbers = []
            for one in there:
                low, high = ratio_interval(one["emitted"], one["rounds"])
                numbers.append(f"{tau(one):.2f} [{low:.2f}, {high:.2f}]")
            mean = statistics.mean(map(tau, there))
            rows.append([f"{kind[0]} {kind[1] or ''}", kind[2], *numbers, mean])
        if not rows:
            continue
        lines += [f"## Acceptance length, temperature {temperature}", ""]
        lines += [markdown_table(["head and tree", "budget", *BENCHES, "mean"], rows)]
    lines += against(kinds, cell)
    lines += ["## Where nodes are accepted, temperature 0, all benches", ""]
    rows = []
    for kind in kinds:
        there = [cell("0", kind, bench) for bench in BENCHES]
        if not all(there) or kind[2] not in (8, 32) or "by_depth" not in there[0]:
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
    lines += speed_lines(cells, SPEED_BUDGETS, BENCHES)
    lines += ["![Acceptance length against budget](acceptance.svg)", ""]
    (HERE / "README.md").write_text("\n".join(lines))
    curves = {bench: {} for bench in BENCHES}
    for kind, bench in itertools.product(kinds, BENCHES):
        if one := cell("0", kind, bench):
            name = f"{kind[0]} {kind[1] or ''}"
            curves[bench].setdefault(name, []).append((kind[2], tau(one)))
    draw_acceptance(curves, BUDGETS, HERE / "acceptance.svg")


def against(kinds, cell):
    """The causal head's mean over the benches minus the bidirectional one's, at equal trees."""
    rows = []
    for tree, budget in dict.fromkeys(kind[1:] for kind in kinds if kind[0] == "causal"):
        row = [tree, budget]
        for temperature in SAMPLINGS:
            pair = [
                [cell(temperature, (name, tree, budget), bench) for bench in BENCHES]
                for name in ("causal", "bidirectional")
            ]
            row.append(difference(*pair) if all(map(all, pair)) else "")
        rows.append(row)
    title = "## Causal minus bidirectional, mean over the benches"
    note = "In brackets: 95 % bootstrap over prompts, the same ones for both heads. Other seeds: ABLATIONS.md."
    header = ["tree", "budget", *(f"temperature {t}" for t in SAMPLINGS)]
    return [title, "", note, "", markdown_table(header, rows)]


def difference(ours, theirs, draws=2000):
    random = np.random.default_rng(0)
    picks = [random.integers(0, len(one["rounds"]), (draws, len(one["rounds"]))) for one in ours]

    def mean(cells_of_benches, picks):
        taus = [
            np.asarray(one["emitted"])[at].sum(-1) / np.asarray(one["rounds"])[at].sum(-1)
            for one, at in zip(cells_of_benches, picks, strict=True)
        ]
        return np.mean(taus, axis=0)

    everyone = [np.arange(len(one["rounds"]))[None] for one in ours]
    [middle] = mean(ours, everyone) - mean(theirs, everyone)
    low, high = np.quantile(mean(ours, picks) - mean(theirs, picks), (0.025, 0.975))
    return f"{middle:+.3f} [{low:+.3f}, {high:+.3f}]"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="+", choices=["acceptance", "recycling", "speed", "report"])
    parser.add_argument(
        "--heads", nargs="*", default=[], help="name=DIR, or the name of a shipped head"
    )
    parser.add_argument("--dtype", choices=list(SPEED_BUDGETS), default="fp32", help="of speed")
    args = parser.parse_args()
    cells = Cells(HERE / "results.jsonl")
    if {"acceptance", "recycling", "speed"} & set(args.parts):
        keep_compilations()
        target = load_target("smollm2-135m", weights_dtype(args.dtype))
        heads = {
            name: load_head(where or name, target)
            for name, _, where in (given.partition("=") for given in args.heads)
        }
        if "acceptance" in args.parts:
            acceptance(target, heads, cells)
        if "recycling" in args.parts:
            recycling(target, cells)
        if "speed" in args.parts:
            speed(target, heads, cells, args.dtype)
    if "report" in args.parts:
        report(cells)


if __name__ == "__main__":
    main()
