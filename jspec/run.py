"""``python -m jspec.run``: decodes prompts, streams the text, and says how fast and how exact it was."""

import hashlib
import json
import os
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.text import Text

from jspec.attention import pick_attention
from jspec.benches import Prompt
from jspec.comparison import Comparison
from jspec.decode import decode_round
from jspec.device import (
    DTYPES,
    join_processes,
    keep_compilations,
    pick_accelerator,
    weights_dtype,
)
from jspec.driver import Event
from jspec.job import Job, add_costs, attention_of, choose, find_method, make_plan, read_all
from jspec.mesh import fetchable, mesh_of
from jspec.models.load import load_target
from jspec.options import Options, parse, say
from jspec.picture import draw_text
from jspec.prefill import admit
from jspec.report import (
    check_writable,
    describe_run,
    print_report,
    summarize,
    summarize_prompt,
    write_json,
)
from jspec.sampling import Sampling
from jspec.state import ROWS, STATE, capacity_for, each_shard, new_state
from jspec.text import (
    Typist,
    encode_prompt,
    shown_text,
    target_stops,
)

DRAWN_ROUNDS = 3  # of --tree: those in which something was drafted
SHOWN_ROUNDS = 4  # decoded between two looks at the text: each look costs time


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns the exit status: 0, 2 for a user's error or a full disk or memory, 130 for Ctrl-C."""
    try:
        try:
            job = prepare(parse(argv))
        except ValueError as error:
            return _fail(error)
        try:
            with open(os.devnull, "w") as nowhere:
                # Of several processes, all of which decode the same, the first one speaks.
                shown = sys.stdout if jax.process_index() == 0 else nowhere
                decode(job, Console(file=shown, width=None if sys.stdout.isatty() else 120))
        except (OSError, MemoryError, jax.errors.JaxRuntimeError) as error:
            return _fail(error)
    except KeyboardInterrupt:
        return 130
    return 0


def _fail(error: Exception) -> int:
    print(f"jspec: error: {' '.join(str(error).split())}", file=sys.stderr)
    return 2


def prepare(options: Options) -> Job:
    """Checks everything that can be wrong, cheap things first; loads the target and the head.

    Raises:
      ValueError: something is wrong.
    """
    if options.json is not None:
        check_writable(Path(options.json))
    if options.method is not None:
        find_method(options)
    sampling = Sampling(options.temperature, options.top_k, options.top_p, options.min_p)
    prompts = read_all(options)
    if options.distributed:
        join_processes()
    pick_accelerator(options.accel)
    pick_attention(attention_of(options))
    keep_compilations()
    dtype = weights_dtype(options.dtype)
    target = load_target(options.target, dtype, mesh_of(options.mesh))
    options = choose(options, target)
    head, plan = make_plan(options, target, sampling)
    ids = [encode_prompt(target, prompt) for prompt in prompts]
    capacity_for(plan, max(map(len, ids)) + options.max_new_tokens)
    return Job(options, target, head, plan, prompts, ids, target_stops(target, options.stop))


def decode(job: Job, console: Console) -> None:
    """Decodes, streams the text, prints the tables and writes the report."""
    options = job.options
    room = job.target.config.max_positions
    first = jax.process_index() == 0
    if first and max(map(len, job.ids)) + options.max_new_tokens > room:
        say(f"answers end where the target's context of {room} tokens does, if not before")
    if first:
        say("compiling, or reading what an earlier start compiled")
    begun = time.perf_counter()
    if options.smart == "on":
        job = add_costs(job)
    measuring = time.perf_counter() - begun  # it compiles what decoding runs
    if options.tree:
        draw_rounds(job, console)
    run = Comparison(
        job.plan,
        job.params,
        job.ids,
        max_new_tokens=options.max_new_tokens,
        baseline=options.baseline,
        batch=options.batch,
        seed=options.seed,
        stops=job.stops,
        rounds=SHOWN_ROUNDS if options.batch == 1 else 1 << 30,
        profile=options.profile,
    )
    screen = Screen(job, console)
    for event in run:
        screen.show(event)
    report = make_report(job, run)
    report["summary"]["compile_seconds"] += measuring
    print_report(report, console)
    if options.json is not None and first:
        write_json(Path(options.json), report)


class Screen:
    """Answers as they come: token by token, or in a batch each when it is complete."""

    def __init__(self, job: Job, console: Console):
        self._job, self._console = job, console
        self._typists: dict[int, Typist] = {}

    def show(self, event: Event) -> None:
        """Prints what an event adds."""
        job, last = self._job, event.finished is not None
        alone = job.options.batch == 1
        if event.index not in self._typists:
            self._typists[event.index] = Typist(job.target, job.options.stop)
            if alone:
                self._head(job.prompts[event.index])
        typist = self._typists[event.index]
        fresh = typist.add(event.tokens, last)
        if alone:
            self._console.out(fresh, end="\n" if last else "", highlight=False)
        elif last:
            self._head(job.prompts[event.index])
            self._console.out(typist.text, highlight=False)

    def _head(self, prompt: Prompt) -> None:
        asked = prompt.text if prompt.text is not None else prompt.messages[-1]["content"]
        line = Text.assemble("\n", (prompt.id, "bold"), "  ", (" ".join(asked.split()), "dim"))
        self._console.print(line, no_wrap=True, overflow="ellipsis")


def draw_rounds(job: Job, console: Console) -> None:
    """Draws the trees of the first prompt's first rounds, from the steps of a round."""
    plan, options, prompt = job.plan, job.options, job.ids[0]
    capacity = capacity_for(plan, len(prompt) + options.max_new_tokens)
    key = jax.random.key(options.seed)
    state = new_state(plan, job.params, plan.shards, capacity, key, job.stops)
    state = admit(plan, job.params, state, 0, prompt, 0, options.max_new_tokens)

    def word(token):
        return job.target.tokenizer.decode([token], skip_special=False)

    console.print(Text(f"the first drafts for prompt {job.prompts[0].id!r}", "bold"))
    drawn = number = 0
    while drawn < DRAWN_ROUNDS and not fetchable(state.rows.done)[0]:
        state, verdict = _round(plan, job.params, state)
        verdict = fetchable(verdict)
        number += 1
        if verdict.tree.size[0] == 1 and plan.method.budget > 1:
            continue  # nothing was drafted
        drawn += 1
        console.print(Text(f"round {number}", "dim"))
        console.out(draw_text(verdict.tree, 0, word, verdict.path[0]), highlight=False)
        bonus = verdict.tokens[0, verdict.path[0, verdict.count[0] - 1]]
        console.out(f"then {word(int(bonus))!r}\n", highlight=False)


@partial(jax.jit, static_argnums=0)
def _round(plan, params, state):
    step = partial(decode_round, plan)
    return each_shard(plan.mesh, step, (STATE, ROWS))(params, state)


def make_report(job: Job, run: Comparison) -> dict[str, Any]:
    """What --json writes."""
    options, compared = job.options, run.reference is not None
    differences = run.differences or [None] * len(job.prompts)
    dtype = jax.tree.leaves(job.target.params)[0].dtype
    return describe_run() | {
        "target": job.target.name,
        "target_fingerprint": job.target.fingerprint,
        "method": options.method,
        "head": job.head and job.head.name,
        "head_fingerprint": job.head and job.head.fingerprint,
        "budget": job.plan.method.budget,
        "smart": options.smart == "on",
        "graft": options.graft,
        "dtype": next(name for name, kind in DTYPES.items() if kind == dtype),
        "temperature": options.temperature,
        "top_p": options.top_p,
        "top_k": options.top_k,
        "min_p": options.min_p,
        "seed": options.seed,
        "batch": options.batch,
        "depth": job.plan.method.needs.depth,
        "width": options.width,
        "detail": job.plan.method.detail,
        "attention": options.attention,
        "mesh": options.mesh,
        "max_new_tokens": options.max_new_tokens,
        "stop": list(options.stop),
        "prompts": options.bench or options.prompts or ("given" if options.prompt else "built-in"),
        "prompts_digest": hashlib.sha256(json.dumps(job.ids).encode()).hexdigest()[:16],
        "baseline": options.baseline,
        "profile": options.profile,
        "results": [
            summarize_prompt(
                prompt.id,
                shown_text(job.target, one.tokens, options.stop),
                one,
                difference,
                compared,
            )
            for prompt, one, difference in zip(job.prompts, run.ours.outcomes, differences)
        ],
        "summary": summarize(run),
    }


if __name__ == "__main__":
    if sys.stdout is None:
        sys.exit(_fail(OSError("standard output is closed")))
    sys.stdout.reconfigure(errors="replace")  # answers hold characters that a terminal may lack
    sys.exit(main())
