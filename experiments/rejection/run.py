"""The match rule on the likeliest nodes against rejection rules on sampled trees, with the default target and its head.

    python -m experiments.rejection.run measure     # quiet machine, about an hour
    python -m experiments.rejection.run report      # the table from results.jsonl

Rounds land where the match rule lands them. In each, the best tree of ``ddtree`` is verified, and trees of as many
nodes that are drawn from the head's own law at the same temperature, siblings without replacement, in the shape that is
best for token recycling's rank prior. For the match rule the tokens expected of a round are known: one, and of every
drafted node the target's probability of its path. Rejection rules are run with ``DRAWS`` trees and coins a round.
"""

import argparse
import dataclasses
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp

from experiments.cells import Cells
from jspec.benches import load_bench
from jspec.calibration import along_paths
from jspec.checkpoint import load_head, shipped_head
from jspec.decode import decode_round
from jspec.device import device_name, keep_compilations, weights_dtype
from jspec.heads.parallel import draft_table
from jspec.methods import ddtree
from jspec.methods.token_recycling import best_template
from jspec.models.load import load_target
from jspec.prefill import admit
from jspec.rejection import draw_siblings, sequoia, traversal
from jspec.report import markdown_table, ratio_interval
from jspec.sampling import Sampling, warp
from jspec.state import Plan, new_state
from jspec.text import encode_prompt
from jspec.tree import HEAD, Tree
from jspec.verification import verify

HERE = Path(__file__).parent
BENCHES = ("humaneval", "gsm8k", "mtbench")
TEMPERATURES, BUDGETS = (0.5, 1.0), (8, 16)
COUNT, NEW, DRAWS, FAN = 5, 48, 4, 8
RULES = {"sequoia": sequoia, "traversal": traversal}
COLUMNS = ("match, best nodes", "match, sampled", *RULES)


def target_laws(plan, params, state, tree):
    """The target's law after every node, as it is sampled from: [B, N, V]."""
    needs = dataclasses.replace(plan.method.needs, top_k=plan.config.vocab_size)  # all logits
    whole = dataclasses.replace(plan, method=plan.method._replace(needs=needs))
    found = verify(whole, params, state, tree)
    logits = jnp.zeros(found.top_logits.shape)
    row, node = jnp.ogrid[: tree.batch, : tree.budget]
    logits = logits.at[row[..., None], node[..., None], found.top_tokens].set(found.top_logits)
    flat = logits.reshape(-1, logits.shape[-1]).T
    return jax.nn.softmax(warp(plan.sampling, flat), axis=0).T.reshape(logits.shape)


def expected(tree, laws, depth):
    """Tokens that a round of the match rule emits in the mean."""
    row = jnp.arange(tree.batch)[:, None]
    edges = laws[row, jnp.maximum(tree.parents, 0), tree.tokens]
    drafted = tree.live & (tree.parents >= 0)
    return 1 + jnp.where(drafted, along_paths(tree, edges, depth), 0).sum(axis=1)


def sampled_tree(key, table, roots, budget, depth, temperature, vocab):
    """A tree drawn from the head's law, and that law at every node: batch 1."""
    parents, ranks, depths, _ = best_template(budget, FAN, depth)
    logits = jnp.full((depth + 1, vocab), -jnp.inf)
    level = jnp.arange(depth)[:, None]
    logits = logits.at[level, table.tokens[0]].set(table.logps[0] / temperature)
    logits = logits.at[depth].set(0.0)  # the deepest nodes have no children
    each = logits[depths]
    drawn, _ = draw_siblings(key, each, FAN)
    tokens = jnp.where(depths > 0, drawn[parents, ranks], roots[0])
    one = Tree(
        tokens[None].astype(jnp.int32),
        jnp.asarray(parents)[None],
        jnp.asarray(depths)[None],
        -jnp.asarray(depths, jnp.float32)[None],  # nobody asks for scores
        jnp.full((1, budget), HEAD, jnp.int8),
        jnp.array([budget], jnp.int32),
    )
    return one, jax.nn.softmax(each, axis=-1)[None]


@partial(jax.jit, static_argnums=(0, 1))
def measured(plan, head, params, state, key):
    """Tokens of a round by column, and the state after it."""
    method, depth = plan.method, plan.method.needs.depth
    proposal, _ = method.propose(params, state.method, state.roots)
    best = target_laws(plan, params, state, proposal.tree)
    out = {COLUMNS[0]: expected(proposal.tree, best, depth)[0]}
    vocab, width = plan.config.vocab_size, head.draft_vocab_size or head.vocab_size
    table = draft_table(
        head, params["head"], params["target"], state.method.rows, state.roots, depth, width
    )

    def one(key):
        draw, toss = jax.random.split(key)
        temperature = plan.sampling.temperature
        tree, q = sampled_tree(draw, table, state.roots, method.budget, depth, temperature, vocab)
        p = target_laws(plan, params, state, tree)
        coins = jax.random.uniform(toss, tree.tokens.shape)
        counts = {name: rule(tree, p, q, coins, depth).count[0] for name, rule in RULES.items()}
        return {COLUMNS[1]: expected(tree, p, depth)[0], **counts}

    many = jax.lax.map(one, jax.random.split(key, DRAWS))
    out |= {name: x.astype(jnp.float32).mean() for name, x in many.items()}
    return out, decode_round(plan, params, state)[0]


def measure(cells):
    target = load_target("smollm2-135m", weights_dtype("auto"))
    head = load_head(shipped_head(target, causal=True), target)
    params = {"target": target.params, "head": head.params}
    for budget in BUDGETS:
        for temperature in TEMPERATURES:
            method = ddtree(head.config, budget)
            plan = Plan(target.config, method, Sampling(temperature), buckets=())
            for bench in BENCHES:
                for number, prompt in enumerate(load_bench(bench, COUNT)):
                    keys = {"bench": bench, "budget": budget, "temperature": temperature}
                    if cells.has(**keys, prompt=prompt.id):
                        continue
                    state = new_state(plan, params, 1, 512, jax.random.key(0))
                    ids = encode_prompt(target, prompt)
                    state = admit(plan, params, state, 0, ids, number, NEW)
                    sums, rounds = dict.fromkeys(COLUMNS, 0.0), 0
                    while not state.rows.done.all():
                        key = jax.random.fold_in(jax.random.key(1), rounds)
                        found, state = measured(plan, head.config, params, state, key)
                        rounds += 1
                        for name, value in found.items():
                            sums[name] += float(value)
                    cells.add(**keys, prompt=prompt.id, rounds=rounds, **sums, device=device_name())


def report(cells, folder):
    """Writes ``README.md``."""
    lines = [
        "# Rejection rules on sampled trees",
        "",
        "SmolLM2-135M-Instruct and its causal head. Made by `python -m experiments.rejection.run`.",
        "Tokens a round, bonus included; in brackets 95 % bootstrap over prompts. `match` is jspec's rule, on the best",
        "nodes (`ddtree`) and on sampled trees; `sequoia` and `traversal` reject, on the same sampled trees.",
        "",
    ]
    table = []
    for temperature in TEMPERATURES:
        for budget in BUDGETS:
            mine = [
                r for r in cells.rows if (r["temperature"], r["budget"]) == (temperature, budget)
            ]
            row = [f"{temperature:g}", budget]
            rounds = [r["rounds"] for r in mine]
            for name in COLUMNS:
                tops = [r[name] for r in mine]
                if not mine:
                    row.append("not run yet")
                    continue
                low, high = ratio_interval(tops, rounds)
                row.append(f"{sum(tops) / sum(rounds):.2f} [{low:.2f}, {high:.2f}]")
            table.append(row)
    lines.append(markdown_table(["temperature", "budget", *COLUMNS], table))
    (folder / "README.md").write_text("\n".join(lines), encoding="utf-8")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="+", choices=["measure", "report"])
    parts = parser.parse_args().parts
    cells = Cells(HERE / "results.jsonl")
    keep_compilations()
    if "measure" in parts:
        measure(cells)
    if "report" in parts:
        report(cells, HERE)


if __name__ == "__main__":
    main()
