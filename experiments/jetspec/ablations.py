"""What the training of a head changes: variants of one small run.

    python -m experiments.jetspec.ablations train NAME... --work DIR --library DIR [--also DIR ...] [--corpus DIR]
    python -m experiments.jetspec.ablations evaluate ...  # the same options: of the runs that are finished
    python -m experiments.jetspec.ablations report        # ABLATIONS.md

Without names: all variants. Further options are those of ``python -m jspec.train``, written ``--optim.steps=4``, and
hold for every variant. A run that was stopped goes on, and what is in ``ablations.jsonl`` is not measured again.
"""

import argparse
import dataclasses
import hashlib
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.cells import Cells
from experiments.jetspec.acceptance import counts, make_tables, record_bench, replay_tables, tau
from jspec.checkpoint import load_head, save_head
from jspec.device import device_name, keep_compilations, weights_dtype
from jspec.models.load import Target, load_target
from jspec.report import markdown_table
from jspec.train.data import read_libraries
from jspec.train.log import read_log
from jspec.train.options import TrainOptions, parse
from jspec.train.stages import train_head

HERE = Path(__file__).parent
BASE = HERE.parent.parent / "configs" / "train" / "ablation.yaml"
BENCHES = ("gsm8k", "humaneval", "mtbench")
PROMPTS, NEW = 20, 128
BUDGETS = (8, 32, 64)
COLUMNS = (("chain", 64), ("exact", 8), ("exact", 32), ("exact", 64))
JUDGED = ("exact", 32)  # what variants are compared by


class Variant(NamedTuple):
    """What differs from the base.

    Attributes:
      title: in the table.
      changes: options of ``python -m jspec.train``.
      part: of the training text.
      corpus: the text is the corpus's.
    """

    title: str
    changes: tuple[str, ...] = ()
    part: float = 1.0
    corpus: bool = False


ONE, TWO = (("optim.seed=" + seed, "batch.seed=" + seed) for seed in "12")
FULL = ("head.causal=false",)
VARIANTS = {
    "base": Variant("base: causal, block 8, 2 layers, cross-entropy, gamma 4"),
    "gamma0": Variant("gamma 0 (all slots alike)", ("loss.gamma=0",)),
    "gamma2": Variant("gamma 2", ("loss.gamma=2",)),
    "gamma7": Variant("gamma 7", ("loss.gamma=7",)),
    "dpace": Variant("D-PACE 0.5 instead of gamma", ("loss.gamma=0", "loss.dpace=0.5")),
    "fkl": Variant("forward KL", ("loss.kind=fkl",)),
    "fkl-top64": Variant(
        "forward KL on the target's 64 best", ("loss.kind=fkl", "loss.teacher_top_k=64")
    ),
    "block16": Variant(
        "block 16 (10 anchors a text: as many slots)", ("head.block_size=16", "batch.anchors=10")
    ),
    "layers1": Variant("1 layer", ("head.num_layers=1",)),
    "half": Variant("half of the text", part=0.5),
    "quarter": Variant("a quarter of the text", part=0.25),
    "corpus": Variant("text of a corpus", corpus=True),
    "causal-1": Variant("seed 1", ONE),
    "causal-2": Variant("seed 2", TWO),
    "bidirectional": Variant("bidirectional", FULL),
    "bidirectional-1": Variant("bidirectional, seed 1", FULL + ONE),
    "bidirectional-2": Variant("bidirectional, seed 2", FULL + TWO),
}
SEEDS = {
    "causal": ("base", "causal-1", "causal-2"),
    "bidirectional": ("bidirectional", "bidirectional-1", "bidirectional-2"),
}


def options_of(name: str, args: argparse.Namespace, target: Target) -> TrainOptions:
    """The options of a variant's run.

    Raises:
      ValueError: no corpus for the variant that needs one.
    """
    variant = VARIANTS[name]
    if variant.corpus and not args.corpus:
        raise ValueError("variant corpus needs --corpus DIR: see configs/train/ablation.yaml")
    library, *also = [args.corpus] if variant.corpus else [args.library, *args.also]
    texts = [f"--library={library}", f"--also={json.dumps(also)}", f"--run={args.work / name}"]
    changes = [f"--{change}" for change in variant.changes]
    options, _ = parse([f"--config={BASE}", *args.further, *texts, *changes])
    if variant.part < 1:
        found, _ = read_libraries([Path(folder) for folder in (library, *also)], target.fingerprint)
        count = round(variant.part * (len(found) - options.optim.held_out))
        options = dataclasses.replace(options, max_texts=count)
    return options


def train(names: Sequence[str], args: argparse.Namespace, target: Target) -> None:
    for name in names:
        if not (args.work / name / "head").exists():
            print(f"{name}: {VARIANTS[name].title}", flush=True)
            run = train_head(options_of(name, args, target), target)
            save_head(args.work / name / "head", run.config, run.as_params(run.best_head()))


def evaluate(names: Sequence[str], args: argparse.Namespace, target: Target, cells: Cells) -> None:
    recordings = {}
    cases = [(bench, tree, n) for bench in BENCHES for tree in ("chain", "exact") for n in BUDGETS]
    for name in names:
        folder = args.work / name
        if not (folder / "head").exists():
            print(f"{name}: not trained to the end", flush=True)
            continue
        digest = hashlib.sha256((folder / "config.json").read_bytes()).hexdigest()
        mine = {"variant": name, "run": digest[:8]}
        if not cells.has(part="training", **mine):
            cells.add(part="training", **mine, **summary(read_log(folder)))
        head, tables = None, {}
        for bench, tree, budget in cases:
            keys = mine | {"part": "acceptance", "bench": bench, "tree": tree, "budget": budget}
            if cells.has(**keys):
                continue
            head = head or load_head(folder / "head", target)
            taps = head.config.taps
            if (bench, taps) not in recordings:
                shape = {"new": NEW, "depth": 15}  # as deep as the largest block
                recordings[bench, taps] = record_bench(target, bench, PROMPTS, taps, **shape)
            texts = recordings[bench, taps]
            if bench not in tables:
                given = (head.config, head.params, target.params)
                shape = {"new": NEW, "width": max(BUDGETS) - 1}
                tables[bench] = make_tables(*given, texts, taps, **shape)
            done = replay_tables(target, texts, tables[bench], tree, budget, new=NEW)
            cells.add(**keys, **counts(done))


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of a log: the last training loss, the best held-out acceptance length, seconds of steps, usual slots a second."""
    best = max(rows, key=lambda row: row["tree"])
    return {
        "steps": rows[-1]["step"],
        "loss": rows[-1]["loss"],
        "held_out": best["tree"],
        "best_step": best["step"],
        "seconds": round(sum(row["seconds"] for row in rows), 1),
        "slots_per_second": statistics.median(row["slots_per_second"] for row in rows),
    }


def report(cells: Cells) -> None:
    runs = {row["variant"]: row for row in cells.rows if row["part"] == "training"}  # the last ones

    def found(name, tree, budget):
        """The cells of all benches, or None."""
        if name not in runs:
            return None
        keys = {"part": "acceptance", "variant": name, "run": runs[name]["run"]}
        keys |= {"tree": tree, "budget": budget}
        there = [cells.find(bench=bench, **keys) for bench in BENCHES]
        return there if all(there) else None

    def mean(name, case):
        there = found(name, *case)
        return statistics.mean(map(tau, there)) if there else None

    names = [name for name in VARIANTS if all(found(name, *case) for case in COLUMNS)]
    titles = ["chain" if tree == "chain" else f"{tree} {n}" for tree, n in COLUMNS]
    lines = [
        "# Ablations of the JetSpec head on SmolLM2-135M-Instruct",
        "",
        f"Q4_1 weights, computed with in fp32; {device_name()}. Made by `python -m experiments.jetspec.ablations`.",
        "Every row is the base but for what it says. Acceptance length by replay of the checkpoint that is best on",
        f"held-out text: greedy, {PROMPTS} prompts a bench, {NEW} new tokens, mean over {', '.join(BENCHES)}.",
        "chain: the whole block; exact N: trees of N nodes, root included. Against the base: the difference at exact",
        "32, with its 95 % interval by bootstrap over prompts, the same ones for both; the second table says how much",
        "another seed alone changes. Loss: mean of the last steps; those of different kinds can't be compared.",
        "Held-out: acceptance length on text like that trained on, trees of 32 nodes. Time: of the steps alone, two",
        "runs side by side and other work beside them, so that times cannot be compared.",
        "",
    ]
    rows = []
    for name in names:
        run = runs[name]
        against = "-"
        if name != "base" and "base" in names:
            centre, low, high = difference(found(name, *JUDGED), found("base", *JUDGED))
            against = f"{centre:+.2f} [{low:+.2f}, {high:+.2f}]"
        numbers = [mean(name, case) for case in COLUMNS]
        rates = [f"{run['seconds'] / 60:.1f} min", f"{run['slots_per_second']:.0f}"]
        rows.append([VARIANTS[name].title, *numbers, against, run["loss"], run["held_out"], *rates])
    header = ["variant", *titles, "against the base", "loss", "held-out", "time", "slots/s"]
    lines += [markdown_table(header, rows)]
    if "block16" in names:
        short = mean("block16", ("chain", 8))
        lines += [
            f"The chain of block 16 verifies 16 rows; cut to 8 its acceptance length is {short:.2f}.",
            "",
        ]
    lines += [
        "## Causal against bidirectional",
        "",
        "The same text, steps, loss and seeds (of the first weights and of the batches): mean over seeds and standard",
        "deviation, in brackets the seeds. The difference is taken seed by seed.",
        "",
    ]
    rows = []
    for title, pair in (*((kind, (kind,)) for kind in SEEDS), ("difference", tuple(SEEDS))):
        numbers = []
        for case in COLUMNS:
            by_seed = zip(*([mean(name, case) for name in SEEDS[kind]] for kind in pair))
            values = [x[0] - x[1] if len(x) > 1 else x[0] for x in by_seed if None not in x]
            numbers.append(spread(values, "+" if len(pair) > 1 else ""))
        rows.append([title, *numbers])
    lines += [markdown_table(["head", *titles], rows)]
    (HERE / "ABLATIONS.md").write_text("\n".join(lines))


def spread(values: Sequence[float], sign: str) -> str:
    """Mean and standard deviation of some seeds, and each of them."""
    if not values:
        return "not run yet"
    each = ", ".join(f"{value:{sign}.2f}" for value in values)
    around = f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):{sign}.3f}{around} ({each})"


def difference(ours: Sequence[dict], theirs: Sequence[dict]) -> tuple[float, float, float]:
    """Mean difference of acceptance lengths over benches, and its 95 % interval: prompts resampled, for both alike."""
    rng = np.random.default_rng(0)
    total = 0
    for pair in zip(ours, theirs, strict=True):
        count = len(pair[0]["rounds"])
        picks = rng.integers(count, size=(2000, count))
        emitted, rounds = (
            [np.asarray(one[key])[picks].sum(axis=1) for one in pair]
            for key in ("emitted", "rounds")
        )
        total = total + emitted[0] / rounds[0] - emitted[1] / rounds[1]
    low, high = np.quantile(total / len(ours), [0.025, 0.975])
    centre = statistics.mean(tau(a) - tau(b) for a, b in zip(ours, theirs, strict=True))
    return centre, float(low), float(high)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=["train", "evaluate", "report"])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(VARIANTS))
    parser.add_argument("--work", type=Path, default=Path("runs/ablations"))
    parser.add_argument("--library", default="library/smollm2-135m")
    parser.add_argument("--also", nargs="*", default=[])
    parser.add_argument("--corpus")
    parser.add_argument("--results", type=Path, default=HERE / "ablations.jsonl")
    args, args.further = parser.parse_known_args()
    if unknown := set(args.names) - set(VARIANTS):
        parser.error(f"no variant {min(unknown)!r}: there are {', '.join(VARIANTS)}")
    cells = Cells(args.results)
    if args.part == "report":
        report(cells)
        return
    names = args.names or list(VARIANTS)
    keep_compilations()
    try:
        base = parse([f"--config={BASE}", *args.further])[0]
        target = load_target(base.target, weights_dtype(base.dtype))
        if args.part == "train":
            train(names, args, target)
        else:
            evaluate(names, args, target, cells)
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
