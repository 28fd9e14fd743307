"""Reading prompts: all tokens but the last go through the target in bucketed chunks, into a slot of the state."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int

from jspec.attention import default_attention
from jspec.decode import write_rows
from jspec.method import Params, Verdict, check_range
from jspec.state import DecodeState, Plan, each_shard, empty_state, insert
from jspec.tree import Tree
from jspec.verification import run_rows

CHUNKS = (32, 64, 128, 256)
PASS = 16  # measured on a 2-core CPU; an accelerator hardly notices a second pass


def read_chunk(
    plan: Plan, params: Params, one: DecodeState, tokens: Int[Array, "1 K"], count: Int[Array, " 1"]
) -> DecodeState:
    """Reads the next ``count`` prompt tokens of a batch-1 state: cache, absorb and, if top tokens are needed, observe.

    A chunk is a tree that is a chain and is accepted whole, so this is verify and commit without a draw.
    """
    nodes = jnp.arange(tokens.shape[1])
    live = (nodes < count[:, None])[0][None]
    chain = Tree(
        tokens=jnp.where(live, tokens, 0),
        parents=jnp.where(live, nodes - 1, -1),
        depths=jnp.where(live, nodes, 0),
        scores=jnp.where(live, 0.0, -jnp.inf),
        source=jnp.zeros(tokens.shape, jnp.int8),
        size=count,
    )
    verified = run_rows(plan, params, one, chain, tokens.shape[1], drawing=False)
    path = jnp.where(live, nodes, -1)
    cache = write_rows(one.cache, verified.keys, verified.values, path, count)
    with default_attention(plan.attention):
        method = plan.method.absorb(params, one.method, tokens, verified.taps, count)
    if plan.method.needs.top_k:
        verdict = Verdict(
            tree=chain,
            path=path,
            count=count,
            tokens=verified.top_tokens[..., 0],
            top_tokens=verified.top_tokens,
            top_logits=verified.top_logits,
            taps=verified.taps,
        )
        with default_attention(plan.attention):
            method = plan.method.observe(params, method, verdict)
    return dataclasses.replace(one, cache=cache, method=method)


@partial(jax.jit, static_argnums=0, donate_argnums=2)
def _read_chunk(plan, params, one, tokens, count):
    return each_shard(plan.mesh, partial(read_chunk, plan))(params, one, tokens, count)


@partial(jax.jit, static_argnums=0, donate_argnums=1)
def _insert(mesh, state, slot, one):
    if mesh is None:
        return insert(state, slot, one)

    def step(_, state, slot, one):  # a shard without a prompt has slot -1
        return lax.cond(slot[0] < 0, lambda: state, lambda: insert(state, slot[0], one))

    return each_shard(mesh, step)((), state, slot, one)


@partial(jax.jit, static_argnums=0)
def _fresh(plan: Plan, params: Params, state: DecodeState) -> DecodeState:
    def step(params, state):
        memory = plan.method.memory(state.method)
        capacity = state.capacity
        return empty_state(plan, params, 1, capacity, state.key, state.stops, memory)

    return each_shard(plan.mesh, step)(params, state)


def chunks(count: int, capacity: int) -> list[int]:
    """Chunk widths that read ``count`` tokens: the largest while filled, then what reads the rest for least.

    A pass costs its width, padding included, and about ``PASS`` rows more.
    """
    widths = [c for c in CHUNKS if c <= capacity] or [capacity]
    full, rest = divmod(count, widths[-1])

    def least(left: int) -> tuple[int, list[int]]:
        if left <= 0:
            return 0, []
        options = []
        for width in widths:
            cost, tail = least(left - width)
            options.append((width + PASS + cost, [width, *tail]))
            if width >= left:  # a wider one only pads more
                break
        return min(options, key=lambda option: (option[0], len(option[1]), option[1][::-1]))

    return [widths[-1]] * full + least(rest)[1]


def in_chunks(
    texts: Sequence[Int[np.ndarray, " _"]], capacity: int
) -> Iterator[tuple[Int[np.ndarray, "D K"], Int[np.ndarray, " D"]]]:
    """Texts as ``read_chunk`` takes them: padded chunks, and how many tokens of each are a text's.

    Args:
      texts: one for each data shard; shorter ones have empty chunks at their end.
      capacity: of the cache.
    """
    at = 0
    for width in chunks(max(map(len, texts)), capacity):
        parts = [text[at : at + width] for text in texts]
        padded = np.zeros((len(texts), width), np.int32)
        for row, part in zip(padded, parts):
            row[: part.size] = part
        yield padded, np.asarray([part.size for part in parts], np.int32)
        at += width


def _room(plan: Plan, capacity: int) -> int:
    """Known tokens that a row can have."""
    return min(capacity, plan.config.max_positions)


def check_prompt(
    plan: Plan, prompt: Sequence[int], capacity: int, max_new_tokens: int
) -> Int[np.ndarray, " n"]:
    """A prompt's ids as an array, after making sure that it can be admitted.

    Raises:
      ValueError: an empty prompt, a token outside the vocabulary, no room for a new token, or none wanted.
    """
    try:
        ids = np.asarray(prompt)
    except ValueError:  # rows of different lengths
        ids = np.zeros((0, 0))
    vocab, room = plan.config.vocab_size, _room(plan, capacity)
    if ids.ndim != 1 or (ids.size and not np.issubdtype(ids.dtype, np.integer)):
        raise ValueError("prompt must be a sequence of token ids, whole numbers")
    if capacity < 1:
        raise ValueError(f"capacity must be 1 or above, got {capacity}")
    if not ids.size:
        raise ValueError("prompt must have at least one token")
    if ids.min() < 0 or ids.max() >= vocab:
        raise ValueError(f"prompt has a token outside the vocabulary 0..{vocab - 1}")
    if ids.size >= room:
        raise ValueError(
            f"prompt of {ids.size} tokens is longer than the context allows, {room - 1}"
        )
    check_range("max_new_tokens", max_new_tokens, 1)
    return ids.astype(np.int32)


def admit(
    plan: Plan,
    params: Params,
    state: DecodeState,
    slot: int,
    prompt: Sequence[int],
    index: int,
    max_new_tokens: int,
) -> DecodeState:
    """Reads a prompt into a slot, from the host. Donates ``state``.

    Args:
      plan: static.
      params: ``{"target": ..., ...}``.
      state: its row ``slot`` is replaced; the others are untouched.
      slot: 0..B-1.
      prompt: token ids, at least one. The last one is the first root.
      index: the prompt's index in the input; with the seed it fixes the row's draws.
      max_new_tokens: at least 1. The cache or the target's context may end the row earlier.

    Raises:
      ValueError: no such slot or index; a prompt that ``check_prompt`` refuses.
    """
    return admit_each(plan, params, state, {slot: (prompt, index)}, max_new_tokens)


def admit_each(
    plan: Plan,
    params: Params,
    state: DecodeState,
    prompts: Mapping[int, tuple[Sequence[int], int]],
    max_new_tokens: int,
) -> DecodeState:
    """``admit`` of a prompt to each of several data shards of a mesh, which read them at the same time.

    Args:
      plan: static.
      params: ``{"target": ..., ...}``.
      state: of B slots; the first data shard has the first ones.
      prompts: by slot, token ids and index; at most one a data shard.
      max_new_tokens: at least 1.

    Raises:
      ValueError: no such slot or index, or two slots of one shard; a prompt that ``check_prompt`` refuses.
    """
    capacity, batch, shards = state.capacity, state.rows.done.shape[0], plan.shards
    texts = [np.zeros((1,), np.int32)] * shards
    slots, indices = np.full(shards, -1, np.int32), np.zeros(shards, np.int32)
    for slot, (prompt, index) in prompts.items():
        check_range("slot", slot, 0, batch - 1)
        check_range("index", index, 0, (1 << 31) - 1)
        shard, own = divmod(slot, batch // shards)
        if slots[shard] >= 0:
            raise ValueError(f"slots must be of different data shards, got {sorted(prompts)}")
        texts[shard] = check_prompt(plan, prompt, capacity, max_new_tokens)
        slots[shard], indices[shard] = own, index
    one = _fresh(plan, params, state)
    for chunk, count in in_chunks([text[:-1] for text in texts], capacity):
        one = _read_chunk(plan, params, one, chunk, count)
    known = np.zeros((shards, capacity + 1), np.int32)
    for row, text in zip(known, texts):
        row[: text.size] = text
    room = _room(plan, capacity)
    rows = dataclasses.replace(
        one.rows,
        tokens=known,
        prompt=indices,
        start=np.asarray([text.size for text in texts], np.int32),
        limit=np.asarray([min(text.size + max_new_tokens, room) for text in texts], np.int32),
        done=np.zeros((shards,), bool),
    )
    at = slots[0] if plan.mesh is None else slots
    return _insert(plan.mesh, state, at, dataclasses.replace(one, rows=rows))
