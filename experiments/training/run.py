"""Training speed of the shipped heads' config against the arithmetic limit of the machine.

    python -m experiments.training.run      # a quiet machine, about ten minutes

A process for each dtype, number of cores and number of texts in a step: the config's, and four times as many, over
which the optimiser's time is shared. In it steps on synthetic text and matrix products take turns; medians of
the steps, the best of the products. Writes ``README.md``.
"""

import argparse
import dataclasses
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jspec.device import DTYPES, device_name, keep_compilations
from jspec.heads.parallel import init_head
from jspec.models.load import load_target
from jspec.report import markdown_table
from jspec.train import BatchConfig, read_texts
from jspec.train.data import Batches
from jspec.train.loop import TrainState, frozen_parts, train_step
from jspec.train.optim import optimizer
from jspec.train.options import parse
from jspec.train.stages import head_config, library_taps
from jspec.train.text import Library, Written

HERE = Path(__file__).parent
CONFIG = HERE.parents[1] / "configs" / "train" / "smollm2-jetspec.yaml"
CORES = (1, 2)
MORE = 4  # times the config's texts
WANTED = 40  # per cent of the limit


def products(config, head, widest):
    """The products that are timed: large ones, and the largest of a step; (rows, inner, columns)."""
    blocks = config.texts * config.anchors
    hidden, ffn = head.hidden_size, head.ffn_size
    return {
        "1024 cubed": (1024, 1024, 1024),
        "2048 cubed": (2048, 2048, 2048),
        "output head": (blocks * head.depth, hidden, head.draft_vocab_size),
        "gate and up": (2 * ffn, hidden, blocks * head.block_size),
        "fusion of the taps": (hidden, len(head.taps) * hidden, config.texts * widest),
    }


def multiply_adds(config, head, width):
    """Of a step by part: those of the loss, and those of its gradient. Padded texts and blocks count whole."""
    blocks, tokens = config.texts * config.anchors, config.texts * width
    columns = blocks * head.block_size
    hidden, ffn, layers = head.hidden_size, head.ffn_size, head.num_layers
    queries, pairs = head.num_heads * head.head_dim, 2 * head.num_kv_heads * head.head_dim
    weights = hidden * (queries + pairs) + queries * hidden + 3 * hidden * ffn
    forward = {
        "fusion of the taps": tokens * len(head.taps) * hidden * hidden,
        "keys and values of the context": layers * tokens * hidden * pairs,
        "projections and MLPs of the blocks": layers * columns * weights,
        "attention": layers * columns * queries * 2 * (width + head.block_size),
        "output head": blocks * head.depth * hidden * head.draft_vocab_size,
    }
    # A product has two gradients; the taps' is not needed, and the output head's rows are frozen.
    once = ("fusion of the taps", "output head")
    return {name: (count, count if name in once else 2 * count) for name, count in forward.items()}


def synthetic_texts(folder, vocab, taps, hidden, width, shortest, count=32):
    """A library of random texts that are padded to a width, taps on the disk as in training."""
    rng = np.random.default_rng(width)
    written = []
    for number in range(count):
        length = int(rng.integers(shortest + 1, width + 1))
        states = rng.normal(size=(length - 1, taps, hidden)).astype(np.float16)
        tokens = rng.integers(0, vocab, length).astype(np.int32)
        written.append(Written(number, tokens, length // 3, states))
    library = Library(folder / str(width))
    for name in ("text", "taps"):
        (library.folder / name).mkdir(parents=True)
    library.save(0, written, wide=False)
    return read_texts(library.folder)


def with_texts(config, more):
    return dataclasses.replace(config, texts=more * config.texts)


def timed(run, *args):
    start = time.perf_counter()
    out = jax.block_until_ready(run(*args))
    return out, time.perf_counter() - start


def measure(dtype, turns, steps, more):
    """What one process finds, with so many times the config's texts in a step."""
    keep_compilations()
    options, _ = parse(["--config", str(CONFIG)])
    options = dataclasses.replace(options, batch=with_texts(options.batch, more))
    target = load_target(options.target, DTYPES[dtype])
    head, taps = head_config(options, target), library_taps(options, target)
    vocab, config = head.draft_vocab_size, options.batch
    frozen = frozen_parts(target, np.arange(vocab))
    weights = init_head(head, jax.random.key(0))
    state = TrainState(
        weights, optimizer(options.optim).init(weights), jnp.int32(0), jnp.float32(0)
    )
    static = target.config, head, options.loss, options.optim, taps
    batches, counted = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        for shortest, width in zip((config.lengths[0] // 2, *config.lengths), config.lengths):
            texts = synthetic_texts(
                Path(folder), vocab, len(taps), head.hidden_size, width, shortest
            )
            one = BatchConfig(config.texts, config.anchors, (width,))
            batches[width] = Batches(texts, one, head.depth)
            step = train_step.lower(*static, state, frozen, batches[width][0]).compile()
            counted[width] = step.cost_analysis()["flops"]
        multiply = jax.jit(partial(jnp.matmul, preferred_element_type=jnp.float32))
        rng = np.random.default_rng(0)
        pairs = {
            name: tuple(jnp.asarray(rng.normal(size=s), DTYPES[dtype]) for s in ((m, k), (k, n)))
            for name, (m, k, n) in products(config, head, config.lengths[1]).items()
        }
        alone = {width: [] for width in batches}
        looped, made = {w: [] for w in batches}, {w: [] for w in batches}
        best = dict.fromkeys(pairs, float("inf"))
        for turn in range(turns + 1):  # the first warms up
            for name, pair in pairs.items():
                for _ in range(3):
                    best[name] = min(best[name], timed(multiply, *pair)[1])
            for width, source in batches.items():
                for number in range(steps):
                    batch, seconds = timed(source.__getitem__, number)
                    made[width].append((turn, seconds))
                    (state, _), seconds = timed(train_step, *static, state, frozen, batch)
                    alone[width].append((turn, seconds))
                start = time.perf_counter()  # as ``Trainer.run`` does it: nothing waits for a step
                for number in range(steps):
                    state, _ = train_step(*static, state, frozen, source[number])
                jax.block_until_ready(state)
                looped[width].append((turn, (time.perf_counter() - start) / steps))

    def median(pairs):
        return statistics.median(seconds for turn, seconds in pairs if turn)

    sizes = products(config, head, config.lengths[1])
    return {
        "device": device_name(),
        "products": {n: 2e-9 * np.prod(sizes[n]).item() / s for n, s in best.items()},
        "widths": {
            width: {
                "step": median(alone[width]),
                "loop": median(looped[width]),
                "batch": median(made[width]),
                "xla_flops": counted[width],
            }
            for width in batches
        },
    }


def report(found):
    """Writes the tables: ``found`` is what each process found, by dtype, cores and multiple of the config's texts."""
    options, _ = parse(["--config", str(CONFIG)])
    config, target = options.batch, load_target(options.target)
    head = head_config(options, target)
    parts = {width: multiply_adds(config, head, width) for width in config.lengths}
    work = {width: 2e-9 * sum(map(sum, each.values())) for width, each in parts.items()}
    rows = []
    for (dtype, cores, more), one in found.items():
        limit, plain = (
            max(max(found[kind, cores, n]["products"].values()) for n in (1, MORE))
            for kind in (dtype, "fp32")
        )
        anchors = more * config.texts * config.anchors
        slots, done = anchors * head.depth, {width: more * x for width, x in work.items()}
        for width in config.lengths:
            took = one["widths"][str(width)]
            times = [1000 * took[name] for name in ("step", "loop", "batch")]
            speeds = [anchors / took["loop"], slots / took["loop"], slots * limit / done[width]]
            reached = done[width] / took["loop"]
            shares = [f"{100 * reached / most:.0f} %" for most in (limit, plain)]
            rows.append(
                [
                    dtype,
                    cores,
                    more * config.texts,
                    width,
                    *times,
                    *map(round, [*speeds, reached]),
                    *shares,
                ]
            )
    usual = config.lengths[len(config.lengths) // 2]
    total = sum(map(sum, parts[usual].values()))
    last = found[dtype, cores, 1]
    lines = [
        "# Training speed",
        "",
        f"A step of `configs/train/smollm2-jetspec.yaml`, {last['device']}: {config.texts} texts or {MORE} times",
        f"as many, {config.anchors} anchors each, block {head.block_size}, {head.num_layers} layers, "
        f"{len(head.taps)} taps, draft vocabulary {head.draft_vocab_size}.",
        "Made by `python -m experiments.training.run`: synthetic text, a process for each dtype, number of cores",
        "and texts, steps and products in turns; medians of the steps, the best of the products.",
        "",
        "## The limit: products, GFLOP/s",
        "",
        "Inputs of the dtype, sums in fp32.",
        "",
        markdown_table(
            ["dtype", "cores", *last["products"]],
            [
                [dtype, cores, *map(round, one["products"].values())]
                for (dtype, cores, more), one in found.items()
                if more == 1
            ],
        ),
        "## Steps",
        "",
        "A `step` is waited for; `in the loop` nothing waits, as in the trainer, which makes the next batch meanwhile:",
        "that is what the speeds are made of. `batch` is the time to make one, from taps in the page cache. The limit",
        f"is the fastest product's speed; wanted are {WANTED} % of it. With bf16 only products are in bf16: softmax,",
        f"norms and AdamW are as they are with fp32. The config above trains with {options.dtype}.",
        "",
        markdown_table(
            [
                "dtype",
                "cores",
                "texts",
                "text length",
                "step, ms",
                "in the loop, ms",
                "batch, ms",
                "anchors/s",
                "slots/s",
                "slots/s at the limit",
                "GFLOP/s",
                "of the limit",
                "of fp32's limit",
            ],
            rows,
        ),
        f"## What a step computes, text length {usual}",
        "",
        markdown_table(
            ["part", "loss, million multiply-adds", "gradient", "share"],
            [
                [name, round(a / 1e6), round(b / 1e6), f"{100 * (a + b) / total:.0f} %"]
                for name, (a, b) in parts[usual].items()
            ],
        ),
        "GFLOP of a step by this count, and by XLA's of the compiled step, which is of everything:",
        "",
        markdown_table(
            ["text length", "counted", "XLA"],
            [[w, work[w], 1e-9 * last["widths"][str(w)]["xla_flops"]] for w in config.lengths],
        ),
    ]
    text = "\n".join(lines)
    (HERE / "README.md").write_text(text)
    print(text)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--steps", type=int, default=6, help="of each text length in a turn")
    parser.add_argument("--measure", choices=DTYPES, help="only measure, in this process")
    parser.add_argument("--more", type=int, default=1, help="times the config's texts")
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(args.measure, args.turns, args.steps, args.more)))
        return
    there = sorted(os.sched_getaffinity(0))
    command = [sys.executable, "-m", "experiments.training.run"]
    found = {}
    for dtype, cores, more in itertools.product(DTYPES, CORES, (1, MORE)):
        os.sched_setaffinity(0, there[:cores])  # the child's too, before it starts JAX
        steps = max(1, args.steps // more)
        given = ["--turns", args.turns, "--steps", steps, "--more", more, "--measure", dtype]
        done = subprocess.run(
            [*command, *map(str, given)], stdout=subprocess.PIPE, check=True, text=True
        )
        found[dtype, cores, more] = json.loads(done.stdout)
    report(found)


if __name__ == "__main__":
    main()
