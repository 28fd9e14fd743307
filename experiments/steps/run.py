"""The target's step against transformers' single-token step, and what a round spends outside it.

    python -m experiments.steps.run      # needs the parity extra (torch), a quiet machine and about five minutes

Alternating in one process, medians. Writes ``README.md``.
"""

import statistics
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers

from jspec.benches import BUILT_IN, load_bench
from jspec.device import DTYPES, device_name
from jspec.driver import STEPS, decode_all
from jspec.methods import ar, prompt_lookup, token_recycling
from jspec.models.load import load_target, locate
from jspec.prefill import admit
from jspec.report import markdown_table
from jspec.state import Plan, new_state
from jspec.tree import Tree
from jspec.verification import run_rows

HERE = Path(__file__).parent
ROWS = (1, 2, 4, 8, 16, 32, 64)
WANTED = {1: 0.85, 8: 1.45, 16: 1.8, 32: 2.6, 64: 3.9}
CONTEXT, REPEATS = 200, 9


def torch_model():
    return transformers.AutoModelForCausalLM.from_pretrained(
        locate("smollm2-135m"), dtype=torch.float32
    ).eval()


def median_ms(seconds):
    return 1000 * statistics.median(seconds)


def steps(targets, model):
    """Milliseconds of a step of N rows over a 256-row cache, by dtype, and of transformers' single step."""
    ids = np.arange(CONTEXT + 1) % 1000 + 500
    step = jax.jit(run_rows, static_argnums=(0, 4))

    def begin(target):
        params, plan = {"target": target.params}, Plan(target.config, ar())
        state = new_state(plan, params, 1, 256, jax.random.key(0))
        return plan, params, admit(plan, params, state, 0, ids.tolist(), 0, 40)

    def chain(rows):
        nodes = jnp.arange(rows)[None]
        live = jnp.full((1,), rows, jnp.int32)
        tokens = 100 + nodes
        return Tree(tokens, nodes - 1, nodes, -1.0 * nodes, jnp.zeros_like(nodes), live)

    given = {dtype: begin(target) for dtype, target in targets.items()}
    trees = {rows: chain(rows) for rows in ROWS}
    prefix = torch.tensor(ids[None, :CONTEXT])
    ours, theirs = {(dtype, rows): [] for dtype in targets for rows in ROWS}, []
    with torch.inference_mode():
        past = model(prefix, use_cache=True).past_key_values
        for turn in range(REPEATS + 2):
            for dtype, rows in ours:
                for _ in range(3):
                    start = time.perf_counter()
                    jax.block_until_ready(step(*given[dtype], trees[rows], rows))
                    if turn > 1:
                        ours[dtype, rows].append(time.perf_counter() - start)
            for _ in range(5):
                start = time.perf_counter()
                out = model(prefix[:, :1], past_key_values=past, use_cache=True)
                out.logits[:, -1].argmax(-1).item()
                if turn > 1:
                    theirs.append(time.perf_counter() - start)
                past.crop(-1)
    return {key: median_ms(s) for key, s in ours.items()}, median_ms(theirs)


def end_to_end(target, model):
    """Greedy tokens/s of ``ar`` (prefill left out, then included) and of transformers' generate, alternating."""
    params, plan = {"target": target.params}, Plan(target.config, ar())
    rows = []
    for prompt in BUILT_IN[:5]:
        ids = prompt.encode(target.tokenizer)
        never = np.zeros((1, target.config.vocab_size), np.int32)
        options = {"max_new_tokens": 64, "capacity": 256, "stops": never}
        _, run = decode_all(plan, params, [ids], **options)
        if not rows:  # the first run compiled the prefill
            _, run = decode_all(plan, params, [ids], **options)
        text = torch.tensor([ids])
        start = time.perf_counter()
        model.generate(text, max_new_tokens=64, min_new_tokens=64, do_sample=False)
        seconds = time.perf_counter() - start
        whole = run.decode_seconds + run.prefill_seconds
        rows.append((64 / run.decode_seconds, 64 / whole, 64 / seconds))
    return [statistics.median(column) for column in zip(*rows, strict=True)]


def overhead(target):
    """Shares of a round by step at budget 64, greedy, profile mode."""
    params = {"target": target.params}
    prompts = [load_bench(name, 1)[0].encode(target.tokenizer) for name in ("humaneval", "gsm8k")]
    rows = []
    for method in (prompt_lookup(64), token_recycling(64)):
        plan = Plan(target.config, method)
        shares, spent = [], []
        for _ in range(5):
            done, run = decode_all(plan, params, prompts, max_new_tokens=64, profile=True)
            total = sum(run.step_seconds.values())
            shares.append([run.step_seconds[s] / total for s in STEPS])
            rounds = sum(one.rounds for one in done)
            spent.append(1000 * (total - run.step_seconds["verify"]) / rounds)
        medians = [100 * statistics.median(column) for column in zip(*shares, strict=True)]
        outside = 100 * statistics.median(1 - share[1] for share in shares)
        rows.append([method.name, *medians, outside, statistics.median(spent)])
    return rows


def main():
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(2)
    targets = {dtype: load_target("smollm2-135m", kind) for dtype, kind in DTYPES.items()}
    target, model = targets["fp32"], torch_model()
    ours, base = steps(targets, model)
    decoding, whole, theirs = end_to_end(target, model)
    narrow = end_to_end(targets["bf16"], model)[0]
    rows = []
    for n in ROWS:
        wide, half = ours["fp32", n], ours["bf16", n]
        rows.append([n, wide, wide / base, WANTED.get(n, "-"), half, half / base])
    lines = [
        "# The cost of a step and of a round",
        "",
        f"SmolLM2-135M-Instruct (Q4_1 weights), {device_name()}.",
        "Made by `python -m experiments.steps.run`.",
        "",
        f"Transformers (torch, fp32, 2 threads): {base:.1f} ms for one token over the same {CONTEXT} cached ones.",
        f"Ours: a verify forward of N rows, draw included, over a cache of 256 rows; medians of {3 * REPEATS} and",
        f"{5 * REPEATS} alternating runs.",
        "",
        markdown_table(["rows", "fp32, ms", "ratio", "wanted", "bf16, ms", "ratio"], rows),
        "bf16 weights need a CPU that multiplies bf16 (AMX). ratio: to transformers' single step.",
        "",
        f"Greedy decoding of 64 tokens: `ar` {decoding:.1f} tokens/s ({narrow:.1f} in bf16), {whole:.1f} with",
        f"its prefill; transformers' generate {theirs:.1f}, with its prefill.",
        "",
        "Share of a round by step, fp32, budget 64, greedy, step by step from the host (%), and milliseconds",
        "outside verify:",
        "",
        markdown_table(["method", *STEPS, "all but verify", "ms"], overhead(target)),
    ]
    (HERE / "README.md").write_text("\n".join(lines))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
