"""SMART (arXiv 2604.09731): a node is verified, and a draft made, only while it pays on the machine at hand.

A combinator over any method. What a round costs stands in ``params["cost"]`` (see ``jspec.cost``); what the drafter's
probabilities are worth is learned from what the verifier says. Nothing that is chosen here changes a token.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool

from jspec.calibration import (
    Calibration,
    along_paths,
    calibrated,
    edge_values,
    estimates,
    learn,
    no_calibration,
    standing,
)
from jspec.choice import choose_bucket, choose_marginal
from jspec.cost.table import Cost, bucket_of, draft_seconds, level_seconds
from jspec.deferral import Queue, defer, empty_queue
from jspec.growth import best_paths
from jspec.method import (
    Memory,
    Method,
    MethodState,
    Proposal,
    check_method,
    check_range,
    unchanged,
)
from jspec.sleeping import Ledger, close_round, open_ledger
from jspec.tree import Tree, compact, root_only, take

RULES = {"exact": "sum", "marginal": "paths_mean"}  # and the benefit that goes with each
BENEFITS = ("sum", "paths_mean")


class SmartRows(NamedTuple):
    """What a row holds."""

    inner: Any  # the method's own rows
    queue: Queue  # known tokens that it was not shown yet
    active: Bool[
        Array, " B"
    ]  # it has a root, as far as is known: it read a prompt, or took part in the last round
    open: Bool[Array, " B"]  # a round of the row is under way
    drafted: Tree  # in that round, before it was cut


class SmartShared(NamedTuple):
    """What the batch shares."""

    inner: Any
    calibration: Calibration
    ledger: Ledger


class SmartMemory(NamedTuple):
    """What outlives a request."""

    inner: Memory
    calibration: Calibration
    ledger: Ledger


def smart(
    method: Method,
    *,
    rule: str = "exact",
    alpha: float | int = 0.8,
    benefit: str | None = None,
    rest: bool = True,
    queue: int = 32,
) -> Method:
    """Verifies as much of a method's trees as pays, and lets it draft only while that pays.

    The exact rule takes the likeliest nodes of the whole batch, up to the edge of the row bucket that yields the most
    tokens, less what its seconds yield elsewhere. The marginal rule is the published one. A drafter that works level by
    level is stopped before a level whose pass costs more than it can bring. Where even the best trees do not pay,
    drafting rests for a while: no pass is run, and the method is shown later what became known meanwhile.

    ``params["cost"]`` is a ``jspec.cost.table.Cost`` whose rows are the Plan's row buckets. Memory is a
    ``SmartMemory``: the method's own, the calibration and the ledger.

    Args:
      method: who drafts; one of budget 1 has nothing to choose, and is returned.
      rule: "exact" or "marginal".
      alpha: what a drafter's probability is worth, in (0, 1]: of the exact rule, before the verifier said anything.
      benefit: of a node, in the marginal rule: "sum", its whole chance, or "paths_mean", that over the root-to-leaf
        paths, as published. Default: what is the rule's own.
      rest: False: draft every round.
      queue: known tokens that wait, at most, while drafting rests.

    Raises:
      ValueError: an argument out of range; in ``init``, no cost model, one that ends at fewer rows than a full batch
        verifies, or a memory of another kind.
    """
    check_method(method)
    if rule not in RULES:
        raise ValueError(f"rule must be 'exact' or 'marginal', got {rule!r}")
    if not (isinstance(alpha, int | float) and 0 < alpha <= 1):
        raise ValueError(f"alpha must be in (0, 1], got {alpha!r}")
    benefit = RULES[rule] if benefit is None else benefit
    if benefit not in BENEFITS:
        raise ValueError(f"benefit must be 'sum' or 'paths_mean', got {benefit!r}")
    if rule == "exact" and benefit != "sum":
        raise ValueError(
            "benefit must be 'sum' with the exact rule, which is exact about nothing else"
        )
    check_range("queue", queue, 1, 1024)
    if method.budget == 1:
        return method
    return _smart(method, rule, float(alpha), benefit, bool(rest), queue)


@functools.cache
def _smart(method, rule, alpha, benefit, rest, room):
    needs = method.needs
    waits = rest and method.absorb is not unchanged

    def own(state):
        return MethodState(rows=state.rows.inner, shared=state.shared.inner)

    def put(state, inner, rows=None, shared=None):
        rows, shared = rows or state.rows, shared or state.shared
        return MethodState(
            rows=rows._replace(inner=inner.rows), shared=shared._replace(inner=inner.shared)
        )

    def init(params, batch, capacity, memory):
        if not isinstance(params.get("cost"), Cost):
            raise ValueError('params must hold a cost model for smart, as "cost": see jspec.cost')
        known = params["cost"].rows
        if (
            not isinstance(known, jax.core.Tracer)
            and (most := int(known[-1])) < batch * method.budget
        ):
            raise ValueError(
                f"the cost model must know {batch} rows of {method.budget} nodes, it ends at {most}"
            )
        if memory is None:
            memory = SmartMemory(None, no_calibration(), open_ledger())
        elif not isinstance(memory, SmartMemory):
            raise ValueError(f"memory must be one of smart, got {type(memory).__name__}")
        inner = method.init(params, batch, capacity, memory.inner)
        hidden = params["target"]["embed"].shape[1]
        rows = SmartRows(
            inner=inner.rows,
            queue=empty_queue(batch, room if waits else 0, len(needs.taps), hidden),
            active=jnp.zeros((batch,), bool),
            open=jnp.zeros((batch,), bool),
            drafted=root_only(jnp.zeros((batch,), jnp.int32), method.budget),
        )
        # A state is donated, so it must not share a buffer with memory.
        kept = jax.tree.map(jnp.array, (memory.calibration, memory.ledger))
        return MethodState(rows=rows, shared=SmartShared(inner.shared, *kept))

    def absorb(params, state, tokens, taps, counts):
        inner, queue = own(state), state.rows.queue
        if waits:
            # In the last round of a rest all that waits is shown, so that the next one can draft.
            resting = state.shared.ledger.rest > 1
            shown = (tokens, taps, counts)
            inner, queue = defer(resting, method, params, inner, queue, shown)
        else:
            inner = method.absorb(params, inner, tokens, taps, counts)
        active = state.rows.active | (counts > 0)
        return put(state, inner, state.rows._replace(queue=queue, active=active))

    def draft(params, state, roots, outer):
        """The method's trees cut to what pays and whole, how sure they were, their passes, price and promise."""
        cost, active, ledger = params["cost"], state.rows.active, state.shared.ledger
        chance = functools.partial(calibrated, estimates(state.shared.calibration, alpha))
        few = jnp.maximum(active.sum(), 1)
        plain = cost.verify[bucket_of(cost, few)] + cost.fixed

        def grows(level, scores):
            # All that a level can bring is one token for each path that lives; a path's edges count as equally likely.
            edges = jnp.exp(scores / jnp.maximum(level, 1))
            edges = jnp.where(edges > 0, edges, 0.0)
            lives = chance(edges, jnp.full(edges.shape, jnp.maximum(level, 1))) ** level
            lives = jnp.where(active[:, None] & (scores > -jnp.inf), lives, 0.0)
            brings = jnp.minimum(lives.sum(axis=1), 1.0).sum() * plain / few
            pays = brings > level_seconds(cost, level) * jnp.maximum(ledger.pace, 1.0)
            pays = jnp.broadcast_to((level == 0) | pays, active.shape)
            return pays if outer is None else pays & outer(level, scores)

        proposal, inner = method.propose(params, own(state), roots, grows)
        tree = whole = proposal.tree
        passes = jnp.asarray(proposal.passes, jnp.int32)
        drafted = draft_seconds(cost, passes) + cost.fixed
        edges = edge_values(tree)
        edge_worth = chance(edges, jnp.maximum(tree.depths, 1), tree.source)
        worth = along_paths(tree, edge_worth, needs.depth)
        worth = jnp.where(tree.parents >= 0, worth, 0.0)
        rate = few * jnp.maximum(ledger.pace, 1.0) / plain  # what the same seconds yield elsewhere
        keep = choose_bucket(worth, active, cost.rows, cost.verify + drafted, rate).keep
        if rule == "marginal":
            said = jnp.where(tree.parents >= 0, along_paths(tree, edges, needs.depth), 0.0)
            step = plain - cost.fixed
            keep = choose_marginal(tree, said, active, cost, step, alpha, benefit == "paths_mean")
        promise = 1 + jnp.where(keep & active[:, None], worth, 0.0).sum() / few
        tree = compact(tree, keep | (tree.live & (tree.parents < 0)))
        rows = jnp.where(active, tree.size, 0).sum()
        price = (cost.verify[bucket_of(cost, jnp.maximum(rows, 1))] + drafted) / plain
        if whole.budget != method.budget:  # one shape for all rounds, those that rest too
            whole = compact(whole, whole.live, method.budget)
        sure = best_paths(proposal.tree, needs.depth) if proposal.sure is None else proposal.sure
        return tree, whole, sure, passes, inner, price, promise

    def propose(params, state, roots, keep_growing=None):
        ledger, rows = state.shared.ledger, state.rows
        state = put(state, own(state), rows._replace(open=jnp.ones_like(rows.open)))
        before, shape = jax.tree.flatten(own(state))
        fresh = []  # which leaves of the method's own state drafting changes

        def look():
            tree, _, sure, _, inner, *_ = draft(params, state, roots, keep_growing)
            fresh[:] = [a is not b for a, b in zip(jax.tree.leaves(inner), before, strict=True)]
            return tree, sure

        shapes, none_sure = jax.eval_shape(look)

        def wake():
            *found, inner, price, promise = draft(params, state, roots, keep_growing)
            changed = [x for x, new in zip(jax.tree.leaves(inner), fresh, strict=True) if new]
            return *found, changed, price, promise

        def pause():
            same, one = [x for x, new in zip(before, fresh, strict=True) if new], jnp.float32(1.0)
            cut, whole = (root_only(roots, n) for n in (shapes.budget, method.budget))
            sure = jnp.full(none_sure.shape, -jnp.inf, none_sure.dtype)
            return cut, whole, sure, jnp.int32(0), same, one, one

        found = lax.cond(ledger.rest == 0, wake, pause) if rest else wake()
        tree, whole, sure, passes, changed, price, promise = found
        changed = iter(changed)  # what stays is not passed through the cond, which would copy it
        inner = [next(changed) if new else x for x, new in zip(before, fresh, strict=True)]
        ledger = ledger._replace(price=price, promise=promise)
        inner = jax.tree.unflatten(shape, inner)
        rows, shared = state.rows._replace(drafted=whole), state.shared._replace(ledger=ledger)
        state = put(state, inner, rows, shared)
        return Proposal(tree, passes=passes, sure=sure), state

    def observe(params, state, verdict):
        rows, shared = state.rows, state.shared
        inner = method.observe(params, own(state), verdict)
        took_part = rows.open & (verdict.tree.size > 0)
        awake = shared.ledger.rest == 0
        said = take(verdict.tokens, jnp.maximum(verdict.path, 0))
        seen = rows.drafted, said, verdict.count, took_part
        calibration, ledger = shared.calibration, shared.ledger
        stands, _ = standing(rows.drafted, said, verdict.count)
        missed = jnp.where(took_part, stands.sum(axis=1) - verdict.count, 0).sum()
        missed = missed / jnp.maximum(took_part.sum(), 1)
        ledger = close_round(ledger, verdict.count, took_part, missed)
        if rest:
            calibration = lax.cond(awake, lambda c: learn(c, *seen), lambda c: c, calibration)
            wakes = (shared.ledger.rest == 1) & (ledger.rest == 0)
            # Before a try, what was learned counts for less: a drafter that was bad then may be good now.
            calibration = jax.tree.map(lambda x: jnp.where(wakes, x / 2, x), calibration)
        else:
            calibration = learn(calibration, *seen)
            ledger = ledger._replace(rest=jnp.zeros_like(ledger.rest))
        rows = rows._replace(
            active=jnp.where(rows.open, took_part, rows.active), open=jnp.zeros_like(rows.open)
        )
        return put(state, inner, rows, shared._replace(calibration=calibration, ledger=ledger))

    def memory(state):
        return SmartMemory(method.memory(own(state)), state.shared.calibration, state.shared.ledger)

    return Method(
        f"smart({method.name})",
        method.budget,
        propose,
        needs,
        init,
        absorb,
        observe,
        memory,
        path_only=method.observe is unchanged or method.path_only,
        detail=method.detail,
    )


def hold(state: MethodState, resting: bool, rounds: int = 1 << 30) -> MethodState:
    """A state of smart that rests for so many rounds, or drafts without a try, as a measurement wants it."""
    ledger = state.shared.ledger._replace(
        rest=jnp.int32(rounds if resting else 0),
        credit=jnp.float32(1 << 30),
        trial=jnp.array(False),
    )
    return MethodState(rows=state.rows, shared=state.shared._replace(ledger=ledger))
