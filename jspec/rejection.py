"""Rejection rules for trees whose siblings were drawn at random: an option beside the match rule of ``acceptance``.

They are for trees drawn from the drafter's own law, siblings without replacement, and ask for that law at every node.
The text then has the target's law, but it is not the text that the seed gives autoregressive decoding. A tree that was
cut by its own tokens or scores (``select``, ``smart``, ``graft``) is no longer such a draw, and must not come here.

    coins = jax.random.uniform(key, tree.tokens.shape)
    found = sequoia(tree, target, draft, coins, depth)

``tokens_of`` makes of it what ``judge`` takes for the target's draws.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Key

from jspec.tree import Tree


class Rejection(NamedTuple):
    """What a rule made of a tree.

    Attributes:
      path: accepted node ids, the root first, -1 from ``count`` on; P = depth + 1.
      count: accepted nodes, root included; 0 for a tree without a root.
      law: of the bonus token, which follows the last accepted node.
      chances: what the coin of each node was held against: below it a node, or the path to it, was accepted. -1 where
        no coin was looked at.
    """

    path: Int[Array, "B P"]
    count: Int[Array, " B"]
    law: Float[Array, "B V"]
    chances: Float[Array, "B N"]


def draw_siblings(
    key: Key[Array, ""], logits: Float[Array, "*q V"], count: int
) -> tuple[Int[Array, "*q n"], Float[Array, "*q n"]]:
    """Draws n = ``count`` different tokens, one after the other, each from what is left of softmax(logits).

    Args:
      key: of the draw.
      logits: divided by the temperature already; -inf is never drawn before a finite one.
      count: at most V.

    Returns:
      The tokens in the order drawn, and their log-probabilities (of the whole softmax); -inf: not to be used.
    """
    noise = jax.random.gumbel(key, logits.shape, logits.dtype)
    _, tokens = lax.top_k(logits + noise, count)
    logps = jnp.take_along_axis(jax.nn.log_softmax(logits, axis=-1), tokens, axis=-1)
    return tokens, logps


def sequoia(
    tree: Tree,
    target: Float[Array, "B N V"],
    draft: Float[Array, "B N V"],
    coins: Float[Array, "B N"],
    depth: int,
) -> Rejection:
    """Sequoia's rule (arXiv 2402.12374, Algorithm 2), from the root downwards.

    At a node with the target's law p and the drafter's q, its children are tried in the order drawn: x is accepted with
    the chance p(x) / q(x). Else p becomes what p has above q, x is struck from q, both are normalised, and it is the
    next one's turn. After the last one the bonus is drawn from p.

    Args:
      tree: siblings stand in the order drawn.
      target: the target's law after each node, as it is sampled from (temperature and filters applied).
      draft: the law that each node's children were drawn from.
      coins: uniform in [0, 1).
      depth: static; no node is deeper.
    """
    nodes = jnp.arange(1, tree.budget, dtype=jnp.int32)

    def visit(carry, node):
        here, p, q = carry
        token = tree.tokens[:, node][:, None]
        child = (tree.parents[:, node] == here) & (node < tree.size)
        px, qx = (jnp.take_along_axis(x, jnp.maximum(token, 0), axis=1)[:, 0] for x in (p, q))
        # A token that q cannot give was not drawn from it: it is passed over, which changes no law.
        tried = child & (qx > 0)
        chance = jnp.where(tried, jnp.minimum(px / jnp.where(tried, qx, 1), 1), -1)
        taken = coins[:, node] < chance
        refused = tried & ~taken
        left, struck = _residual(p, q), _strike(q, token)
        p = jnp.where(refused[:, None], left, jnp.where(taken[:, None], target[:, node], p))
        q = jnp.where(refused[:, None], struck, jnp.where(taken[:, None], draft[:, node], q))
        return (jnp.where(taken, node, here), p, q), (chance, taken)

    start = _root(tree), target[:, 0], draft[:, 0]
    (last, law, _), (chances, _) = lax.scan(visit, start, nodes)
    return Rejection(
        *_path(tree, last, depth), law, jnp.pad(chances.T, [(0, 0), (1, 0)], constant_values=-1)
    )


def traversal(
    tree: Tree,
    target: Float[Array, "B N V"],
    draft: Float[Array, "B N V"],
    coins: Float[Array, "B N"],
    depth: int,
) -> Rejection:
    """Traversal verification (arXiv 2505.12398), from the leaves upwards.

    A node's weight is w(child) = min(1, w p(x) / q(x)), the root's is 1. The first leaf in depth-first order is
    accepted, with all the path to it, with the chance of its weight. Else it is removed: at its parent, with S the
    mass that w p has above q, w becomes S / (S + 1 - w), p that mass normalised, x is struck from q, and the next leaf
    in depth-first order is tried, or the parent as a leaf. The bonus is drawn from p at the accepted node.

    The arguments are those of ``sequoia``. It needs 2 N steps at most, and holds two laws a node.
    """
    last, law, chances = jax.vmap(_traverse)(tree, target, draft, coins)
    return Rejection(*_path(tree, last, depth), law, chances)


def _traverse(tree, target, draft, coins):
    """One row of ``traversal``; the fields of the tree have no batch axis."""
    nodes = jnp.arange(tree.tokens.shape[0])
    live = nodes < tree.size
    tokens = jnp.maximum(tree.tokens, 0)

    def go_on(carry):
        return ~carry[-1]

    def step(carry):
        here, left, w, p, q, chances, _ = carry
        children = left & (tree.parents == here) & (nodes > 0)
        child = jnp.argmax(children).astype(jnp.int32)

        def down():
            x = tokens[child]
            ratio = w[here] * p[here, x] / jnp.where(q[here, x] > 0, q[here, x], 1)
            weight = jnp.where(q[here, x] > 0, jnp.minimum(ratio, 1), 0)
            return child, left, w.at[child].set(weight), p, q, chances, False

        def leaf():
            above, x = jnp.maximum(tree.parents[here], 0), tokens[here]
            taken = (here == 0) | (coins[here] < w[here])
            tried = q[above, x] > 0
            mass = jnp.maximum(w[above] * p[above] - q[above], 0)
            total = mass.sum()
            rest = total + 1 - w[above]
            weight = jnp.where(w[above] >= 1, 1, total / jnp.where(rest > 0, rest, 1))
            law = jnp.where(total > 0, mass / jnp.where(total > 0, total, 1), p[above])
            weight = jnp.where(tried, weight, w[above])
            law = jnp.where(tried, law, p[above])
            kept = w.at[above].set(weight), p.at[above].set(law)
            struck = q.at[above].set(_strike(q[above][None], x[None, None])[0])
            was = jnp.where(here == 0, -1, w[here])
            after = above, left.at[here].set(False), *kept, struck, chances.at[here].set(was), False
            done = here, left, w, p, q, chances.at[here].set(was), True
            return jax.tree.map(lambda a, b: jnp.where(taken, a, b), done, after)

        return lax.cond(children.any(), down, leaf)

    zero = jnp.zeros_like(coins)
    start = (jnp.int32(0), live, zero.at[0].set(1), target, draft, zero - 1, tree.size == 0)
    here, _, _, p, _, chances, _ = lax.while_loop(go_on, step, start)
    return jnp.where(tree.size > 0, here, _root(tree)), p[here], chances


def _root(tree):
    """Where a walk begins; -2, no node's parent, in a tree without a root."""
    return jnp.where(tree.size > 0, jnp.int32(0), jnp.int32(-2))


def _residual(p, q):
    """What p has above q, normalised; p itself where that is nothing, since then they are equal."""
    mass = jnp.maximum(p - q, 0)
    total = mass.sum(axis=-1, keepdims=True)
    return jnp.where(total > 0, mass / jnp.where(total > 0, total, 1), p)


def _strike(q, token):
    """q without a token, normalised; zeros where nothing is left."""
    left = jnp.where(jnp.arange(q.shape[-1]) == token, 0, q)
    total = left.sum(axis=-1, keepdims=True)
    return left / jnp.where(total > 0, total, 1)


def _path(tree, last, depth):
    """The path from the root to a node, and its length; -2 is no node."""
    here, found = last, []
    at = jnp.maximum(last, 0)
    length = jnp.where(
        last >= 0, jnp.take_along_axis(tree.depths, at[:, None], axis=1)[:, 0] + 1, 0
    )
    for _ in range(depth + 1):
        found.append(here)
        above = jnp.take_along_axis(tree.parents, jnp.maximum(here, 0)[:, None], axis=1)[:, 0]
        here = jnp.where(here > 0, above, -2)
    upwards = jnp.stack(found, axis=1)  # the node first
    slot = jnp.arange(depth + 1)
    at = jnp.clip(length[:, None] - 1 - slot, 0, depth)
    path = jnp.where(slot < length[:, None], jnp.take_along_axis(upwards, at, axis=1), -1)
    return path.astype(jnp.int32), length.astype(jnp.int32)


def tokens_of(tree: Tree, found: Rejection, bonus: Int[Array, " B"]) -> Int[Array, "B N"]:
    """A token after each accepted node: the next one of the path, or the bonus; -1 at other nodes.

    In the place of ``Verified.tokens`` they make ``judge`` accept the rule's path: no bonus is a child of its node,
    since the law of the bonus has no mass on a refused token.

    Args:
      tree: what was verified.
      found: of a rule.
      bonus: drawn from ``found.law``.
    """
    row = jnp.arange(tree.batch)[:, None]
    ahead = jnp.pad(found.path[:, 1:], [(0, 0), (0, 1)], constant_values=-1)
    slot = jnp.arange(found.path.shape[1])
    token = jnp.where(
        slot == found.count[:, None] - 1, bonus[:, None], tree.tokens[row, jnp.maximum(ahead, 0)]
    )
    at = jnp.where(slot < found.count[:, None], found.path, tree.budget)
    blank = jnp.full_like(tree.tokens, -1)
    return blank.at[row, at].set(token.astype(jnp.int32), mode="drop")
