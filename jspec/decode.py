"""One round of tree speculative decoding, step by step, and the loop that runs rounds to the end.

    propose -> verify -> judge (accept) -> commit -> absorb -> observe

Every step is pure and takes and returns pytrees; ``decode_round`` is their composition, ``generate`` a while loop over
it, ``jspec.stream`` the same round driven from the host.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from jspec.acceptance import accept
from jspec.attention import default_attention
from jspec.mesh import DATA
from jspec.method import Params, Proposal, Verdict
from jspec.state import RANKS, DecodeState, KVCache, Plan, Rows, each_shard
from jspec.tree import SOURCES, Tree, compact
from jspec.verification import Verified, row_bucket, verify


def propose(plan: Plan, params: Params, state: DecodeState) -> tuple[Proposal, DecodeState]:
    """The method drafts; its tree is narrowed to what a row can still use.

    Finished rows have no root. A node whose key/value row would stand beyond the cache or the target's context is left
    out, so that decoding narrows to single tokens before it ends there.

    Raises:
      ValueError: the method's trees are wider than its budget.
    """
    with default_attention(plan.attention):
        proposal, method = plan.method.propose(params, state.method, state.roots)
    if proposal.tree.budget > plan.method.budget:
        raise ValueError(
            f"{plan.method.name} proposed trees of {proposal.tree.budget} nodes, its budget is {plan.method.budget}"
        )
    room = min(state.capacity, plan.config.max_positions) - 1 - state.cache.length
    deepest = jnp.where(state.rows.done, -1, room)
    tree = compact(proposal.tree, proposal.tree.depths <= deepest[:, None])
    # Whatever the method proposed, a row that is not done has its last token as root, so that every round advances it.
    active = ~state.rows.done
    tree = dataclasses.replace(
        tree,
        tokens=tree.tokens.at[:, 0].set(jnp.where(active, state.roots, 0)),
        scores=tree.scores.at[:, 0].set(jnp.where(active, 0.0, -jnp.inf)),
        size=jnp.where(active, jnp.maximum(tree.size, 1), 0),
    )
    passes = state.draft_passes + proposal.passes * active.any()
    state = dataclasses.replace(state, method=method, draft_passes=passes)
    return proposal._replace(tree=tree), state


def judge(plan: Plan, tree: Tree, verified: Verified) -> Verdict:
    """Accepts a path, and gathers all that the target said into what methods are shown."""
    path, count = accept(tree, verified.tokens, plan.method.needs.depth)
    return Verdict(
        tree=tree,
        path=path,
        count=count,
        tokens=verified.tokens,
        top_tokens=verified.top_tokens,
        top_logits=verified.top_logits,
        taps=verified.taps,
    )


def commit(
    plan: Plan, state: DecodeState, verified: Verified, verdict: Verdict
) -> tuple[DecodeState, Int[Array, " B"]]:
    """Accepted tokens become known, their key/value rows enter the cache; a row ends at a stop or at its limit.

    Returns:
      The state, and how many tokens each row kept of those it emitted: rows written and tokens now known. Nodes
      ``path[:kept]`` are what ``absorb`` gets; the last kept token is the next root.
    """
    rows, kept = emit(state.rows, state.cache.length, verdict, state.stops)
    in_order = jnp.broadcast_to(jnp.arange(verdict.path.shape[1]), verdict.path.shape)
    cache = write_rows(state.cache, verified.keys, verified.values, in_order, kept)
    used = jnp.arange(state.histogram.shape[0]) == row_bucket(plan, state, verdict.tree)
    histogram = state.histogram + used * (verdict.count > 0).any()
    return dataclasses.replace(state, cache=cache, rows=rows, histogram=histogram), kept


def emit(
    rows: Rows, length: Int[Array, " B"], verdict: Verdict, stops: Int[Array, "states V"]
) -> tuple[Rows, Int[Array, " B"]]:
    """Writes the emitted tokens, cut where the row ends, and counts the round. Needs no cache: replay uses it too."""
    tree, path, count = verdict.tree, verdict.path, verdict.count
    batch, most = path.shape
    row = jnp.arange(batch)[:, None]
    tokens = verdict.tokens[row, jnp.maximum(path, 0)]  # [B, P]: the draw after each accepted node
    emitted = jnp.arange(most) < count[:, None]
    stopped = stops.shape[0]  # the automaton's "stop"

    def step(at, column):
        token, live = column
        after = jnp.where(live & (at < stopped), stops[jnp.minimum(at, stopped - 1), token], at)
        return after, after

    stop, trail = lax.scan(step, rows.stop, (tokens.T, emitted.T))
    before_stop = (stopped > trail.T).sum(axis=1)  # entries from ``count`` on repeat the last one
    known = length + 1
    kept = jnp.minimum(jnp.minimum(count, before_stop + 1), jnp.maximum(rows.limit - known, 0))
    active = count > 0
    ended = (stop == stopped) | (known + kept >= rows.limit)

    drop = rows.tokens.shape[1]  # an index out of bounds: nothing is written
    at = jnp.where(jnp.arange(most) < kept[:, None], known[:, None] + jnp.arange(most), drop)
    turn = jnp.where(active, rows.rounds, drop)
    accepted = path >= 0
    rank = _sibling_rank(tree, path)
    source = tree.source[row, jnp.maximum(path, 0)]
    drafted = accepted & (jnp.arange(most) > 0)

    def tally(kinds, width):
        hit = drafted[..., None] & (kinds[..., None] == jnp.arange(width))
        return hit.sum(axis=1)

    return dataclasses.replace(
        rows,
        tokens=rows.tokens.at[row, at].set(tokens, mode="drop"),
        done=rows.done | (active & ended),
        stop=jnp.where(stop == stopped, 0, stop),
        rounds=rows.rounds + active,
        emitted=rows.emitted + count,
        verified=rows.verified + tree.size,
        by_depth=rows.by_depth + accepted,
        by_rank=rows.by_rank + tally(jnp.minimum(rank, RANKS - 1), RANKS),
        by_source=rows.by_source + tally(source, len(SOURCES)),
        trace=rows.trace.at[row[:, 0], turn].set(count, mode="drop"),
    ), kept


def _sibling_rank(tree: Tree, path: Int[Array, "B P"]) -> Int[Array, "B P"]:
    """How many siblings the drafter liked better (or as well, and listed before)."""
    row = jnp.arange(tree.batch)[:, None]
    at = jnp.maximum(path, 0)
    mine = tree.scores[row, at][..., None]
    siblings = tree.live[:, None] & (tree.parents[:, None] == tree.parents[row, at][..., None])
    nodes = jnp.arange(tree.budget)
    before = (tree.scores[:, None] > mine) | (
        (tree.scores[:, None] == mine) & (nodes < at[..., None])
    )
    return (siblings & before).sum(axis=-1)


def write_rows(
    cache: KVCache,
    keys: tuple[Array, ...],
    values: tuple[Array, ...],
    path: Int[Array, "B P"],
    count: Int[Array, " B"],
) -> KVCache:
    """Appends the key/value rows of nodes ``path[:count]`` to each row of the cache; nothing else is written.

    Args:
      cache: appended to.
      keys: the nodes' own, [B, N, kh, hd], one array a layer.
      values: likewise.
      path: node ids, read up to ``count``.
      count: rows to append; what does not fit is dropped.
    """
    capacity = cache.keys[0].shape[2]
    path = path[:, :capacity]
    batch, most = path.shape
    # A block of P rows is read, blended and written back: an in-place update, where a scatter would run row by row.
    start = jnp.minimum(cache.length, capacity - most)
    step = jnp.arange(most) - (cache.length - start)[:, None]  # which path entry stands where
    fresh = (step >= 0) & (step < count[:, None])
    nodes = jnp.take_along_axis(path, jnp.clip(step, 0, most - 1), axis=1)
    nodes = jnp.maximum(nodes, 0)

    def append(b, stored, new):
        block = new[b, nodes[b]].transpose(1, 0, 2)[None]  # [1, kh, P, hd]
        at = (b, 0, start[b], 0)
        old = lax.dynamic_slice(stored, at, block.shape)
        block = jnp.where(fresh[b][:, None], block.astype(stored.dtype), old)
        return lax.dynamic_update_slice(stored, block, at)

    def one(b, stored):
        return jax.tree.map(partial(append, b), stored, (keys, values))

    stored = (cache.keys, cache.values)
    stored = one(0, stored) if batch == 1 else lax.fori_loop(0, batch, one, stored)
    return KVCache(*stored, length=cache.length + count)


def absorb(
    plan: Plan, params: Params, state: DecodeState, verdict: Verdict, kept: Int[Array, " B"]
) -> DecodeState:
    """Shows the method what became known: the accepted path's tokens and taps, root first."""
    row, at = jnp.arange(kept.shape[0])[:, None], jnp.maximum(verdict.path, 0)
    tokens, taps = verdict.tree.tokens[row, at], verdict.taps[row, at]
    with default_attention(plan.attention):
        method = plan.method.absorb(params, state.method, tokens, taps, kept)
    return dataclasses.replace(state, method=method)


def observe(plan: Plan, params: Params, state: DecodeState, verdict: Verdict) -> DecodeState:
    """Shows the method all that the target said, of rejected nodes too."""
    with default_attention(plan.attention):
        method = plan.method.observe(params, state.method, verdict)
    return dataclasses.replace(state, method=method)


def decode_round(plan: Plan, params: Params, state: DecodeState) -> tuple[DecodeState, Verdict]:
    """One round: at least one token for every row that is not done. Pure; jit it with ``plan`` static.

    Args:
      plan: static.
      params: ``{"target": ..., ...}``.
      state: see ``new_state`` and ``admit``.
    """
    proposal, state = propose(plan, params, state)
    verified = verify(plan, params, state, proposal.tree)
    verdict = judge(plan, proposal.tree, verified)
    state, kept = commit(plan, state, verified, verdict)
    state = absorb(plan, params, state, verdict, kept)
    return observe(plan, params, state, verdict), verdict


@partial(jax.jit, static_argnums=0, donate_argnums=2)
def generate(plan: Plan, params: Params, state: DecodeState) -> DecodeState:
    """Rounds until every row is done, as one XLA program. Donates ``state``.

    Args:
      plan: static.
      params: ``{"target": ..., ...}``.
      state: with prompts in its slots (``admit``); empty slots stay empty.
    """

    def to_the_end(params, state):
        return lax.while_loop(
            lambda s: ~s.rows.done.all(), lambda s: decode_round(plan, params, s)[0], state
        )

    return each_shard(plan.mesh, to_the_end)(params, state)


@partial(jax.jit, static_argnums=0, donate_argnums=2)
def advance(
    plan: Plan, params: Params, state: DecodeState, most: Int[Array, ""] | int
) -> DecodeState:
    """At most ``most`` rounds, stopping when a row finishes, so that its slot can be refilled. Donates ``state``."""

    def until_one_is_done(params, state, most):
        before = state.rows.done

        def go_on(carry):
            turn, s = carry
            return (turn < most) & ~s.rows.done.all() & (s.rows.done == before).all()

        def one(carry):
            return carry[0] + 1, decode_round(plan, params, carry[1])[0]

        return lax.while_loop(go_on, one, (jnp.zeros((), jnp.int32), state))[1]

    def together(params, state, most):
        """Until a row of any data shard is done: a shard that has none left waits in empty rounds."""
        before = state.rows.done

        def look(s):
            open_here, changed = ~s.rows.done.all(), (s.rows.done != before).any()
            found = lax.psum(jnp.stack([open_here, changed]).astype(jnp.int32), DATA)
            return (found[0] > 0) & (found[1] == 0)

        def one(carry):
            s = decode_round(plan, params, carry[1])[0]
            return carry[0] + 1, s, look(s)

        begin = jnp.zeros((), jnp.int32), state, look(state)
        return lax.while_loop(lambda c: (c[0] < most) & c[2], one, begin)[1]

    step = until_one_is_done if plan.mesh is None else together
    return each_shard(plan.mesh, step)(params, state, most)
