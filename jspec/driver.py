"""Driving rounds from the host: text as it comes, and slots refilled from a queue of prompts."""

import dataclasses
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from jspec.decode import absorb, advance, commit, judge, observe, propose
from jspec.mesh import fetchable
from jspec.method import Memory, MethodState, Params, check_range
from jspec.methods.smart import SmartShared, hold
from jspec.prefill import admit_each, check_prompt, chunks
from jspec.state import ROWS, STATE, DecodeState, Plan, capacity_for, each_shard, new_state
from jspec.verification import verify

MAX_ROUNDS = 1 << 30  # between two looks of the host: until a row finishes
STEPS = ("propose", "verify", "accept_commit", "absorb_observe")


@dataclasses.dataclass(frozen=True)
class Finished:
    """One prompt's outcome. Counts are before a stop or the limit cuts the last round.

    Attributes:
      index: of the prompt in the input.
      prompt_tokens: how many it has.
      tokens: new token ids, a stop token included.
      emitted: tokens emitted over all rounds; ``emitted / rounds`` is the acceptance length tau.
      verified: tree nodes the target ran, roots included.
      by_depth: rounds whose accepted path reached depth 0, 1, ...
      by_rank: accepted nodes by rank among their siblings; the last entry counts worse ranks too.
      by_source: accepted nodes by ``jspec.tree.SOURCES``.
      trace: tokens each round emitted.
      seconds: from the end of its prefill to its last round, other prompts' prefills left out.
    """

    index: int
    prompt_tokens: int
    tokens: list[int]
    rounds: int
    emitted: int
    verified: int
    by_depth: list[int]
    by_rank: list[int]
    by_source: list[int]
    trace: list[int]
    seconds: float = 0.0

    @property
    def acceptance_length(self) -> float:
        """Tau: tokens emitted a round, bonus included."""
        return self.emitted / max(self.rounds, 1)


class Event(NamedTuple):
    """New tokens of one prompt; ``finished`` comes with its last ones."""

    index: int
    tokens: list[int]
    finished: Finished | None


def outcome(state: DecodeState, slot: int, seconds: float = 0.0) -> Finished:
    """What the host needs of a finished row."""
    there, known = fetchable((state.rows, state.known))
    rows = jax.tree.map(lambda x: np.asarray(x[slot]), there)
    known, rounds = int(known[slot]), int(rows.rounds)
    return Finished(
        index=int(rows.prompt),
        prompt_tokens=int(rows.start),
        tokens=rows.tokens[int(rows.start) : known].tolist(),
        rounds=rounds,
        emitted=int(rows.emitted),
        verified=int(rows.verified),
        by_depth=rows.by_depth.tolist(),
        by_rank=rows.by_rank.tolist(),
        by_source=rows.by_source.tolist(),
        trace=rows.trace[:rounds].tolist(),
        seconds=seconds,
    )


class Stream:
    """Iterates over ``Event``s while decoding prompts in ``batch`` slots, refilled as rows finish.

    The tokens of a prompt depend on the seed and its index alone, not on its slot or its neighbours.

    Attributes:
      state: the decode's state; ``memory()`` is what its method keeps for a later stream.
      compile_seconds: the round's compilation (or its load from the persistent cache), or the whole warm-up.
      prefill_seconds: reading prompts; without a warm-up, with the compilations that takes.
      decode_seconds: in rounds.
      step_seconds: with ``profile``, seconds by step (``STEPS``).
    """

    def __init__(
        self,
        plan: Plan,
        params: Params,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        batch: int = 1,
        seed: int = 0,
        stops: Int[np.ndarray, "states V"] | None = None,
        memory: Memory = None,
        capacity: int | None = None,
        rounds: int = 1,
        first_index: int = 0,
        profile: bool = False,
        warm_up: bool = False,
    ):
        """Compiles the round; decoding starts with the iteration.

        Args:
          plan: static.
          params: ``{"target": ..., ...}``.
          prompts: token ids, each at least one.
          max_new_tokens: of each prompt.
          batch: slots.
          seed: of the draws.
          stops: see ``jspec.stopping.stop_table``; default: the target's EOS ids end a row.
          memory: of an earlier stream.
          capacity: cache rows a slot; default: the bucket that holds the longest prompt and its answer.
          rounds: most rounds between two looks of the host.
          first_index: index of the first prompt in the input.
          profile: runs the steps one by one and times them.
          warm_up: runs every program once beforehand, so that the times that follow are those of any later run.

        Raises:
          ValueError: an argument out of range; a prompt that ``check_prompt`` refuses.
        """
        check_range("batch", batch, 1)
        check_range("rounds", rounds, 1, MAX_ROUNDS)
        check_range("seed", seed, 0, 2**32 - 1)
        check_range("first_index", first_index, 0, 2**31 - 1 - len(prompts))
        self.plan, self.params = plan, params
        self.prompts, self.max_new_tokens = prompts, max_new_tokens
        self.rounds, self.first_index = rounds, first_index
        self.prefill_seconds = self.decode_seconds = 0.0
        self.step_seconds = dict.fromkeys(STEPS, 0.0)
        self._profile = profile
        longest = max((len(p) for p in prompts), default=1)
        capacity = capacity or capacity_for(plan, longest + max_new_tokens)
        for prompt in prompts:
            check_prompt(plan, prompt, capacity, max_new_tokens)
        self._started = False
        start = time.perf_counter()

        def fresh():
            key = jax.random.key(seed)
            return new_state(plan, params, batch, capacity, key, stops, memory)

        self.state = fresh()
        if warm_up:
            self._warm_up()
            del self.state  # before another one needs the room
            self.state = fresh()
        else:  # all slots are empty and done: this compiles the program and runs no round
            self.state = self._decode(self.state, rounds, {})
        jax.block_until_ready(self.state)
        self.compile_seconds = time.perf_counter() - start

    def _warm_up(self) -> None:
        """Reads prompts until every chunk width has come, and runs a round in every row bucket; of smart, a rest, too.

        On XLA:CPU a program's, or a branch's, first run takes up to 0.3 s longer than the next.
        """
        seen = set()
        for prompt in self.prompts:
            widths = set(chunks(len(prompt) - 1, self.state.capacity))
            if not seen or widths - seen:
                self.state = self._read(self.state, {0: (prompt, 0)})
                seen |= widths or {0}
        batch = self.state.rows.done.shape[0]
        own = batch // self.plan.shards
        buckets = self.plan.row_buckets(own)

        def run_round(least):
            # One row of each data shard is open.
            rows = dataclasses.replace(self.state.rows, done=np.arange(batch) % own > 0)
            state = dataclasses.replace(self.state, rows=rows, least_rows=np.int32(least))
            self.state = self._decode(state, 1, {})
            self._look()

        for least in buckets:
            run_round(least)
        if isinstance(self.state.method.shared, SmartShared):
            method = hold(self.state.method, True, rounds=2)
            self.state = dataclasses.replace(self.state, method=method)
            for _ in range(3):  # the last one drafts again
                run_round(buckets[0])

    def memory(self) -> Memory:
        """What the method keeps for a later stream, copied: this one's next round donates its own."""
        method = self.state.method
        if self.plan.mesh is not None:  # the first data shard's
            first = jax.tree.map(lambda x: x[0], fetchable(method.shared))
            method = MethodState(rows=method.rows, shared=first)
        return jax.tree.map(jnp.copy, self.plan.method.memory(method))

    def __iter__(self) -> Iterator[Event]:
        """Decodes all prompts, once.

        Raises:
          RuntimeError: the second time.
        """
        if self._started:
            raise RuntimeError("a stream can be iterated over once: make another")
        self._started = True
        batch = self.state.rows.done.shape[0]
        queue = iter(range(len(self.prompts)))
        own = batch // self.plan.shards
        turns = [range(slot, batch, own) for slot in range(own)]  # one slot of each data shard
        running = [None] * batch  # per slot: index of its prompt
        seen = [0] * batch  # known tokens already handed out
        began = [0.0] * batch
        while True:
            for slots in turns:
                free = [slot for slot in slots if running[slot] is None]
                fresh = dict(zip(free, queue))
                if fresh:
                    self._admit(fresh)
                for slot, at in fresh.items():
                    running[slot], seen[slot] = at, len(self.prompts[at])
                    began[slot] = self.decode_seconds
            if all(at is None for at in running):
                return
            start = time.perf_counter()
            self.state = self._decode(self.state, self.rounds, self.step_seconds)
            known, done, tokens = self._look()
            self.decode_seconds += time.perf_counter() - start
            for slot, at in enumerate(running):
                if at is None:
                    continue
                fresh = tokens[slot, seen[slot] : known[slot]].tolist()
                seen[slot] = int(known[slot])
                finished = None
                if done[slot]:
                    finished = outcome(self.state, slot, self.decode_seconds - began[slot])
                    running[slot] = None
                yield Event(self.first_index + at, fresh, finished)

    def _admit(self, fresh: dict[int, int]) -> None:
        start = time.perf_counter()
        prompts = {s: (self.prompts[at], self.first_index + at) for s, at in fresh.items()}
        self.state = self._read(self.state, prompts)
        self.prefill_seconds += time.perf_counter() - start

    def _read(
        self, state: DecodeState, prompts: dict[int, tuple[Sequence[int], int]]
    ) -> DecodeState:
        most = self.max_new_tokens
        return jax.block_until_ready(admit_each(self.plan, self.params, state, prompts, most))

    def _decode(self, state: DecodeState, rounds: int, seconds: dict[str, float]) -> DecodeState:
        if self._profile:
            return self._timed_round(state, seconds)
        return advance(self.plan, self.params, state, rounds)

    def _look(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """What the host needs to see of all rows: known tokens, whether it is done, the tokens."""
        rows = self.state.rows
        seen = fetchable((self.state.cache.length, rows.done, rows.tokens))
        length, done, tokens = jax.device_get(seen)
        return length + 1, done, tokens

    def _timed_round(self, state: DecodeState, seconds: dict[str, float]) -> DecodeState:
        plan, params = self.plan, self.params

        def timed(name, step, *args):
            start = time.perf_counter()
            out = jax.block_until_ready(step(plan, params, *args))
            if name in seconds:
                seconds[name] += time.perf_counter() - start
            return out

        tree, state = timed("propose", run_propose, state)
        verified = timed("verify", run_verify, state, tree)
        verdict, state, kept = timed("accept_commit", run_accept_commit, state, tree, verified)
        return timed("absorb_observe", run_absorb_observe, state, verdict, kept)


# The steps of a round as programs of their own, to be timed one by one.
@partial(jax.jit, static_argnums=0, donate_argnums=2)
def run_propose(plan, params, state):
    """``propose``: the tree and the state. Donates ``state``."""

    def step(params, state):
        proposal, state = propose(plan, params, state)
        return proposal.tree, state

    return each_shard(plan.mesh, step, (ROWS, STATE))(params, state)


@partial(jax.jit, static_argnums=0)
def run_verify(plan, params, state, tree):
    """``verify``."""
    return each_shard(plan.mesh, partial(verify, plan), ROWS)(params, state, tree)


@partial(jax.jit, static_argnums=0, donate_argnums=2)
def run_accept_commit(plan, params, state, tree, verified):
    """``judge`` and ``commit``: the verdict, the state, and how many tokens each row kept. Donates ``state``."""

    def step(params, state, tree, verified):
        verdict = judge(plan, tree, verified)
        state, kept = commit(plan, state, verified, verdict)
        return verdict, state, kept

    return each_shard(plan.mesh, step, (ROWS, STATE, ROWS))(params, state, tree, verified)


@partial(jax.jit, static_argnums=0, donate_argnums=2)
def run_absorb_observe(plan, params, state, verdict, kept):
    """``absorb`` and ``observe``. Donates ``state``."""

    def step(params, state, verdict, kept):
        state = absorb(plan, params, state, verdict, kept)
        return observe(plan, params, state, verdict)

    return each_shard(plan.mesh, step)(params, state, verdict, kept)


def stream(plan: Plan, params: Params, prompts: Sequence[Sequence[int]], **options) -> Stream:
    """Decodes prompts as an iterator of ``Event``s: see ``Stream``, whose options it takes."""
    return Stream(plan, params, prompts, **options)


def decode_all(
    plan: Plan, params: Params, prompts: Sequence[Sequence[int]], **options
) -> tuple[list[Finished], Stream]:
    """Decodes prompts to the end: outcomes in the prompts' order, and the stream with its times and state."""
    run = Stream(plan, params, prompts, **({"rounds": MAX_ROUNDS} | options))
    done = [event.finished for event in run if event.finished]
    return sorted(done, key=lambda one: one.index), run
