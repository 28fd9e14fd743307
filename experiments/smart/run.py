"""SMART on the default target: does the cost model predict, is it never slower than not speculating, what does it gain.

    python -m experiments.smart.run predict       # quiet machine, about 20 minutes
    python -m experiments.smart.run speed         # quiet machine, hours: one group of prompts is one cell
    python -m experiments.smart.run controller extremes rules rules_for_real
    python -m experiments.smart.run report        # tables and figure from results.jsonl

Greedy, fp32 on a CPU and bf16 elsewhere. Cells that are in ``results.jsonl`` are not made again.
"""

import argparse
import statistics
import time
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from experiments.cells import Cells
from experiments.smart.drafters import perfect, random_drafter
from experiments.smart.report import write_report
from jspec.benches import load_bench
from jspec.checkpoint import load_head, shipped_head
from jspec.cost.measure import measure_profile, ready_rounds, time_points
from jspec.cost.profile import setting_of
from jspec.cost.store import ready_profile
from jspec.cost.table import verify_seconds
from jspec.decode import advance, decode_round
from jspec.device import device_name, keep_compilations, weights_dtype
from jspec.driver import decode_all, run_absorb_observe, run_accept_commit, run_propose
from jspec.methods import ar, ddtree, jetspec, prompt_lookup, smart, token_recycling
from jspec.models.load import load_target
from jspec.prefill import admit
from jspec.recording import record, replay_states
from jspec.state import Plan, new_state
from jspec.verification import verify

HERE = Path(__file__).parent
BENCHES = ("humaneval", "gsm8k", "mtbench", "math")
BATCHES, CAPACITIES, MOST = (1, 4, 8), (512, 1024), 64
BUDGETS = (4, 16, 32, 60)  # fixed ones: the default on a CPU, and as the paper's tables have them
NEW, CAPACITY, ROUNDS = 64, 512, 40
GROUPS = {1: 8, 4: 6, 8: 5}  # of prompts, by batch: the bootstrap is over these
DEAREST = 3.0  # plain steps per expected token: a fixed budget predicted to cost more is not run
RULES = [("exact", "sum", alpha) for alpha in (0.5, 0.8, 1.0)] + [
    ("marginal", benefit, alpha)
    for benefit in ("paths_mean", "sum")
    for alpha in (0.5, 0.7, 0.8, 0.9, 1.0)
]


class Bench:
    """The target with its head, and what methods and profiles are made of."""

    def __init__(self):
        self.target = load_target("smollm2-135m", weights_dtype("auto"))
        self.params = {"target": self.target.params}
        self.head = None
        if (name := shipped_head(self.target, causal=True)) is not None:
            self.head = load_head(name, self.target)
            self.params["head"] = self.head.params

    def methods(self):
        """Factories by name; each takes a budget."""
        made = {"prompt_lookup": prompt_lookup, "token_recycling": token_recycling}
        if self.head is not None:
            made["jetspec"] = partial(jetspec, self.head.config)
            made["ddtree"] = partial(ddtree, self.head.config)
        return made

    def plan(self, method, **options):
        return Plan(self.target.config, method, **options)

    def profile(self, plan, batch, capacity, **options):
        head = None if self.head is None else self.head.fingerprint
        setting = setting_of(plan, self.params, self.target.fingerprint, head, batch, capacity)
        return ready_profile(plan, self.params, setting, **options)

    def with_cost(self, plan, batch, capacity):
        return {**self.params, "cost": self.profile(plan, batch, capacity).cost()}

    def prompts(self, name, count):
        return [p.encode(self.target.tokenizer) for p in load_bench(name, count)]


def predict(bench, cells):
    """What a profile says of rounds that draft, with more text behind them, against these rounds, timed afterwards."""
    for capacity in CAPACITIES:
        for batch in BATCHES:
            methods = bench.methods()
            make = methods.get("ddtree", methods["prompt_lookup"])
            plan = bench.plan(smart(make(MOST // batch)))
            buckets = plan.row_buckets(batch)
            keys = {"part": "predict", "batch": batch, "capacity": capacity}
            if cells.has(**keys, rows=buckets[-1]):
                continue
            profile = bench.profile(plan, batch, capacity, anew=True)
            cost, closed = profile.cost(), profile.fit.verify(profile.rows)
            rest = float(cost.fixed + cost.draft[-1])
            times = drafting_rounds(bench, plan, batch, capacity)
            for at, rows in enumerate(buckets):
                cells.add(
                    **keys,
                    rows=rows,
                    round=times[rows],
                    table=rest + float(cost.verify[at]),
                    closed=rest + float(closed[at]),
                    disturbed=profile.disturbed,
                )


def drafting_rounds(bench, plan, batch, capacity):
    """Median seconds of rounds that draft, by row bucket, with half a cache of text."""
    params, ready = ready_rounds(plan, bench.params, batch, capacity, context=capacity // 2)

    def four(state):
        return advance(plan, params, state, 4)

    buckets = plan.row_buckets(batch)
    points = {rows: (four, lambda rows=rows: ready(rows, False)) for rows in buckets}
    return {x: statistics.median(found) / 4 for x, found in time_points(points, 20.0).items()}


def speed(bench, cells):
    """``ar``, SMART and fixed budgets take turns, group by group of prompts, each compiled and run beforehand."""
    for batch in BATCHES:
        for name, make in bench.methods().items():
            clever = bench.plan(smart(make(BUDGETS[-1])))
            params = bench.with_cost(clever, batch, CAPACITY)
            lanes = {"ar": bench.plan(ar()), "smart": clever}
            lanes |= {str(b): bench.plan(make(b)) for b in BUDGETS}
            memory = {}  # each lane's, through the benches
            for bench_name in BENCHES:
                queue = bench.prompts(bench_name, GROUPS[batch] * batch)
                for group in range(GROUPS[batch]):
                    keys = {"batch": batch, "method": name, "bench": bench_name, "group": group}
                    if cells.has(part="speed", **keys):
                        continue
                    ids = queue[group * batch : (group + 1) * batch]
                    row = turn(lanes, params, ids, batch, memory)
                    cells.add(part="speed", **keys, **row)


def turn(lanes, params, ids, batch, memory):
    """Seconds of decoding by lane, and how many texts equal ar's."""
    seconds, done, passes = {}, {}, {}
    for lane, plan in lanes.items():
        if "ar" in done and lane.isdigit() and too_dear(plan, params, batch):
            continue
        options = {"max_new_tokens": NEW, "capacity": CAPACITY, "batch": batch}
        options["warm_up"] = lane not in memory
        found, run = decode_all(plan, params, ids, memory=memory.get(lane), **options)
        memory[lane] = run.memory()
        seconds[lane], passes[lane] = run.decode_seconds, int(run.state.draft_passes)
        done[lane] = found
    texts = {lane: [one.tokens for one in found] for lane, found in done.items()}
    return {
        "new": sum(map(len, texts["ar"])),
        "seconds": seconds,
        "same": {x: sum(map(list.__eq__, texts[x], texts["ar"])) for x in texts},
        "tau": {x: sum(o.emitted for o in y) / sum(o.rounds for o in y) for x, y in done.items()},
        "passes": passes,
        "prompts": len(ids),
    }


def too_dear(plan, params, batch):
    """Whether a round of full trees is predicted to cost too much for what a tree of this depth could bring at best."""
    cost = params["cost"]
    full, plain = (float(verify_seconds(cost, batch * n)) for n in (plan.method.budget, 1))
    price = (full + float(cost.fixed) + float(cost.draft[0])) / (plain + float(cost.fixed))
    return (
        price > DEAREST * 2.7
    )  # tokens a round of the shipped heads at 64 nodes (experiments/jetspec)


def controller(bench, cells):
    """What SMART itself adds to the steps of a round that drafts and verifies whole trees."""
    for batch in BATCHES:
        for name, make in bench.methods().items():
            if cells.has(part="controller", batch=batch, method=name):
                continue
            added, whole = controller_seconds(bench, make(32), batch)
            cells.add(part="controller", batch=batch, method=name, added=added, round=whole)


def controller_seconds(bench, method, batch):
    """Seconds that SMART adds to the steps of a round, and of the whole round with it."""
    clever, plain = bench.plan(smart(method)), bench.plan(method)
    params, ready = ready_rounds(clever, bench.params, batch, CAPACITY)
    most = clever.row_buckets(batch)[-1]
    state = new_state(plain, params, batch, CAPACITY, jax.random.key(0))
    prompt = (np.arange(33) * 7 % bench.target.config.vocab_size).tolist()
    for slot in range(batch):
        state = admit(plain, params, state, slot, prompt, slot, CAPACITY)
    copies = {
        clever: lambda: ready(most, False),
        plain: lambda: jax.tree.map(jnp.copy, state),
    }
    steps = {plan: [] for plan in copies}
    for _ in range(ROUNDS):
        for plan, copy in copies.items():
            steps[plan].append(step_seconds(plan, params, copy))
    taken = {plan: np.median(found[2:], axis=0) for plan, found in steps.items()}
    points = {"round": (lambda s: advance(clever, params, s, 4), copies[clever])}
    whole = statistics.median(time_points(points, 5.0)["round"]) / 4
    return float((taken[clever] - taken[plain]).sum()), whole


def step_seconds(plan, params, copy):
    """Seconds of the steps that SMART adds to: propose, and absorb with observe."""
    state = jax.block_until_ready(copy())
    start = time.perf_counter()
    tree, state = jax.block_until_ready(run_propose(plan, params, state))
    proposed = time.perf_counter() - start
    shapes = jax.eval_shape(lambda s, tree: verify(plan, params, s, tree), state, tree)
    verified = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    given = jax.block_until_ready(run_accept_commit(plan, params, state, tree, verified))
    verdict, state, kept = given
    start = time.perf_counter()
    jax.block_until_ready(run_absorb_observe(plan, params, state, verdict, kept))
    return proposed, time.perf_counter() - start


def extremes(bench, cells):
    """400 tokens with a drafter that is always right and with one that never is: what each round verified."""
    vocab = bench.target.config.vocab_size
    [ids] = bench.prompts("gsm8k", 1)
    never = np.zeros((1, vocab), np.int32)
    options = {"max_new_tokens": 420, "capacity": CAPACITY, "stops": never}
    [text], _ = decode_all(bench.plan(ar()), bench.params, [ids], **options)
    params = {**bench.params, "text": jnp.asarray(ids + text.tokens)}
    for method in (perfect(32, 31), random_drafter(32, 31, vocab)):
        if cells.has(part="extremes", drafter=method.name):
            continue
        plan = bench.plan(smart(method))
        setting = setting_of(plan, params, "extremes", None, 1, CAPACITY)
        costs = params | {"cost": measure_profile(plan, params, setting, stops=never).cost()}
        state = new_state(plan, costs, 1, CAPACITY, jax.random.key(0), never)
        state = admit(plan, costs, state, 0, ids, 0, 400)
        step, sizes, drafted = jax.jit(decode_round, static_argnums=0), [], []
        while not state.rows.done.all():
            state, verdict = step(plan, costs, state)
            sizes.append(int(verdict.tree.size[0]))
            drafted.append(int(state.draft_passes))
        same = state.rows.tokens[0, len(ids) : len(ids) + 400].tolist() == text.tokens[:400]
        drafted = np.diff([0, *drafted]).tolist()
        cells.add(part="extremes", drafter=method.name, same=same, rows=sizes, drafted=drafted)


def rules(bench, cells):
    """The published rule against the exact one, alpha and benefit varied: by replay and the cost table."""
    name = "ddtree" if bench.head is not None else "prompt_lookup"
    method = bench.methods()[name](BUDGETS[-1])
    params = bench.with_cost(bench.plan(smart(method)), 1, CAPACITY)
    recordings = {}
    for rule, benefit, alpha in RULES:
        plan = bench.plan(smart(method, rule=rule, benefit=benefit, alpha=alpha))
        for bench_name in BENCHES:
            keys = {"rule": rule, "benefit": benefit, "alpha": alpha, "bench": bench_name}
            if cells.has(part="rules", method=name, **keys):
                continue
            if bench_name not in recordings:
                ids = bench.prompts(bench_name, 8)
                recordings[bench_name] = record(plan, params, ids, max_new_tokens=NEW, batch=8)
            emitted, spent, memory = [], [], None
            for one in recordings[bench_name]:
                options = {"max_new_tokens": NEW, "capacity": CAPACITY, "memory": memory}
                before = 0.0 if memory is None else float(memory.ledger.spent)
                [state] = replay_states(plan, params, [one], **options)
                memory = plan.method.memory(state.method)
                emitted.append(int(state.rows.emitted[0]))
                spent.append(float(memory.ledger.spent) - before)
            cells.add(part="rules", method=name, **keys, emitted=emitted, spent=spent)


def rules_for_real(bench, cells):
    """A few of the rules by decoding, in turns with ``ar``."""
    name = "ddtree" if bench.head is not None else "prompt_lookup"
    method = bench.methods()[name](BUDGETS[-1])
    for batch in (1, 8):
        params = bench.with_cost(bench.plan(smart(method)), batch, CAPACITY)
        lanes = {"ar": bench.plan(ar())}
        lanes |= {rule: bench.plan(smart(method, rule=rule)) for rule in ("exact", "marginal")}
        memory = {}
        for bench_name in BENCHES:
            keys = {"batch": batch, "bench": bench_name, "method": name}
            if cells.has(part="rules_for_real", **keys):
                continue
            ids = bench.prompts(bench_name, batch)
            cells.add(part="rules_for_real", **keys, **turn(lanes, params, ids, batch, memory))


PARTS = {
    "predict": predict,
    "speed": speed,
    "controller": controller,
    "extremes": extremes,
    "rules": rules,
    "rules_for_real": rules_for_real,
}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="+", choices=[*PARTS, "report"])
    parts = parser.parse_args().parts
    cells = Cells(HERE / "results.jsonl", device=device_name(), jax=jax.__version__)
    keep_compilations()
    if set(parts) & set(PARTS):
        bench = Bench()
        for part in PARTS:
            if part in parts:
                PARTS[part](bench, cells)
    if "report" in parts:
        write_report(cells, HERE)


if __name__ == "__main__":
    main()
