"""Domino's correction (arXiv 2605.29707): a slot's logits, given the path that a draft took to the slot.

A GRU without biases reads the tokens of a path, the root first. With s its state after the token before a draft and z
the slot's state, the draft's logits are those of the slot plus ``up @ silu(down @ [z; s])``; the first
``config.correction.prefix`` drafts do without. The gates are those of ``torch.nn.GRU``, as the published heads have
them (flax's GRUCell resets the state before the product, torch's the product):

    r = sigmoid(W_r e + U_r s)    u = sigmoid(W_u e + U_u s)    n = tanh(W_n e + r * (U_n s))    s' = (1 - u) n + u s

"gru_in" [3 G, H] is W, "gru_state" [3 G, G] is U, each r, u, n from the top. Arrays stand features first, as in the
target's forward; B rows, D slots, q paths a row, M columns, G the GRU's width, R the projection's rank.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jspec.heads.config import HeadConfig
from jspec.heads.parallel import HeadParams, draft_logits
from jspec.models.products import product
from jspec.sampling import top_k

Score = Callable[[Array, Array], tuple[Array, Array]]
"""``score(level, states [B, q, G]) -> (tokens i32[B, q, W], logps f32[B, q, W])``: drafts after so many drafts."""


def gru_step(
    weights: Mapping[str, Array], read: Float[Array, "gates M"], states: Float[Array, "G M"]
) -> Float[Array, "G M"]:
    """The states after a token each.

    Args:
      weights: "gru_state" is read.
      read: the product of "gru_in" with the tokens' embeddings.
      states: before.
    """
    reset, update, new = jnp.split(read, 3)
    from_reset, from_update, from_new = jnp.split(product(weights["gru_state"], states), 3)
    update = jax.nn.sigmoid(update + from_update)
    new = jnp.tanh(new + jax.nn.sigmoid(reset + from_reset) * from_new)
    return (1 - update) * new + update * states


def read_tokens(
    head: HeadParams, target_params: Mapping[str, Any], tokens: Int[Array, " M"]
) -> Float[Array, "gates M"]:
    """What ``gru_step`` takes of tokens: the product of "gru_in" with their embeddings."""
    # As in the target's forward: a loop around this must not widen all of a bf16 table.
    embed, tokens = lax.optimization_barrier((target_params["embed"], tokens))
    return product(head["correction"]["gru_in"], embed[tokens].T.astype(jnp.float32))


def widened(head: HeadParams) -> HeadParams:
    """The head with all of its correction but "up" in fp32.

    XLA:CPU compiles some of these products to bf16 ones that it cannot run where the processor has no unit for them
    (jax 0.10.2, a loop over several paths); they are small.
    """
    own = head["correction"]
    wide = {name: own[name].astype(jnp.float32) for name in ("gru_in", "gru_state", "down")}
    return {**head, "correction": {**own, **wide}}


def slot_part(
    config: HeadConfig, head: HeadParams, hidden: Float[Array, "H M"]
) -> Float[Array, "R M"]:
    """The part of the projection that the slots' own states give."""
    return product(head["correction"]["down"][:, : config.hidden_size], hidden)


def path_part(
    config: HeadConfig, head: HeadParams, states: Float[Array, "G M"]
) -> Float[Array, "R M"]:
    """The part of the projection that the paths give."""
    return product(head["correction"]["down"][:, config.hidden_size :], states)


def taught_inputs(
    config: HeadConfig,
    head: HeadParams,
    target_params: Mapping[str, Any],
    hidden: Float[Array, "H M"],
    roots: Int[Array, " A"],
    labels: Int[Array, "A D"],
) -> Float[Array, "R M"]:
    """What "up" is applied to where every draft before a slot was right, for training: differentiable.

    Args:
      config: static.
      head: with "correction".
      target_params: its "embed" [V, H] is read.
      hidden: of ``block_hidden``: column ``a * D + i`` is for draft i of anchor a.
      roots: the anchors' tokens.
      labels: the tokens after each, target ids; at one below 0 and after it columns are finite garbage.

    Returns:
      M = A * D columns; zeros where nothing is to be corrected.
    """
    anchors, depth = labels.shape
    path = jnp.concatenate([roots[:, None], jnp.maximum(labels[:, :-1], 0)], axis=1)
    read = read_tokens(head, target_params, path.T.reshape(-1))  # [3G, D * A]
    read = read.reshape(-1, depth, anchors).swapaxes(0, 1)

    def step(states, one):
        states = gru_step(head["correction"], one, states)
        return states, states

    empty = jnp.zeros((config.correction.gru_size, anchors))
    _, states = lax.scan(step, empty, read)  # [D, G, A]
    states = states.transpose(1, 2, 0).reshape(-1, anchors * depth)
    mixed = jax.nn.silu(slot_part(config, head, hidden) + path_part(config, head, states))
    corrected = jnp.arange(depth) >= config.correction.prefix
    return jnp.where(jnp.tile(corrected, anchors), mixed, 0)


def best_of_all(
    config: HeadConfig,
    head: HeadParams,
    target_params: Mapping[str, Any],
    hidden: Float[Array, "H M"],
    batch: int,
) -> Score:
    """Scores the likeliest token after each path, of the whole draft vocabulary; one path a row.

    Args:
      config: static.
      head: with "correction".
      target_params: its output rows are read, where the head has none.
      hidden: of ``draft_block``.
      batch: B.
    """
    logits = draft_logits(head, target_params, hidden)
    logits = jnp.moveaxis(logits.reshape(logits.shape[0], batch, -1), -1, 0)  # [D, Vd, B]
    slots = _by_slot(slot_part(config, head, hidden), batch)

    def score(level, states):
        mixed = _mixed(config, head, slots[level], states)[:, 0].T  # [R, B]
        change = product(head["correction"]["up"], mixed)
        out = logits[level] + jnp.where(level < config.correction.prefix, 0, change)
        best, index = top_k(out, 1)
        logps = best - jax.nn.logsumexp(out, axis=0)[:, None]
        return _target_ids(head, index)[:, None], logps[:, None]

    return score


def best_of_few(
    config: HeadConfig,
    head: HeadParams,
    target_params: Mapping[str, Any],
    hidden: Float[Array, "H M"],
    batch: int,
    candidates: int,
    whole: bool = False,
) -> Score:
    """Scores the slot's best tokens after every path, all paths at once: DARTree (arXiv 2608.13524).

    A slot's candidates are the best by its own logits, the same for all paths.

    Args:
      config: static.
      head: with "correction".
      target_params: its output rows are read, where the head has none.
      hidden: of ``draft_block``.
      batch: B.
      candidates: of a slot.
      whole: log-probabilities are over all tokens, the others with the slot's own logits; else over the candidates.
    """
    logits = draft_logits(head, target_params, hidden)
    base, index = top_k(logits, candidates)
    if whole:
        # In fp32 the others' mass may come out as nothing, or a little less.
        total = jax.nn.logsumexp(logits, axis=0)
        share = jnp.exp(jax.nn.logsumexp(base, axis=1) - total)
        others = (total + jnp.log1p(-jnp.minimum(share, 1))).reshape(batch, -1)
    rows = head["correction"]["up"][index].astype(jnp.float32)
    base, index, rows = (x.reshape(batch, -1, *x.shape[1:]) for x in (base, index, rows))
    tokens = _target_ids(head, index)  # [B, D, C]
    slots = _by_slot(slot_part(config, head, hidden), batch)

    def score(level, states):
        mixed = _mixed(config, head, slots[level], states)
        change = jnp.einsum("bqr,bcr->bqc", mixed, rows[:, level])
        change = jnp.where(level < config.correction.prefix, 0, change)
        logps = base[:, level, None] + change
        total = jax.nn.logsumexp(logps, axis=2, keepdims=True)
        if whole:
            total = jnp.logaddexp(total, others[:, level, None, None])
        logps = logps - total
        return jnp.broadcast_to(tokens[:, level, None], logps.shape), logps

    return score


def _by_slot(part, batch):
    """[R, B * D] -> [D, B, R]"""
    return part.reshape(part.shape[0], batch, -1).transpose(2, 1, 0)


def _mixed(config, head, slots, states):
    """What "up" is applied to, [B, q, R], of slots [B, R] and the states of paths [B, q, G]."""
    batch, paths, size = states.shape
    part = path_part(config, head, states.reshape(-1, size).T)
    return jax.nn.silu(slots[:, None] + part.T.reshape(batch, paths, -1))


def _target_ids(head, index):
    return head["draft_ids"][index] if "draft_ids" in head else index


__all__ = [
    "Score",
    "best_of_all",
    "best_of_few",
    "gru_step",
    "path_part",
    "read_tokens",
    "slot_part",
    "taught_inputs",
]
