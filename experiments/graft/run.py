"""Graft on the default target: what retrieved nodes bring to each drafter at equal budget, and which form brings most.

    python -m jspec.thresholds --method ddtree --budget 32     # each method, budget and --retrieve, beforehand
    python -m experiments.graft.run benches long               # quiet machine, hours
    python -m experiments.graft.run report                     # tables from results.jsonl

Greedy, one prompt at a time, all variants of a method in turns with ``ar``, so that times can be compared. Cells that
are in ``results.jsonl`` are not made again. Methods without a head for this target are left out.
"""

import argparse
import sysconfig
from pathlib import Path

from experiments.cells import Cells
from experiments.graft.report import write_report
from jspec.benches import Prompt, load_bench, user_turn
from jspec.device import device_name, keep_compilations, weights_dtype
from jspec.driver import decode_all
from jspec.job import choose, make_method
from jspec.methods import ar, graft
from jspec.models.load import load_target
from jspec.options import Options
from jspec.state import Plan
from jspec.text import encode_prompt
from jspec.thresholds.store import ready_graft

HERE = Path(__file__).parent
BENCHES = ("humaneval", "gsm8k", "mtbench", "math")
METHODS = ("eagle3", "dartree", "jetspec", "ddtree", "dflash")
BUDGETS = (8, 32)
KEPT = "graft, table kept"
COUNT, NEW, LONG_NEW = 10, 64, 128
MODULES = ("bisect", "fnmatch", "heapq", "shlex", "textwrap")
LETTERS = 4000  # of a module: 1,000 to 1,400 tokens


def variants(drafter, target, head):
    """The method alone and in every form of graft, by name."""

    def ready(**options):
        return ready_graft(drafter, target, head, **options)

    return {
        "alone": drafter,
        "graft": ready(),
        KEPT: ready(scope="kept"),
        "graft, text": ready(retrieve="text"),
        "graft, both": ready(retrieve="both"),
        "root, not pruned": graft(drafter, prune=False),
        "tail, not pruned": graft(drafter, prune=False, place="tail"),
    }


def long_prompts() -> list[Prompt]:
    """Prompts of 1,000 to 2,000 tokens most of whose answers stand in them: to edit, to summarise, and to go on."""
    found = []
    for name in MODULES:
        source = (Path(sysconfig.get_paths()["stdlib"]) / f"{name}.py").read_text(encoding="utf-8")
        code = source[: source[:LETTERS].rindex("\n")]
        fenced = f"\n\n```python\n{code}\n```"
        ask = f"Print this module again, with a comment above each function.{fenced}"
        found.append(user_turn(f"edit/{name}", ask))
        found.append(user_turn(f"summarise/{name}", f"Say what each part of it does.{fenced}"))
        part = code[: code[: LETTERS // 2].rindex("\n")]
        found.append(Prompt(f"go-on/{name}", text=f"{part}\n\n\n" * 2 + part[:300]))
    return found


class Bench:
    """The target, and what a method needs to run on it."""

    def __init__(self):
        self.target = load_target("smollm2-135m", weights_dtype("auto"))

    def drafter(self, name, budget):
        """(method, head), or None where there is no such method or no head for it."""
        try:
            options = choose(Options(method=name, budget=budget), self.target)
            head, method = make_method(options, self.target)
        except (KeyError, ValueError) as error:
            print(f"{name}: left out: {error}", flush=True)
            return None
        return method, head

    def prompts(self, name):
        found = long_prompts() if name == "long" else load_bench(name, COUNT)
        return [(prompt.id, encode_prompt(self.target, prompt)) for prompt in found]


def decoded(bench, cells, names, new, capacity):
    """Every prompt by every method in every form, in turns with ``ar``."""
    for name in METHODS:
        for budget in BUDGETS:
            if name == "dflash" and budget > min(BUDGETS):
                continue  # its chain is no longer, and what is grafted would have room that it never uses
            if (found := bench.drafter(name, budget)) is None:
                continue
            drafter, head = found
            params = {"target": bench.target.params}
            if head is not None:
                params["head"] = head.params
            lanes = variants(drafter, bench.target.fingerprint, head and head.fingerprint)
            plans = {"ar": Plan(bench.target.config, ar())}
            plans |= {lane: Plan(bench.target.config, method) for lane, method in lanes.items()}
            memory, kept = {}, {KEPT: plans[KEPT]}
            todo = [(b, *prompt) for b in names for prompt in bench.prompts(b)]
            todo = [
                ({"method": name, "budget": budget, "bench": b, "prompt": x}, y) for b, x, y in todo
            ]
            while todo and cells.has(part="decoded", **todo[-1][0]):
                todo.pop()
            for keys, ids in todo:
                if not cells.has(part="decoded", **keys):
                    row = turn(plans, params, ids, new, capacity, memory)
                    cells.add(part="decoded", **keys, **row, device=device_name())
                else:  # made before a restart: the kept table learns from it again
                    turn(kept, params, ids, new, capacity, memory)


def turn(plans, params, ids, new, capacity, memory):
    """Counts and seconds of one prompt by lane."""
    row = {"new": {}, "rounds": {}, "emitted": {}, "sources": {}, "passes": {}, "seconds": {}}
    texts = {}
    for lane, plan in plans.items():
        options = {"max_new_tokens": new, "capacity": capacity, "warm_up": lane not in memory}
        [one], run = decode_all(plan, params, [ids], memory=memory.get(lane), **options)
        memory[lane] = run.memory()
        texts[lane] = one.tokens
        found = (len(one.tokens), one.rounds, one.emitted, one.by_source)
        passes = int(run.state.draft_passes)
        for key, value in zip(row, (*found, passes, run.decode_seconds), strict=True):
            row[key][lane] = value
    return {**row, "same": {lane: text == texts.get("ar") for lane, text in texts.items()}}


PARTS = {
    "benches": lambda bench, cells: decoded(bench, cells, BENCHES, NEW, 512),
    "long": lambda bench, cells: decoded(bench, cells, ("long",), LONG_NEW, 2048),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="+", choices=[*PARTS, "report"])
    parts = parser.parse_args().parts
    cells = Cells(HERE / "results.jsonl")
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
