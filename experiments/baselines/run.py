"""The training-free drafters on the default target: acceptance length, and speed against autoregressive decoding.

    python -m experiments.baselines.run acceptance    # prompt_lookup by replay, token_recycling by decoding
    python -m experiments.baselines.run speed         # on a quiet machine: alternating with ar in one process
    python -m experiments.baselines.run report        # tables and figure from results.jsonl

Greedy. Results are appended to ``results.jsonl`` one cell at a time, and cells that are there are not made again.
"""

import argparse
import math
import statistics
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from experiments.cells import Cells
from jspec.benches import Prompt, load_bench, user_turn
from jspec.device import device_name
from jspec.driver import decode_all
from jspec.methods import ar, prompt_lookup, token_recycling
from jspec.models.load import load_target
from jspec.recording import record, replay
from jspec.report import markdown_table, ratio_interval
from jspec.state import Plan

HERE = Path(__file__).parent
BENCHES = ("humaneval", "gsm8k", "mtbench", "math")
BUDGETS = (4, 8, 16, 32, 64)
SPEED_BUDGETS = (4, 16, 64)
NEW = 128  # new tokens, by replay
DECODED = 64  # new tokens, by decoding
PASSAGES = (
    "def area(shapes):\n    total = 0\n    for shape in shapes:\n        if shape.kind == 'circle':\n"
    "            total += 3.14159 * shape.radius * shape.radius\n        elif shape.kind == 'square':\n"
    "            total += shape.side * shape.side\n        elif shape.kind == 'rectangle':\n"
    "            total += shape.width * shape.height\n    return total\n",
    "The lighthouse keeper climbed the stairs at dusk, lit the lamp, wrote the weather in his book and waited for "
    "the boats to come home. When the last one had passed the rocks he ate his supper, read a letter from his "
    "sister and went to bed.\n\n",
    "2024-03-01 08:00:00 INFO  server: started on port 8080\n"
    "2024-03-01 08:00:02 INFO  db: connected to replica-2\n"
    "2024-03-01 08:00:05 WARN  cache: miss ratio 0.31 above limit\n"
    "2024-03-01 08:00:09 INFO  server: GET /health 200\n",
    "- Flour: 500 g\n- Butter: 250 g\n- Sugar: 125 g\n- Eggs: 3\n- Vanilla: 1 teaspoon\n- Salt: a pinch\n"
    "- Milk: 2 tablespoons\n\n",
    "SELECT customer.name, SUM(orders.total) AS spent\nFROM customer JOIN orders ON orders.customer_id = customer.id\n"
    "WHERE orders.placed >= '2024-01-01'\nGROUP BY customer.name\nORDER BY spent DESC;\n\n",
)
REQUESTS = (  # most of an answer stands in the prompt, if the target does what it is asked
    f"Repeat this code exactly, changing nothing:\n\n{PASSAGES[0]}",
    f"Rename the function to total_area and print all of the code again:\n\n{PASSAGES[0]}",
    f"Add a one-line docstring to this function and print all of the code:\n\n{PASSAGES[0]}",
    "Count from 1 to 60, one number on each line.",
    "Write the sentence 'All work and no play makes Jack a dull boy.' ten times.",
)
SETS = {
    # Text that repeats itself: a passage twice and the beginning of a third time, to be continued.
    "repetitive": [
        Prompt(f"repetitive/{i}", text=(3 * text)[: len(text) * 23 // 10])
        for i, text in enumerate(PASSAGES)
    ],
    "requests": [user_turn(f"requests/{i}", text) for i, text in enumerate(REQUESTS)],
}


def bench(name, count):
    return SETS[name][:count] if name in SETS else load_bench(name, count)


def acceptance(target, log):
    params = {"target": target.params}
    prompts = {b: [p.encode(target.tokenizer) for p in bench(b, 40)] for b in BENCHES}
    deepest = Plan(target.config, prompt_lookup(BUDGETS[-1]))
    for name in BENCHES:
        recordings = None
        for budget in BUDGETS:
            keys = {
                "part": "acceptance",
                "method": "prompt_lookup",
                "bench": name,
                "budget": budget,
            }
            if log.has(**keys):
                continue
            if recordings is None:
                options = {"max_new_tokens": NEW, "batch": 8}
                recordings = record(deepest, params, prompts[name], **options)
            plan = Plan(target.config, prompt_lookup(budget))
            log.add(**keys, **counts(replay(plan, params, recordings, max_new_tokens=NEW)))
    # A cold table is a row's own, so a batch changes nothing; a kept one is shared by the rows.
    for scope, title, batch in (("prompt", "cold", 10), ("kept", "kept", 2)):
        for budget in BUDGETS:
            # Few buckets: a batch is full most of the time, and each bucket takes long to compile.
            buckets = tuple(sorted({budget, max(1, batch * budget // 4)}))
            drafter = token_recycling(budget, scope=scope)
            plan = Plan(target.config, drafter, buckets=buckets)
            for name in BENCHES:
                method = f"token_recycling {title}"
                keys = {"part": "acceptance", "method": method, "bench": name, "budget": budget}
                if log.has(**keys):
                    continue
                # One capacity for all benches, so that a program is compiled once.
                options = {"max_new_tokens": DECODED, "batch": batch, "capacity": 512}
                log.add(
                    **keys, **counts(decode_all(plan, params, prompts[name][:10], **options)[0])
                )


def counts(done):
    return {"emitted": [one.emitted for one in done], "rounds": [one.rounds for one in done]}


def speed(target, log):
    """Alternates ar and the methods prompt by prompt, each compiled beforehand."""
    params = {"target": target.params}
    makers = {"prompt_lookup": prompt_lookup, "token_recycling cold": token_recycling}
    cells = [(name, budget) for name in makers for budget in SPEED_BUDGETS]
    plans = {("ar", 1): Plan(target.config, ar())}
    plans |= {cell: Plan(target.config, makers[cell[0]](cell[1])) for cell in cells}
    for name in (*SETS, *BENCHES):
        for number, prompt in enumerate(bench(name, 5)):
            ids = prompt.encode(target.tokenizer)
            if log.has(part="speed", bench=name, prompt=number):
                continue
            seconds, tokens = {}, {}
            for cell, plan in plans.items():
                options = {"max_new_tokens": DECODED, "capacity": 512}
                [one], run = decode_all(plan, params, [ids], **options)
                tokens[cell] = one.tokens
                seconds["{} {}".format(*cell)] = run.decode_seconds / len(one.tokens)
            same = sum(t == tokens["ar", 1] for t in tokens.values())
            assert same == len(plans), f"{name} {number}: not ar's tokens"
            log.add(part="speed", bench=name, prompt=number, new=len(tokens["ar", 1]), **seconds)


def report(log):
    methods = ("prompt_lookup", "token_recycling cold", "token_recycling kept")
    found = {
        (r["method"], r["bench"], r["budget"]): r for r in log.rows if r["part"] == "acceptance"
    }

    def tau(method, name, budget):
        row = found.get((method, name, budget))
        return sum(row["emitted"]) / sum(row["rounds"]) if row else math.nan

    lines = [
        "# Training-free drafters on SmolLM2-135M-Instruct",
        "",
        f"Q4_1 weights, computed with in fp32; greedy, {device_name()}. Made by `python -m experiments.baselines.run`.",
        "",
        "## Acceptance length",
        "",
        "Tokens emitted a round, bonus included, pooled over rounds; budgets count the root.",
        f"prompt_lookup: 40 prompts a bench, {NEW} new tokens, by replay of recorded text.",
        f"token_recycling: 10 prompts a bench, {DECODED} new tokens, by decoding: cold (a new table a prompt) and",
        "kept (one table through the bench, two prompts at a time).",
        "In brackets: 95 % bootstrap over prompts.",
        "",
    ]
    rows = []
    for method in methods:
        for budget in BUDGETS:
            cells = []
            for name in BENCHES:
                if row := found.get((method, name, budget)):
                    low, high = ratio_interval(row["emitted"], row["rounds"])
                    cells.append(f"{tau(method, name, budget):.2f} [{low:.2f}, {high:.2f}]")
                else:
                    cells.append("not run yet")
            mean = statistics.mean(tau(method, name, budget) for name in BENCHES)
            rows.append([method, budget, *cells, "-" if math.isnan(mean) else mean])
    lines.append(markdown_table(["method", "budget", *BENCHES, "mean"], rows))
    fast = [r for r in log.rows if r["part"] == "speed"]
    names = (
        [k for k in fast[0] if k not in ("part", "bench", "prompt", "new", "ar 1")] if fast else []
    )
    lines += [
        "## Speed against autoregressive decoding",
        "",
        "Seconds a token of `ar` over the method's: below 1 the method loses time, since verifying 64 rows costs",
        f"about four single steps on this machine. Batch 1, {DECODED} new tokens, decoding only; medians over 5",
        "prompts (lowest and highest in brackets), ar and the methods alternating prompt by prompt in one process.",
        "Every text equals ar's. `repetitive`: five raw texts, each a passage twice and the beginning of a third time.",
        "`requests`: five requests to copy, edit or count, of which this target does few, so that its answers repeat",
        "less than one would think.",
        "",
    ]
    table = []
    for cell in names:
        row = [cell]
        for name in (*BENCHES, *SETS):
            ratios = [r["ar 1"] / r[cell] for r in fast if r["bench"] == name]
            spread = ratios and f"[{min(ratios):.2f}, {max(ratios):.2f}]"
            if 0 < len(ratios) < 5:
                spread += f" of {len(ratios)} so far"
            row.append(f"{statistics.median(ratios):.2f} {spread}" if ratios else "not run yet")
        table.append(row)
    lines.append(markdown_table(["method, budget", *BENCHES, *SETS], table))
    lines += ["![Acceptance length against budget](acceptance.svg)", ""]
    (HERE / "README.md").write_text("\n".join(lines))

    figure, axes = plt.subplots(1, 4, figsize=(13, 3.2), sharey=True)
    for axis, name in zip(axes, BENCHES, strict=True):
        for method, mark in zip(methods, "os^", strict=True):
            axis.plot(BUDGETS, [tau(method, name, b) for b in BUDGETS], marker=mark, label=method)
        axis.set(title=name, xscale="log", xlabel="budget (rows verified)")
        axis.set_xticks(BUDGETS, BUDGETS)
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("acceptance length")
    axes[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(HERE / "acceptance.svg", metadata={"Date": None})


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="+", choices=["acceptance", "speed", "report"])
    parts = parser.parse_args().parts
    log = Cells(HERE / "results.jsonl")
    if {"acceptance", "speed"} & set(parts):
        target = load_target("smollm2-135m")
        if "acceptance" in parts:
            acceptance(target, log)
        if "speed" in parts:
            speed(target, log)
    if "report" in parts:
        report(log)


if __name__ == "__main__":
    main()
