"""Token equality on the real target: every method against autoregressive decoding with the same seed (fp32).

    python -m experiments.equality.run [--methods ...] [--budgets ...] [--batches ...] [--new N]

4 prompts of each bench, temperatures 0 and 0.8 (top-p 0.95); the shipped heads draft, jetspec's and ddtree's the causal
one, dflash's the bidirectional one. ``graft-ddtree``, ``smart-ddtree`` and ``smart-graft-ddtree`` are the combinators
over a method, smart with made-up costs under which some trees pay. Writes ``results.jsonl`` as it goes and skips what
is there, and the table of ``README.md`` beside this file.
"""

import argparse
import json
from functools import partial
from pathlib import Path

import jax

from jspec.benches import load_bench
from jspec.checkpoint import load_head, shipped_head
from jspec.cost.table import make_cost
from jspec.device import keep_compilations
from jspec.driver import decode_all
from jspec.exactness import first_difference
from jspec.methods import (
    ar,
    ddtree,
    dflash,
    graft,
    jetspec,
    prompt_lookup,
    smart,
    token_recycling,
)
from jspec.models.load import load_target
from jspec.sampling import Sampling
from jspec.state import Plan

HERE = Path(__file__).parent
METHODS = {"prompt_lookup": prompt_lookup, "token_recycling": token_recycling}
HEADED = {"jetspec": (jetspec, True), "ddtree": (ddtree, True), "dflash": (dflash, False)}
SAMPLINGS = {"0": Sampling(), "0.8": Sampling(temperature=0.8, top_p=0.95)}
BENCHES = ("humaneval", "gsm8k", "mtbench", "math")
# Thresholds between which the probabilities of drafts lie: some rounds are pruned, and some are not.
COMBINATORS = {"graft": partial(graft, thresholds=(0.3, 0.2, 0.1)), "smart": smart}
SEED = 0
BUCKETS = (8, 64)  # few: each takes some seconds to compile, and trees are mostly full


def compose(name, methods):
    """(name of the method inside, budget -> method) of a name like ``smart-graft-ddtree``."""
    *outer, inner = name.split("-")

    def make(budget):
        method = methods[inner](budget)
        for combinator in reversed(outer):
            method = COMBINATORS[combinator](method)
        return method

    return inner, make


def costs(plan, batch):
    """A step of 30 ms, one more for every 38 rows, 2 ms a draft."""
    rows = plan.row_buckets(batch)
    return make_cost(rows, [0.03 + 0.0008 * n for n in rows], (0.002,))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--methods", nargs="+", default=[*METHODS, *HEADED])
    parser.add_argument("--budgets", nargs="+", type=int, default=[4, 16, 64])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--new", type=int, default=64, help="tokens a prompt")
    args = parser.parse_args()
    keep_compilations()  # reading a prompt is the same program at all budgets
    log = HERE / "results.jsonl"
    rows = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    target = load_target("smollm2-135m")
    params = {"target": target.params}
    methods, given, weights = dict(METHODS), dict.fromkeys(METHODS, params), {}
    inside = {name.split("-")[-1] for name in args.methods}
    for name in inside & set(HEADED):
        make, causal = HEADED[name]
        head = load_head(shipped_head(target, causal), target)
        methods[name], given[name] = partial(make, head.config), params | {"head": head.params}
        weights[name] = {"weights": head.fingerprint[:8]}
    prompts = [p.encode(target.tokenizer) for name in BENCHES for p in load_bench(name, 4)]
    for temperature, sampling in SAMPLINGS.items():
        reference = None
        for batch in args.batches:
            for name in args.methods:
                for budget in args.budgets:
                    case = {"T": temperature, "batch": batch, "method": name, "budget": budget}
                    inner, make = compose(name, methods)
                    case |= {"new": args.new} | weights.get(inner, {})
                    if any(case.items() <= row.items() for row in rows):
                        continue
                    options = {"max_new_tokens": args.new, "seed": SEED}
                    if reference is None:
                        plain = Plan(target.config, ar(), sampling)
                        reference = decode_all(plain, params, prompts, **options)[0]
                    plan = Plan(target.config, make(budget), sampling, buckets=BUCKETS)
                    weighed = given[inner] | {"cost": costs(plan, batch)}
                    ours = decode_all(plan, weighed, prompts, batch=batch, **options)[0]
                    found = [
                        first_difference(plan, params, p, a.tokens, b.tokens, index=i, seed=SEED)
                        for i, (p, a, b) in enumerate(zip(prompts, ours, reference, strict=True))
                    ]
                    row = case | {
                        "prompts": len(prompts),
                        "tokens": sum(len(one.tokens) for one in ours),
                        "equal": found.count(None),
                        "differences": [list(d) for d in found if d],
                        "excused": sum(d.excused for d in found if d),
                        "tau": sum(o.emitted for o in ours) / sum(o.rounds for o in ours),
                    }
                    rows.append(row)
                    with log.open("a") as file:
                        file.write(json.dumps(row) + "\n")
                    print(json.dumps(row), flush=True)
                    jax.clear_caches()  # each cell's programs take some 300 MB
    write_table(rows)


def write_table(rows):
    rows = sorted(rows, key=lambda r: (r["T"], r["batch"], r["method"], r["budget"]))
    lines = [
        "# Token equality with autoregressive decoding",
        "",
        "SmolLM2-135M-Instruct (Q4_1 weights, computed with in fp32), 2 CPU cores. 16 prompts (4 of each bench),",
        "seed 0; T = 0.8 with top-p 0.95. jetspec and ddtree draft with the shipped causal head, dflash with the",
        "bidirectional one; a chain has at most 8 nodes, whatever its budget. smart with made-up costs under which",
        "some trees pay, graft with thresholds that prune some rounds. A difference is excused where the two",
        "best perturbed scores of the target (or the token and the filters' cut) are within 1e-3.",
        "Made by `python -m experiments.equality.run`.",
        f"In all {sum(r['equal'] for r in rows)} of {sum(r['prompts'] for r in rows)} texts are equal, "
        f"{sum(r['excused'] for r in rows)} excused.",
        "",
        "| T | batch | method | budget | new | tokens | equal prompts | excused | tau |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r['T']} | {r['batch']} | {r['method']} | {r['budget']} | {r['new']} | {r['tokens']} "
        f"| {r['equal']}/{r['prompts']} | {r['excused']} | {r['tau']:.2f} |"
        for r in rows
    ]
    (HERE / "README.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
