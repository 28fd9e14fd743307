"""What a round of jetspec spends outside the target's and the head's passes.

    python -m experiments.rounds.run [--head DIR]      # a quiet machine, about ten minutes

Greedy, batch 1. Every round is decoded twice, as one program and step by step, and the bare passes over as many rows
are timed beside it, in turns; medians over rounds. Writes ``README.md``.
"""

import argparse
import itertools
import statistics
import time
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jspec.attention import tree_attention
from jspec.benches import load_bench
from jspec.checkpoint import Head, load_head
from jspec.device import DTYPES, device_name, keep_compilations
from jspec.driver import STEPS, Stream
from jspec.heads.parallel import draft_table, init_head, read_context, with_draft_ids
from jspec.methods import jetspec
from jspec.models.load import load_target
from jspec.models.transformer import forward, output_logits
from jspec.report import markdown_table
from jspec.sampling import draw
from jspec.state import Plan
from jspec.train.options import parse
from jspec.train.stages import head_config
from jspec.tree import Tree, visibility

HERE = Path(__file__).parent
CONFIG = HERE.parents[1] / "configs" / "train" / "smollm2-jetspec.yaml"
BENCHES = ("humaneval", "gsm8k")
BUDGETS = (8, 16, 32, 64)
WIDTH, CAPACITY = 7, 512  # jetspec's default
WANTED = 5  # per cent, at budget 64


def random_head(target):
    """A head of the shipped one's size: what it drafts is rubbish, in trees as full."""
    options, _ = parse(["--config", str(CONFIG)])
    config = head_config(options, target)
    ids = np.arange(config.draft_vocab_size)
    weights = init_head(config, jax.random.key(0), target.params["embed"].dtype)
    params = with_draft_ids(weights, target.params, ids)
    return Head(config, params, "random weights of the shipped size", "")


@partial(jax.jit, static_argnums=0)
def target_pass(plan, params, cache, tokens, at, visible):
    """The target over M rows and the cached prefix, with its output head; and the draw, to leave no logits behind."""

    def attend(layer, q, k, v):
        keys, values = cache.keys[layer], cache.values[layer]
        return tree_attention(q[None], keys, values, cache.length, k[None], v[None], visible)[0]

    out = forward(plan.config, params["target"], tokens, at, attend, plan.method.needs.taps)
    tokens = draw(plan.sampling, output_logits(params["target"], out.hidden), None)
    return tokens, out.keys, out.values, out.taps


@partial(jax.jit, static_argnums=0)
def draw_pass(plan, logits):
    return draw(plan.sampling, logits, None)


@partial(jax.jit, static_argnums=(0, 1))
def head_pass(config, depth, params, cache, roots):
    """The head over a block, with its output head, log-softmax and best tokens."""
    return draft_table(config, params["head"], params["target"], cache, roots, depth, WIDTH)


@partial(jax.jit, static_argnums=0, donate_argnums=2)
def context_pass(config, params, cache, taps, counts):
    return read_context(config, params["head"], cache, taps, counts)


class Bare:
    """The passes of a round over a stream's present text, timed alone."""

    def __init__(self, plan, params, head, state):
        self.plan, self.params, self.config = plan, params, head.config
        nodes = jnp.arange(plan.method.budget)[None]
        live = jnp.full((1,), nodes.shape[1], jnp.int32)
        chain = Tree(nodes, nodes - 1, nodes, -1.0 * nodes, jnp.zeros_like(nodes), live)
        self.nodes, self.visible = nodes[0], visibility(chain)
        # Its own cache, since reading donates it; one token a round, whose count changes nothing of the cost.
        self.context = jax.tree.map(jnp.copy, state.method.rows)
        self.taps = jnp.ones((1, plan.path, len(head.config.taps), plan.config.hidden_size))
        self.one = jnp.ones((1,), jnp.int32)
        self.logits = jax.random.normal(state.key, (plan.config.vocab_size, nodes.shape[1]))
        for _ in range(2):  # compiles them, and runs them once
            self.run(state)

    def run(self, state):
        """Seconds by pass."""
        plan, params, seconds = self.plan, self.params, {}

        def timed(name, function, *args):
            start = time.perf_counter()
            out = jax.block_until_ready(function(*args))
            seconds[name] = time.perf_counter() - start
            return out

        # In a round's order, so that each finds the machine as its step does.
        drafted = params, state.method.rows, state.roots
        timed("head", head_pass, self.config, plan.method.needs.depth, *drafted)
        rows = params, state.cache, 100 + self.nodes, state.cache.length + self.nodes, self.visible
        timed("target", target_pass, plan, *rows)
        known = params, self.context, self.taps, self.one
        self.context = timed("context", context_pass, self.config, *known)
        timed("draw", draw_pass, plan, self.logits)
        seconds["target"] -= seconds["draw"]
        return seconds


def measure(target, head, budget, prompts, rounds):
    """Milliseconds by part, one entry a round."""
    plan = Plan(target.config, jetspec(head.config, budget, width=WIDTH))
    params = {"target": target.params, "head": head.params}
    never = np.zeros((1, target.config.vocab_size), np.int32)
    most = rounds * plan.path  # enough, whatever is accepted
    options = {"max_new_tokens": most, "capacity": CAPACITY, "stops": never, "warm_up": True}
    rows = []
    for prompt in prompts:
        whole = Stream(plan, params, [prompt], **options)
        apart = Stream(plan, params, [prompt], profile=True, **options)
        bare = Bare(plan, params, head, apart.state)
        before = dict.fromkeys(("whole", *STEPS), 0.0)
        for _ in itertools.islice(zip(whole, apart), rounds):
            now = {"whole": whole.decode_seconds} | apart.step_seconds
            row = {name: seconds - before[name] for name, seconds in now.items()}
            rows.append({name: 1000 * x for name, x in (row | bare.run(apart.state)).items()})
            before = now
    return rows


def table_row(budget, rows):
    """Medians over rounds of parts, of what steps take beyond their passes, and the share of all such."""

    def median(of):
        return statistics.median(map(of, rows))

    def passes(row):
        return row["target"] + row["head"] + row["context"]

    others = [
        median(lambda row: row["propose"] - row["head"]),
        median(lambda row: row["draw"]),
        median(lambda row: row["verify"] - row["target"] - row["draw"]),
        median(lambda row: row["accept_commit"]),
        median(lambda row: row["absorb_observe"] - row["context"]),
    ]
    return [
        budget,
        median(lambda row: row["whole"]),
        median(lambda row: row["target"]),
        median(lambda row: row["head"] + row["context"]),
        *others,
        100 * sum(max(0, x) for x in others) / median(lambda row: sum(row[step] for step in STEPS)),
        100 * median(lambda row: row["whole"] - passes(row)) / median(lambda row: row["whole"]),
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--head", help="a folder, or the name of a shipped head")
    parser.add_argument("--rounds", type=int, default=24, help="of each prompt")
    parser.add_argument("--budgets", type=int, nargs="+", default=BUDGETS)
    args = parser.parse_args()
    keep_compilations()
    table = []
    for dtype, kind in DTYPES.items():
        target = load_target("smollm2-135m", kind)
        head = load_head(args.head, target) if args.head else random_head(target)
        prompts = [load_bench(name, 1)[0].encode(target.tokenizer) for name in BENCHES]
        for budget in args.budgets:
            rows = measure(target, head, budget, prompts, args.rounds)
            table.append([dtype, *table_row(budget, rows)])
    header = ["weights", "budget", "round, ms", "target's pass", "head's passes", "tree", "draw"]
    header += ["rest of verify", "accept, commit", "rest of absorb"]
    header += ["else, step by step, %", "else, one program, %"]
    config = head.config
    lines = [
        "# What a round of jetspec spends outside the passes",
        "",
        f"SmolLM2-135M-Instruct (Q4_1 weights), greedy, batch 1, cache of {CAPACITY} rows; {device_name()}.",
        f"Head: {head.name}: {config.num_layers} layers, block {config.block_size}, draft vocabulary"
        f" {config.draft_vocab_size or config.vocab_size}.",
        "Made by `python -m experiments.rounds.run`: every round as one program and step by step, and the bare passes",
        f"over as many rows, in turns; medians of {args.rounds * len(prompts)} rounds, in ms.",
        "",
        markdown_table(header, table),
        "The target's pass is its forward with the output head; the head's are the projection of newly known tokens,",
        "the block, its output head, log-softmax and best tokens. All else counts as else: building the tree, the draw",
        "of the target's tokens, packing, the walk, writing the cache and the text, and, step by step, starting four",
        f"programs instead of one. Wanted is at most {WANTED} % at budget 64.",
        "",
    ]
    text = "\n".join(lines)
    (HERE / "README.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
