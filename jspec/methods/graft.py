"""Graft (arXiv 2605.20104): where the drafter is unsure, it drafts less, and what was retrieved takes the room.

A combinator over any method. What it retrieves from are methods too: the table of ``token_recycling``, and the matches
of ``prompt_lookup``. Nothing that is chosen here changes a token.
"""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float

from jspec.calibration import along_paths, edge_values
from jspec.growth import best_paths
from jspec.method import Memory, Method, MethodState, Proposal, check_range, unchanged
from jspec.methods.prompt_lookup import prompt_lookup
from jspec.methods.token_recycling import token_recycling
from jspec.tree import assemble, ranks, take

CHECKPOINTS = (0, 1, 5)
SHARES = (52 / 60, 36 / 60, 20 / 60)  # of the paper's 60 nodes
# The paper's are not known. These are where an implementation by others starts; see jspec.thresholds.
THRESHOLDS = (0.35, 0.25, 0.15)
EDGE = (0.3,)
SOURCES = ("table", "text", "both")
PLACES = ("root", "tail")
# Retained nodes stand at 0, then come retrieved ones, then the draft's others. Lower scores than -_BAND count as it.
_BAND = 1e3
_RETRIEVED, _OTHERS = -1.0, -2 * _BAND


class GraftRows(NamedTuple):
    """What a row holds."""

    parts: tuple[Any, ...]  # rows of the drafter and of each retriever
    open: Bool[Array, " B"]  # a round of the row is under way


class GraftMemory(NamedTuple):
    """What outlives a request: the memories of the drafter and of each retriever."""

    parts: tuple[Memory, ...]


def graft(
    method: Method,
    *,
    checkpoints: Sequence[int] = CHECKPOINTS,
    thresholds: Sequence[float | int] | None = None,
    shares: Sequence[float | int] = SHARES,
    retrieve: str = "table",
    place: str = "root",
    prune: bool = True,
    k: int = 8,
    depth: int | None = None,
    scope: str = "prompt",
    leaves: int = 4,
) -> Method:
    """Drafts with a method as far as it is sure, and fills the budget with what was retrieved.

    Checkpoint d looks at the likeliest candidate of depth d + 1 (nothing, where none was drafted). Where its path
    probability is below the checkpoint's threshold, a drafter that works level by level stops there, only its best
    nodes are retained, and the checkpoint's share of the budget goes to a tree of retrieved tokens below the root.
    Whatever room the retained nodes leave is theirs: a node that is drafted as well takes no room twice, and what no
    retrieved node fills goes back to the draft's other nodes.

    With ``place="tail"`` retrieved trees hang off the leaves of what is retained, each as if the text went on to that
    leaf. Then a path is retained up to its first edge of a probability below the threshold: the paper's form for
    drafters of a chain (``leaves=1``). The two variants that the paper found worse are ``prune=False``, with either
    place: the drafter always drafts to its end, and the last one of ``shares`` always goes to retrieved nodes.

    ``params["graft"]``, where it is there, are thresholds to be used instead of the method's own: an array of as many,
    or one number for all.
    Memory is a ``GraftMemory``. Of a retained node that was retrieved as well, the drafter's score and source count;
    one that was pruned and came back by retrieval is a retrieved one. Its score is its retriever's, below a leaf added
    to the leaf's, and never above its parent's.

    Args:
      method: who drafts; one of budget 1 has no room for anything, and is returned.
      checkpoints: depths, ascending; those beyond the drafter's reach are not looked at.
      thresholds: probabilities in [0, 1], one a checkpoint, or the one of "tail"; 0 never prunes.
      shares: of the budget (its root left out), in [0, 1], one a checkpoint.
      retrieve: "table", the target's last best successors of each token; "text", continuations of earlier matches of
        the text's last tokens; or "both".
      place: "root" or "tail".
      prune: see above.
      k: successors kept of each token.
      depth: of retrieved branches, at most; default: what ``token_recycling`` and ``prompt_lookup`` have.
      scope: of the table: see ``token_recycling``.
      leaves: with "tail", how many leaves get branches: the likeliest.

    Raises:
      ValueError: an argument out of range; in ``init``, a memory of another kind.
    """
    if retrieve not in SOURCES:
        raise ValueError(f"retrieve must be 'table', 'text' or 'both', got {retrieve!r}")
    if place not in PLACES:
        raise ValueError(f"place must be 'root' or 'tail', got {place!r}")
    checkpoints, shares = check_checkpoints(checkpoints), tuple(shares)
    count = 1 if place == "tail" else len(checkpoints)
    if thresholds is None:
        thresholds = default_thresholds(place, count)
    thresholds = check_thresholds(thresholds, count)
    if len(shares) != len(checkpoints):
        raise ValueError(f"shares must be {len(checkpoints)}, as many as checkpoints, got {shares}")
    if wrong := [x for x in shares if not 0 <= x <= 1]:
        raise ValueError(f"shares must be in [0, 1], at most the whole budget, got {wrong[0]!r}")
    check_range("leaves", leaves, 1, 64)
    budget = method.budget
    if budget == 1:
        return method
    made = {
        "table": functools.partial(token_recycling, budget, k=k, scope=scope),
        "text": functools.partial(prompt_lookup, budget),
    }
    names = ("table", "text") if retrieve == "both" else (retrieve,)
    given = {} if depth is None else {"depth": depth}
    retrievers = tuple(made[name](**given) for name in names)
    tail = leaves if place == "tail" else 0
    quotas = tuple(_retained(share, budget - 1) for share in shares)
    where = (
        f"tail, leaves {leaves}" if tail else f"root, checkpoints {checkpoints}, retained {quotas}"
    )
    detail = f"{where}, thresholds {thresholds}" if prune else f"{where}, unpruned"
    return _graft(method, retrievers, checkpoints, thresholds, quotas, tail, bool(prune), detail)


def check_checkpoints(checkpoints: Sequence[Any]) -> tuple[int, ...]:
    """The checkpoints, after making sure that they are some.

    Raises:
      ValueError: they do not ascend from 0 or above.
    """
    found = tuple(checkpoints)
    for depth in found:
        check_range("checkpoints", depth, 0)
    if not found or any(a >= b for a, b in itertools.pairwise(found)):
        raise ValueError(f"checkpoints must ascend from 0 or above, got {found}")
    return found


def check_thresholds(values: Sequence[Any], count: int) -> tuple[float, ...]:
    """The thresholds, after making sure that they are ``count`` probabilities.

    Raises:
      ValueError: they are not.
    """
    if len(values) != count:
        raise ValueError(f"thresholds must be {count}, got {len(values)}")
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int | float | np.number):
            raise ValueError(f"thresholds must be numbers in [0, 1], got {value!r}")
        if not 0 <= value <= 1:
            raise ValueError(f"thresholds must be in [0, 1], got {value!r}")
    return tuple(map(float, values))


def default_thresholds(place: str, count: int = len(CHECKPOINTS)) -> tuple[float, ...]:
    """What thresholds are before any were calibrated: for ``count`` checkpoints, or the one of "tail"."""
    return EDGE if place == "tail" else (THRESHOLDS + THRESHOLDS[-1:] * count)[:count]


def _retained(share: float, room: int) -> int:
    """Drafted nodes of ``room`` that a share leaves: one at least, unless the share is all."""
    return 0 if share == 1 else max(1, room - round(share * room))


@functools.cache
def _graft(method, retrievers, checkpoints, thresholds, quotas, tail, prune, detail):
    parts = (method, *retrievers)
    budget, own = method.budget, method.needs
    reach = max(part.needs.depth for part in retrievers)
    depth = own.depth + reach if tail else max(own.depth, reach)
    depth = min(depth, budget - 1)
    needs = dataclasses.replace(own, depth=depth, top_k=max(part.needs.top_k for part in parts))
    # Those whose candidates the drafter has at all.
    watched = tuple(d for d in checkpoints if d < own.depth) if prune and not tail else ()
    # Prompt chunks are shown to a method that asks for top tokens; a drafter that does not was never meant to see them.
    rounds_only = own.top_k == 0 and method.observe is not unchanged
    learns = [part for part in parts if part.observe is not unchanged]

    def split(state):
        return [MethodState(*pair) for pair in zip(state.rows.parts, state.shared)]

    def join(state, states, is_open=None):
        is_open = state.rows.open if is_open is None else is_open
        rows = GraftRows(tuple(s.rows for s in states), is_open)
        return MethodState(rows=rows, shared=tuple(s.shared for s in states))

    def init(params, batch, capacity, memory):
        if memory is None:
            memory = GraftMemory((None,) * len(parts))
        elif not isinstance(memory, GraftMemory) or len(memory.parts) != len(parts):
            raise ValueError(f"memory must be one of {name}, got {type(memory).__name__}")
        states = [p.init(params, batch, capacity, m) for p, m in zip(parts, memory.parts)]
        rows = GraftRows(tuple(s.rows for s in states), jnp.zeros((batch,), bool))
        return MethodState(rows=rows, shared=tuple(s.shared for s in states))

    def absorb(params, state, tokens, taps, counts):
        states = [
            part.absorb(params, s, tokens, taps, counts) for part, s in zip(parts, split(state))
        ]
        return join(state, states)

    def propose(params, state, roots, keep_growing=None):
        limits = jnp.asarray(params.get("graft", thresholds), jnp.float32)
        limits = jnp.broadcast_to(limits, (len(thresholds),))
        drafter, *others = split(state)
        stop = keep_sure(watched, limits, keep_growing) if watched else keep_growing
        proposal, drafter = method.propose(params, drafter, roots, stop)
        draft = proposal.tree
        retained = draft.live
        if tail and prune:
            sure = edge_values(draft) >= limits[0]
            retained = along_paths(draft, sure.astype(jnp.float32), own.depth) > 0
        elif watched or not prune:
            retained &= ranks(draft.scores) <= quota(proposal, limits)[:, None]
        lists = [_candidates(draft, jnp.where(retained, 0.0, _after(_OTHERS, draft.scores)))]
        below = _leaves(draft, retained, tail) if tail else jnp.zeros_like(roots)[:, None]
        for part, s in zip(retrievers, others):
            start = sum(x[0].shape[1] for x in lists)
            lists.append(_branches(part, params, s, draft, below, own.depth if tail else 0, start))
        *fields, order = (jnp.concatenate(x, axis=1) for x in zip(*lists))
        tree = assemble(roots, *fields, budget, depth, order)
        state = join(state, [drafter, *others], jnp.ones_like(state.rows.open))
        return proposal._replace(tree=tree, draft_logits=None), state  # those are not this tree's

    def quota(proposal, limits):
        """Drafted nodes to be retained, roots left out."""
        most = jnp.full_like(proposal.tree.size, budget if prune else quotas[-1])
        if not watched:
            return most
        below = confidence(proposal, watched) < limits[: len(watched)]
        stage = jnp.argmax(below, axis=1)
        return jnp.where(below.any(axis=1), jnp.asarray(quotas)[stage], most)

    def observe(params, state, verdict):
        def show(part, s):
            top = part.needs.top_k
            seen = verdict._replace(
                top_tokens=verdict.top_tokens[..., :top], top_logits=verdict.top_logits[..., :top]
            )
            return part.observe(params, s, seen)

        drafter, *others = split(state)
        if rounds_only:
            drafter = lax.cond(
                state.rows.open.any(), lambda: show(method, drafter), lambda: drafter
            )
        else:
            drafter = show(method, drafter)
        states = [drafter, *(show(part, s) for part, s in zip(retrievers, others))]
        return join(state, states, jnp.zeros_like(state.rows.open))

    def memory(state):
        return GraftMemory(tuple(part.memory(s) for part, s in zip(parts, split(state))))

    name = f"graft({method.name})"
    return Method(
        name,
        budget,
        propose,
        needs,
        init,
        absorb,
        observe if learns else unchanged,
        memory,
        path_only=all(part.path_only for part in learns),
        detail="; ".join(part.detail for part in parts) + f"; {detail}",
    )


def confidence(proposal: Proposal, checkpoints: Sequence[int]) -> Float[Array, "B C"]:
    """The path probability of the likeliest node of depth d + 1, for each checkpoint d; 0 where there is none.

    Of all nodes that were drafted: a drafter may have left that one out of a small tree for better ones of less depth.
    """
    depth, sure = 1 + max(checkpoints), proposal.sure
    if sure is None:
        sure = best_paths(proposal.tree, depth)
    beyond = max(0, depth - sure.shape[1])
    sure = jnp.pad(sure, [(0, 0), (0, beyond)], constant_values=-jnp.inf)
    return jnp.exp(sure[:, jnp.asarray(checkpoints, jnp.int32)])


def keep_sure(checkpoints: Sequence[int], limits: Float[Array, " C"], outer=None):
    """A ``keep_growing`` that stops a row at the first checkpoint where its best path is below the limit.

    Args:
      checkpoints: depths d: looked at are candidates of depth d + 1, the frontier of level d + 1.
      limits: a probability for each checkpoint.
      outer: another ``keep_growing`` that must agree, or None.
    """
    levels = 1 + jnp.asarray(checkpoints, jnp.int32)

    def keep_growing(level, scores):
        best = jnp.exp(jnp.max(scores, axis=1, keepdims=True))
        unsure = (level == levels) & (best < limits[: len(checkpoints)])
        sure = ~unsure.any(axis=1)
        return sure if outer is None else sure & outer(level, scores)

    return keep_growing


def inner_state(state: MethodState) -> MethodState:
    """The drafter's own state in one of ``graft``."""
    return MethodState(rows=state.rows.parts[0], shared=state.shared[0])


def _after(start, scores):
    """What orders nodes by their scores, from ``start`` on downwards."""
    return start + jnp.clip(scores, -_BAND, 0.0)


def _candidates(tree, order):
    """The fields of ``assemble`` for the nodes of a tree but its root, and their order."""
    parents = jnp.where(tree.parents > 0, tree.parents - 1, -1)
    fields = (parents, tree.tokens, tree.scores, tree.source, tree.live, order)
    return [x[:, 1:] for x in fields]


def _leaves(tree, retained, count):
    """i32[B, L]: the likeliest retained nodes without a retained child; -1 where there are no more."""
    ids = jnp.arange(tree.budget)
    child = retained[:, None, :] & (tree.parents[:, None, :] == ids[:, None])
    leaf = retained & ~child.any(axis=2)
    scores, at = lax.top_k(jnp.where(leaf, tree.scores, -jnp.inf), min(count, tree.budget))
    return jnp.where(scores > -jnp.inf, at, -1)


def _branches(part, params, state, draft, below, depth, start):
    """Candidates from a retriever, hanging off nodes ``below`` [B, L] of the draft; ``start`` others come before."""

    def one(node):
        at, tokens = jnp.maximum(node, 0)[:, None], []
        root = take(draft.tokens, at)[:, 0]
        known = state
        if depth:  # as if the text went on to the node
            path = at
            for level in reversed(range(depth)):
                higher = take(draft.depths, path) > level
                path = jnp.where(higher, jnp.maximum(take(draft.parents, path), 0), path)
                tokens.append(take(draft.tokens, path)[:, 0])
            length = take(draft.depths, at)[:, 0]
            taps = jnp.zeros((*path.shape[:1], depth, 0, 0))
            known = part.absorb(params, known, jnp.stack(tokens[::-1], axis=1), taps, length)
        tree = part.propose(params, known, root)[0].tree
        scores = tree.scores + take(draft.scores, at)
        valid = tree.live & (node >= 0)[:, None]
        tree = dataclasses.replace(tree, scores=scores)
        return _candidates(tree, _after(_RETRIEVED, scores)), valid[:, 1:]

    fields, valid = jax.vmap(one, in_axes=1, out_axes=1)(below)
    parents, *rest = fields
    room = parents.shape[2]
    offset = start + room * jnp.arange(below.shape[1])[:, None]
    parents = jnp.where(parents < 0, below[:, :, None] - 1, offset + parents)
    rest[3] = valid
    return [x.reshape(x.shape[0], -1) for x in (parents, *rest)]
