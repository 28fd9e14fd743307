"""Where verifying more rows begins to cost time: bytes and operations of a compiled round on TPUs that are not there.

    python -m experiments.roofline.run count     # needs jax[tpu] (pip install 'jax[tpu]'), no TPU
    python -m experiments.roofline.run report    # tables and figure, from results.jsonl

A round is prompt lookup's, so that what is counted is the target's: verify, accept, commit. The TPU's own compiler
counts what it compiled, for two depths of the target; a layer more costs what a layer costs, and so the whole model's
counts follow. Cells that are in ``results.jsonl`` are not made again.
"""

import argparse
import dataclasses
from pathlib import Path

import jax

from experiments.cells import Cells
from experiments.roofline.report import CAPACITY, write_report
from jspec.aot import KINDS, TARGETS, placed, step_shapes, tpu_devices, tracing_for
from jspec.decode import decode_round
from jspec.methods import ar, prompt_lookup
from jspec.state import Plan

HERE = Path(__file__).parent
BUDGETS = tuple(1 << i for i in range(9))
LAYERS = (2, 4)  # that are compiled


def count_round(kind, config, budget):
    """Operations and bytes of a compiled round, as XLA's cost analysis has them, in bf16 and with one prompt."""
    device = tpu_devices(KINDS[kind].topology)[0]
    method = ar() if budget == 1 else prompt_lookup(budget)
    plan = Plan(config, method, buckets=(), attention="xla")  # a kernel's insides are not counted
    with tracing_for(device):
        shapes = placed(step_shapes(plan, {}, 1, CAPACITY), device)
        step = jax.jit(decode_round, static_argnums=0, donate_argnums=2)
        lowered = step.trace(plan, *shapes).lower(lowering_platforms=("tpu",))
    found = lowered.compile().cost_analysis()
    return found["flops"], found["bytes accessed"]


def whole(counts, layers):
    """Counts of a model of so many layers, from those of ``LAYERS``: what is not a layer's is there once."""
    (first, few), (second, more) = zip(LAYERS, counts, strict=True)
    return few + (more - few) / (second - first) * (layers - first)


def count(cells):
    for target, config in TARGETS.items():
        for kind in KINDS:
            for budget in BUDGETS:
                keys = {"target": target, "kind": kind, "budget": budget}
                if cells.has(**keys):
                    continue
                small = [dataclasses.replace(config, num_layers=n) for n in LAYERS]
                counts = zip(*(count_round(kind, one, budget) for one in small), strict=True)
                flops, read = (whole(pair, config.num_layers) for pair in counts)
                cells.add(**keys, flops=flops, bytes=read)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="+", choices=["count", "report"])
    parts = parser.parse_args().parts
    cells = Cells(HERE / "results.jsonl", jax=jax.__version__)
    if "count" in parts:
        jax.config.update("jax_platforms", "cpu")
        count(cells)
    if "report" in parts:
        write_report(cells, HERE)


if __name__ == "__main__":
    main()
