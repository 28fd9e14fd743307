"""What a draft head is trained for: the target's next tokens at the slots of a block, or its distribution over them.

Slot k = 1 .. D of a block predicts the token k places after the anchor. A loss is a mean over slots of their losses,
weighted by how much a slot matters. The output head is applied to a part of the slots at a time, so that no array of
all slots' logits is ever there. Where the output head is frozen, a slot's loss is its own: a part's gradient is made
with it, and the backward pass computes nothing again. One that is trained too has its logits made twice.

A head with a correction (``jspec.heads.correction``) is trained for its corrected logits and, falling to nothing in the
course of a run, for the slots' own: the correction sees the right path while training, and would else be relied on for
what the slots should say (Domino, arXiv 2605.29707).
"""

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jspec.models.products import product
from jspec.sampling import top_k


@dataclasses.dataclass(frozen=True)
class LossConfig:
    """A loss.

    Attributes:
      kind: "ce": cross-entropy with the token that the target wrote (JetSpec's published heads, DFlash); "fkl": forward
        KL from the target's distribution (JetSpec, Eq. 8-9, at temperature 1); "rkl": reverse KL.
      gamma: slot k weighs exp(-(k - 1) / gamma); 0: all the same (DFlash, section A.1).
      dpace: alpha of D-PACE's weights, which grow with the chance that a slot is reached; None: off. With p_k the
        probability of slot k's token, s_k = (1 - alpha) p_k + alpha and its weight sum_{m >= k} prod_{i <= m} s_i.
      teacher_top_k: of the KL losses: the target's distribution over its so many best tokens only; 0: all.
      chunk: slots whose logits are there at a time, at most: the parts are of one size.
      base_decay: of a head with a correction: the part of the run in which the share of the uncorrected logits' loss
        falls from 1 to 0, evenly; null: all of it; 0: there is none.

    Raises:
      ValueError: a number out of range.
    """

    kind: Literal["ce", "fkl", "rkl"] = "ce"
    gamma: float = 0.0
    dpace: float | None = None
    teacher_top_k: int = 0
    chunk: int = 128
    base_decay: float | None = None

    def __post_init__(self):
        if not 0 <= self.gamma < math.inf:
            raise ValueError(f"gamma must be 0 (off) or above, got {self.gamma}")
        if self.dpace is not None and not 0 <= self.dpace <= 1:
            raise ValueError(f"dpace must be in [0, 1], got {self.dpace}")
        if self.teacher_top_k < 0:
            raise ValueError(f"teacher_top_k must be 0 (all) or above, got {self.teacher_top_k}")
        if self.chunk < 1:
            raise ValueError(f"chunk must be 1 or above, got {self.chunk}")
        if self.base_decay is not None and not 0 <= self.base_decay <= 1:
            raise ValueError(f"base_decay must be in [0, 1], got {self.base_decay}")


class Corrected(NamedTuple):
    """What is added to the logits of M slots: ``up @ inputs``, and the share of the loss that is without it."""

    up: Float[Array, "V R"]
    inputs: Float[Array, "R M"]  # zeros where nothing is corrected
    base: Float[Array, ""]


def base_share(loss: LossConfig, step: Int[Array, ""] | int, steps: int) -> Float[Array, ""]:
    """The share of the uncorrected logits' loss at a step of a run of ``steps``."""
    decay = steps * (1.0 if loss.base_decay is None else loss.base_decay)
    return jnp.maximum(1 - step / decay, 0.0) if decay else jnp.float32(0)


class Slots(NamedTuple):
    """What the output head says at M slots."""

    loss: Float[Array, " M"]
    label_logp: Float[Array, " M"]
    hit: Float[Array, " M"]  # 1 where the likeliest token is the label


def slot_losses(
    loss: LossConfig,
    output: Float[Array, "V H"],
    hidden: Float[Array, "H M"],
    labels: Int[Array, " M"],
    teacher: Float[Array, "H M"] | None = None,
    teacher_output: Float[Array, "V H"] | None = None,
    train_output: bool = False,
) -> Slots:
    """The loss of each slot, without weights.

    Args:
      loss: static.
      output: rows of the draft vocabulary.
      hidden: the head's final states.
      labels: draft ids; at a label below 0 everything is finite garbage.
      teacher: the target's final normed states that those labels were drawn from, for a KL loss.
      teacher_output: the target's output rows of the same vocabulary; default: ``output``.
      train_output: static: ``output`` has a gradient too.

    Raises:
      ValueError: a KL loss without ``teacher``.
    """
    _check_teacher(loss, teacher)
    teacher = hidden if teacher is None else teacher
    teacher_output = output if teacher_output is None else teacher_output
    slots = _trained_slots if train_output else _slots
    return slots(loss, output, hidden, labels, teacher, teacher_output)


def _trained_slots(loss, output, hidden, labels, teacher, teacher_output):
    cut, join = _parts(loss, hidden.shape[1])

    def one(part):
        return _part(loss, output, *part, teacher_output)

    said = lax.map(jax.checkpoint(one), (cut(hidden), cut(labels), cut(teacher)))
    return Slots(*map(join, said))


def _check_teacher(loss, teacher):
    if loss.kind != "ce" and teacher is None:
        raise ValueError(f"a {loss.kind} loss needs the target's final states as teacher")


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _slots(loss, output, hidden, labels, teacher, teacher_output):
    return _with_gradient(loss, output, hidden, labels, teacher, teacher_output)[0]


def _with_gradient(loss, output, hidden, labels, teacher, teacher_output):
    """The slots, and the gradient of each slot's loss by its own states: f32[H, M]."""
    slots = hidden.shape[1]
    cut, join = _parts(loss, slots)

    def one(part):
        states, label, taught = part

        def losses(states):
            said = _part(loss, output, states, label, taught, teacher_output)
            return said.loss, said

        value, pull, said = jax.vjp(losses, states, has_aux=True)
        return said, pull(jnp.ones_like(value))[0]

    said, gradient = lax.map(one, (cut(hidden), cut(labels), cut(teacher)))
    return Slots(*map(join, said)), join(gradient)


def _parts(loss, slots):
    """``cut`` [..., M] -> [parts, ..., size], and ``join``, which undoes it."""
    size = -(-slots // -(-slots // loss.chunk))

    def cut(x):
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -slots % size)])
        return jnp.moveaxis(x.reshape(*x.shape[:-1], -1, size), -2, 0)

    def join(x):
        x = jnp.moveaxis(x, 0, -2)
        return x.reshape(*x.shape[:-2], -1)[..., :slots]

    return cut, join


def _slots_back(loss, gradient, by):
    return None, by.loss * gradient, None, None, None


_slots.defvjp(_with_gradient, _slots_back)


def _part(loss, output, states, label, taught, teacher_output):
    """The slots of one part."""
    logits = product(output, states)
    return _said(loss, logits, label, _wanted(loss, taught, teacher_output))


def _wanted(loss, taught, teacher_output):
    """The teacher's log-probabilities, for a KL loss."""
    if loss.kind == "ce":
        return None
    wanted = product(teacher_output, taught)
    if loss.teacher_top_k:
        least = top_k(wanted, min(loss.teacher_top_k, wanted.shape[0]))[0][:, -1]
        wanted = jnp.where(wanted >= least, wanted, -jnp.inf)
    return jax.nn.log_softmax(wanted, axis=0)


def _said(loss, logits, label, wanted):
    """The slots with these logits."""
    total = jax.nn.logsumexp(logits, axis=0)
    at_label = jnp.take_along_axis(logits, jnp.maximum(label, 0)[None], axis=0)[0]
    label_logp = at_label - total
    hit = (at_label >= logits.max(axis=0)).astype(jnp.float32)
    if loss.kind == "ce":
        return Slots(-label_logp, label_logp, hit)
    logps = logits - total
    if loss.kind == "fkl":
        p = jnp.exp(wanted)
        terms = p * (jnp.where(p > 0, wanted, 0) - logps)
    else:
        # Outside the teacher's top tokens its probability is a floor, else the divergence would be infinite.
        terms = jnp.exp(logps) * (logps - jnp.maximum(wanted, -20.0))
    return Slots(terms.sum(axis=0), label_logp, hit)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _corrected(loss, output, hidden, labels, teacher, weights, corrected):
    """The sum of the weighted losses of corrected slots, the slots, and those without the correction.

    Other than in ``_slots`` the weights come first: "up" is trained, and its gradient is a sum over slots.
    """
    return _corrected_forth(loss, output, hidden, labels, teacher, weights, corrected)[0]


def _corrected_forth(loss, output, hidden, labels, teacher, weights, corrected):
    cut, join = _parts(loss, hidden.shape[1])
    up, inputs, base = corrected

    def one(kept, part):
        states, label, taught, weight, added = part
        wanted = _wanted(loss, taught, output)

        def losses(states, added, up):
            own = product(output, states)
            slots = [_said(loss, x, label, wanted) for x in (own + product(up, added), own)]
            mixed = (1 - base) * slots[0].loss + base * slots[1].loss
            return (weight * jnp.where(weight > 0, mixed, 0)).sum(), slots

        value, pull, slots = jax.vjp(losses, states, added, up, has_aux=True)
        to_states, to_added, to_up = pull(jnp.ones_like(value))
        kept = kept[0] + value, kept[1] + to_up.astype(jnp.float32)
        return kept, (to_states, to_added, slots)

    start = jnp.float32(0), jnp.zeros(up.shape, jnp.float32)
    parts = tuple(map(cut, (hidden, labels, teacher, weights, inputs)))
    (total, to_up), (to_hidden, to_inputs, slots) = lax.scan(one, start, parts)
    slots = tuple(Slots(*map(join, x)) for x in slots)
    return (total, slots), (join(to_hidden), join(to_inputs), to_up.astype(up.dtype))


def _corrected_back(loss, gradients, by):
    to_hidden, to_inputs, to_up = (by[0].astype(x.dtype) * x for x in gradients)
    return None, to_hidden, None, None, None, Corrected(to_up, to_inputs, None)


_corrected.defvjp(_corrected_forth, _corrected_back)


def slot_weights(
    loss: LossConfig, label_logp: Float[Array, "A D"], valid: Float[Array, "A D"]
) -> Float[Array, "A D"]:
    """How much each slot counts; no gradient goes through it.

    Args:
      loss: static.
      label_logp: log-probability of each slot's token.
      valid: 1 where a slot has a label.
    """
    weights = valid
    if loss.gamma:
        weights = weights * jnp.exp(-jnp.arange(valid.shape[1]) / loss.gamma)
    if loss.dpace is not None:
        chance = jnp.where(valid > 0, jnp.exp(label_logp), 0)
        reached = jnp.cumprod((1 - loss.dpace) * chance + loss.dpace, axis=1) * valid
        weights = weights * jnp.cumsum(reached[:, ::-1], axis=1)[:, ::-1]
    return lax.stop_gradient(weights)


def block_loss(
    loss: LossConfig,
    output: Float[Array, "V H"],
    hidden: Float[Array, "H M"],
    labels: Int[Array, "A D"],
    teacher: Float[Array, "H M"] | None = None,
    corrected: Corrected | None = None,
    *,
    total: Callable[[Array], Array] = lambda x: x,
    teacher_output: Float[Array, "V H"] | None = None,
    train_output: bool = False,
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """The loss over A blocks of D slots (M = A * D), and what a log wants to know; arguments as of ``slot_losses``.

    Args:
      loss: static.
      output: rows of the draft vocabulary.
      hidden: the head's final states.
      labels: draft ids; below 0: none.
      teacher: see ``slot_losses``.
      total: where these are a part of the blocks, sums over the parts: what is returned then is this part's share.

    Returns:
      The weighted mean over slots with a label (``labels`` >= 0), and "hits" [D] and "slots" [D]: how many slots' best
      token was the label, of how many; with a correction "base_hits" [D] too, without it.

    Raises:
      ValueError: D-PACE's weights with a correction: they cannot be known before its gradient is.
    """
    valid = (labels >= 0).astype(jnp.float32)

    def mean(summed, weights):
        return summed / jnp.maximum(total(weights.sum()), 1e-9)

    def hits(slots):
        return (slots.hit.reshape(labels.shape) * valid).sum(axis=0)

    said = {"slots": valid.sum(axis=0)}
    if corrected is None:
        given = (labels.reshape(-1), teacher, teacher_output, train_output)
        slots = slot_losses(loss, output, hidden, *given)
        each = jax.tree.map(lambda x: x.reshape(labels.shape), slots)
        weights = slot_weights(loss, each.label_logp, valid)
        summed = (weights * jnp.where(valid > 0, each.loss, 0)).sum()
        return mean(summed, weights), said | {"hits": hits(slots)}
    if loss.dpace is not None:
        raise ValueError("dpace must be off for a head with a correction")
    _check_teacher(loss, teacher)
    weights = slot_weights(loss, jnp.zeros_like(valid), valid)
    taught = hidden if teacher is None else teacher
    flat = labels.reshape(-1), taught, weights.reshape(-1)
    summed, (slots, base) = _corrected(loss, output, hidden, *flat, corrected)
    return mean(summed, weights), said | {"hits": hits(slots), "base_hits": hits(base)}
