"""Acceptance without running the target.

Every method emits the target's own text, so a method can be replayed on text recorded once: it drafts where its rounds
would land, and the walk over its tree reads the target's draws off the record. Exact at any temperature, for methods
whose state depends on known tokens and their taps, and on accepted paths, alone; those that learn from rejected nodes
are refused.
"""

import dataclasses
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from jspec.attention import default_attention
from jspec.decode import absorb, emit, judge, observe, propose
from jspec.driver import Finished, Stream, outcome
from jspec.mesh import alike, fetchable
from jspec.method import Memory, Needs, Params, unchanged
from jspec.methods.ar import ar
from jspec.prefill import CHUNKS, check_prompt, chunks, in_chunks, read_chunk
from jspec.state import DecodeState, KVCache, Plan, capacity_for, empty_state
from jspec.tree import Tree
from jspec.verification import Verified


@dataclasses.dataclass(frozen=True)
class Recording:
    """A prompt, the target's text after it, and the taps of both.

    Attributes:
      index: of the prompt in the input.
      start: prompt tokens.
      end: known tokens when autoregressive decoding ended.
      tokens: i32[X], prompt and text, run on for a path beyond ``end`` so that a last round's count is exact.
      taps: [X - 1, T, H], of every token but the last.
    """

    index: int
    start: int
    end: int
    tokens: Int[np.ndarray, " X"]
    taps: Float[np.ndarray, "Y T H"]


def record(
    plan: Plan,
    params: Params,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    batch: int = 1,
    seed: int = 0,
    stops: Int[np.ndarray, "states V"] | None = None,
    first_index: int = 0,
) -> list[Recording]:
    """Decodes prompts autoregressively and keeps what replaying ``plan.method`` needs.

    Args:
      plan: its method says which taps are kept and how far the text must run on.
      params: ``{"target": ..., ...}``.
      prompts: token ids.
      max_new_tokens: of each prompt.
      batch: slots of the decode.
      seed: of the draws.
      stops: where text ends; default: the target's EOS ids.
      first_index: index of the first prompt in the input.
    """
    plain = dataclasses.replace(plan, method=ar())
    empty = empty_state(plain, params, 1, 1, jax.random.key(seed), stops)
    never = np.zeros((1, plan.config.vocab_size), np.int32)
    run = Stream(
        plain,
        params,
        prompts,
        max_new_tokens=max_new_tokens + plan.path,
        batch=batch,
        seed=seed,
        stops=never,
        rounds=1 << 30,
        first_index=first_index,
    )
    table = np.asarray(empty.stops)
    done = sorted((e.finished for e in run if e.finished), key=lambda one: one.index)
    out = []
    for one in done:
        prompt = prompts[one.index - first_index]
        text = np.asarray([*prompt, *one.tokens], np.int32)
        new = min(_length(table, one.tokens, max_new_tokens), len(text) - len(prompt))
        taps = text_taps(plan, params, text, plan.method.needs.taps)
        out.append(Recording(one.index, len(prompt), len(prompt) + new, text, taps))
    return out


def _length(stops: np.ndarray, tokens: Sequence[int], most: int) -> int:
    """Tokens up to the first stop, inclusive."""
    at = 0
    for i, token in enumerate(tokens[:most]):
        at = stops[at, token]
        if at == len(stops):
            return i + 1
    return most


def text_taps(
    plan: Plan, params: Params, text: Int[np.ndarray, " X"], taps: tuple[int, ...]
) -> Float[np.ndarray, "Y T H"]:
    """The taps of all tokens of a text but the last, in prefill chunks."""
    if not taps:
        return np.zeros((len(text) - 1, 0, plan.config.hidden_size), np.float32)
    keep = ar()._replace(needs=Needs(taps=taps), absorb=_keep_taps)
    plan = dataclasses.replace(plan, method=keep)
    capacity = capacity_for(plan, len(text))
    state = _begin(plan, params, capacity, True)
    out = []
    for chunk, count in in_chunks([text[:-1]], capacity):
        state = _read(plan, params, state, chunk, count)
        out.append(np.asarray(fetchable(state.method.rows)[0, : count[0]]))
    empty = np.zeros((0, len(taps), plan.config.hidden_size), np.float32)
    return np.concatenate([empty, *out])


def _keep_taps(params, state, tokens, taps, counts):
    return dataclasses.replace(state, rows=taps)


@partial(jax.jit, static_argnums=0)
def _read(plan, params, state, tokens, count):
    return alike(plan.mesh, partial(read_chunk, plan))(params, state, tokens, count)


def replay(
    plan: Plan, params: Params, recordings: Sequence[Recording], **options
) -> list[Finished]:
    """Rounds of ``plan.method`` on recorded text: the same counts as real decoding, round by round.

    Args:
      plan: as for decoding.
      params: what the method reads (``params["target"]`` where its head uses the target's embedding).
      recordings: of ``record`` with a plan whose method has the same taps and at least this depth.
      **options: of ``replay_states``.

    Returns:
      Outcomes in order, as ``decode_all`` gives them; they all have the recorded text.

    Raises:
      ValueError: see ``replay_states``.
    """
    return [outcome(state, 0) for state in replay_states(plan, params, recordings, **options)]


def replay_states(
    plan: Plan,
    params: Params,
    recordings: Sequence[Recording],
    *,
    max_new_tokens: int,
    memory: Memory = None,
    stops: Int[np.ndarray, "states V"] | None = None,
    capacity: int | None = None,
) -> list[DecodeState]:
    """The states in which replays end, for those who want more than counts: what the method learned, say.

    Args:
      plan: see ``replay``.
      params: likewise.
      recordings: likewise.
      max_new_tokens: as recorded.
      memory: of the method.
      stops: as recorded.
      capacity: as for decoding; default: the bucket that decoding would use.

    Raises:
      ValueError: the method learns from rejected nodes or needs the target's lookahead; a recording is too short; or,
        as for decoding, a prompt that ``check_prompt`` refuses.
    """
    needs = plan.method.needs
    learns = plan.method.observe is not unchanged and not plan.method.path_only
    if needs.top_k or needs.lookahead or learns:
        raise ValueError(
            f"method {plan.method.name!r} learns from what the target says of rejected nodes: measure it by decoding"
        )
    for one in recordings:
        if one.taps.shape[1] != len(needs.taps):
            raise ValueError(
                f"recordings have {one.taps.shape[1]} taps, the method needs {len(needs.taps)}"
            )
        ran_out = min(one.start + max_new_tokens + needs.depth, plan.config.max_positions)
        if len(one.tokens) < ran_out:
            raise ValueError(
                f"recordings of {len(one.tokens)} tokens are too short, {ran_out} needed"
            )
    longest = max((one.start for one in recordings), default=1)
    capacity = capacity or capacity_for(plan, longest + max_new_tokens)
    for one in recordings:
        check_prompt(plan, one.tokens[: one.start].tolist(), capacity, max_new_tokens)
    return [
        _replay(plan, params, one, max_new_tokens, memory, stops, capacity) for one in recordings
    ]


def _replay(plan, params, one, max_new_tokens, memory, stops, capacity):
    room = min(capacity, plan.config.max_positions)
    # Room for padded chunks too: a slice that began later than asked would give other tokens.
    text = np.zeros((1, capacity + max(plan.path + 1, CHUNKS[-1])), np.int32)
    taps = np.zeros((1, text.shape[1], *one.taps.shape[1:]), one.taps.dtype)
    used = min(text.shape[1], one.tokens.size)
    text[0, :used], taps[0, : used - 1] = one.tokens[:used], one.taps[: used - 1]
    state = _begin(plan, params, capacity, False, memory, stops)
    at = 0
    for width in chunks(one.start - 1, capacity):
        count = min(width, one.start - 1 - at)
        state = _absorb(plan, params, state, text, taps, at, count, width)
        at += count
    rows = dataclasses.replace(
        state.rows,
        tokens=np.where(np.arange(capacity + 1) < one.start, text[:, : capacity + 1], 0),
        prompt=np.asarray([one.index], np.int32),
        start=np.asarray([one.start], np.int32),
        limit=np.asarray([min(one.start + max_new_tokens, room)], np.int32),
        done=np.zeros((1,), bool),
    )
    return _rounds(plan, params, dataclasses.replace(state, rows=rows), text, taps)


@partial(jax.jit, static_argnums=(0, 2, 3))
def _begin(
    plan: Plan, params: Params, capacity: int, cached: bool, memory: Memory = None, stops=None
) -> DecodeState:
    """A state of one row, as for decoding; unless ``cached``, with no layers in its cache."""

    def step(params, memory, stops):
        state = empty_state(plan, params, 1, capacity, jax.random.key(0), stops, memory)
        if cached:
            return state
        return dataclasses.replace(state, cache=KVCache((), (), state.cache.length))

    return alike(plan.mesh, step)(params, memory, stops)


@partial(jax.jit, static_argnums=(0, 7))
def _absorb(plan, params, state, text, taps, at, count, width):
    def step(params, state, text, taps, at, count):
        tokens = lax.dynamic_slice_in_dim(text, at, width, axis=1)
        states = lax.dynamic_slice_in_dim(taps, at, width, axis=1)
        counts = jnp.full((1,), count, jnp.int32)
        with default_attention(plan.attention):
            method = plan.method.absorb(params, state.method, tokens, states, counts)
        return _lengthen(dataclasses.replace(state, method=method), counts)

    return alike(plan.mesh, step)(params, state, text, taps, at, count)


def _lengthen(state: DecodeState, count: Int[Array, " B"]) -> DecodeState:
    cache = dataclasses.replace(state.cache, length=state.cache.length + count)
    return dataclasses.replace(state, cache=cache)


@partial(jax.jit, static_argnums=0)
def _rounds(plan: Plan, params: Params, state: DecodeState, text, taps) -> DecodeState:
    def one(params, state, text, taps):
        proposal, state = propose(plan, params, state)
        tree = proposal.tree
        verdict = judge(plan, tree, _read_off(state, tree, text, taps))
        rows, kept = emit(state.rows, state.cache.length, verdict, state.stops)
        state = _lengthen(dataclasses.replace(state, rows=rows), kept)
        state = absorb(plan, params, state, verdict, kept)
        return observe(plan, params, state, verdict)

    def step(params, state, text, taps):
        return lax.while_loop(
            lambda s: ~s.rows.done.all(), lambda s: one(params, s, text, taps), state
        )

    return alike(plan.mesh, step)(params, state, text, taps)


def _read_off(state: DecodeState, tree: Tree, text, taps) -> Verified:
    """What the target would say, right for every node that stands in its text; the others are never accepted."""
    at = jnp.clip(state.cache.length[:, None] + tree.depths, 0, text.shape[1] - 2)
    empty = jnp.zeros((*tree.tokens.shape, 0))
    return Verified(
        tokens=jnp.take_along_axis(text, at + 1, axis=1),
        top_tokens=empty.astype(jnp.int32),
        top_logits=empty,
        taps=jnp.take_along_axis(taps, at[..., None, None], axis=1),
        keys=(),
        values=(),
    )
