"""Acceptance of heads that draft in one pass, by replay of tables that are made once.

What such a head drafts at a root depends on the known text alone. So its tables at all roots of a recording are made
in one pass over the text, as in training, and ``replay`` reads them where the method would run the head. The counts are
the same, and all trees and budgets share the tables.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from jspec.benches import load_bench
from jspec.driver import Finished
from jspec.heads.config import HeadConfig
from jspec.heads.parallel import best_drafts, block_hidden
from jspec.method import Method, MethodState, Needs, Proposal
from jspec.methods import ar, ddtree, dflash, jetspec
from jspec.models.load import Target
from jspec.recording import Recording, record, replay
from jspec.sampling import Sampling
from jspec.state import Plan, capacity_for
from jspec.tables import best_first_tree, chain_tree, exact_tree

TREES = {"chain": dflash, "jetspec": jetspec, "exact": ddtree}
# What these methods make of a table: the builder, and how many candidates of a slot it is given (None: as many as the
# budget can hold).
BUILDERS = {"chain": (chain_tree, 1), "jetspec": (best_first_tree, 7), "exact": (exact_tree, None)}
CHUNK = 32  # roots whose logits are there at a time


class Tables(NamedTuple):
    """What a head drafts at R roots of a text, one after the other; see ``jspec.heads.parallel.DraftTable``."""

    first: Int[Array, ""]  # where the first root stands
    tokens: Int[Array, "R D W"]
    logps: Float[Array, "R D W"]


def record_bench(
    target: Target,
    bench: str,
    prompts: int,
    taps: tuple[int, ...],
    *,
    sampling: Sampling | None = None,
    new: int,
    depth: int,
) -> list[Recording]:
    """The target's answers to the first prompts of a bench, with taps, for drafters of at most ``depth``."""
    keeping = ar()._replace(needs=Needs(depth=depth, taps=taps))
    plan = Plan(target.config, keeping, sampling or Sampling())
    ids = [prompt.encode(target.tokenizer) for prompt in load_bench(bench, prompts)]
    return record(plan, {"target": target.params}, ids, max_new_tokens=new, batch=16)


def make_tables(
    config: HeadConfig,
    head: dict[str, Any],
    target_params: dict[str, Any],
    recordings: Sequence[Recording],
    taps: tuple[int, ...],
    *,
    new: int,
    width: int,
) -> list[Tables]:
    """A head's tables at all roots of recordings.

    Args:
      config: the head's.
      head: its weights.
      target_params: the target's.
      recordings: with the states of the layers ``taps``, all those of the head among them.
      taps: see there.
      new: new tokens of a recording, at most: roots.
      width: candidates of a slot.
    """
    width = min(width, config.draft_vocab_size or config.vocab_size)
    return [
        _tables(config, new, width, head, target_params, states, tokens, one.start - 1)
        for one, states, tokens in padded(config, recordings, taps)
    ]


def padded(
    config: HeadConfig, recordings: Sequence[Recording], taps: tuple[int, ...]
) -> Iterator[tuple[Recording, Float[np.ndarray, "S T H"], Int[np.ndarray, " S"]]]:
    """Each recording with the states of a head's taps and its tokens, padded to one length for all."""
    columns = [taps.index(tap) for tap in config.taps]
    length = -(-max(len(one.tokens) for one in recordings) // 128) * 128
    for one in recordings:
        tokens = np.zeros(length, np.int32)
        tokens[: len(one.tokens)] = one.tokens
        states = np.zeros((length, len(columns), one.taps.shape[2]), one.taps.dtype)
        states[: len(one.taps)] = one.taps[:, columns]
        yield one, states, tokens


@partial(jax.jit, static_argnums=(0, 1, 2))
def _tables(config, new, width, head, target_params, taps, tokens, first):
    roots = -(-new // CHUNK) * CHUNK
    anchors = jnp.minimum(first + jnp.arange(roots), tokens.shape[0] - 1)
    hidden = block_hidden(config, head, target_params, taps, tokens, anchors)
    parts = hidden.reshape(hidden.shape[0], -1, CHUNK * config.depth).swapaxes(0, 1)
    found = lax.map(lambda part: best_drafts(head, target_params, part, width), parts)
    return Tables(first, *(x.reshape(roots, config.depth, width)[:new] for x in found))


@functools.cache
def tabled(tree: str, budget: int, depth: int) -> Method:
    """``TREES[tree]`` of a budget, reading ``params["tables"]``; its rows of state count the known tokens."""
    build, width = BUILDERS[tree]
    width = budget - 1 if width is None else width
    depth = min(depth, budget - 1)

    def init(params, batch, capacity, memory):
        return MethodState(rows=jnp.zeros((batch,), jnp.int32))

    def absorb(params, state, tokens, taps, counts):
        return MethodState(rows=state.rows + counts)

    def propose(params, state, roots, keep_growing=None):
        tables = params["tables"]
        at = state.rows - tables.first
        tokens, logps = (x[at, :depth, :width] for x in tables[1:])
        return Proposal(build(tokens, logps, roots, budget), passes=1), state

    return Method(f"tabled {tree}", budget, propose, Needs(depth=depth), init, absorb)


def replay_tables(
    target: Target,
    recordings: Sequence[Recording],
    tables: Sequence[Tables],
    tree: str,
    budget: int,
    *,
    new: int,
) -> list[Finished]:
    """Rounds of ``TREES[tree]`` with the head that made the tables, as ``replay`` would count them with that head."""
    plan = Plan(target.config, tabled(tree, budget, tables[0].tokens.shape[1]))
    capacity = capacity_for(plan, max(one.start for one in recordings) + new)
    params = {"target": {"embed": target.params["embed"]}}  # no more is read
    out = []
    for one, mine in zip(bare(recordings), tables, strict=True):
        options = {"max_new_tokens": new, "capacity": capacity}
        out += replay(plan, params | {"tables": mine}, [one], **options)
    return out


def bare(recordings: Sequence[Recording]) -> list[Recording]:
    """Recordings without taps, for methods that read none."""
    return [dataclasses.replace(one, taps=one.taps[:, :0]) for one in recordings]


def counts(done: Sequence[Finished]) -> dict[str, list[int]]:
    """What a cell keeps: by prompt, and by depth and rank over all prompts."""
    return {
        "emitted": [one.emitted for one in done],
        "rounds": [one.rounds for one in done],
        "by_depth": np.sum([one.by_depth for one in done], axis=0).tolist(),
        "by_rank": np.sum([one.by_rank for one in done], axis=0).tolist(),
    }


def tau(cell: dict[str, Any]) -> float:
    """Acceptance length of a cell: tokens a round, bonus included."""
    return sum(cell["emitted"]) / sum(cell["rounds"])
