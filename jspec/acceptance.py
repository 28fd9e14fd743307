"""Accepting: which nodes of a tree stand in the target's own text."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jspec.tree import Tree


def accept(
    tree: Tree, tokens: Int[Array, "B N"], depth: int
) -> tuple[Int[Array, "B P"], Int[Array, " B"]]:
    """The match rule: from the root, go to the child that is the target's token while there is one.

    The token drawn at the last node reached, which is no child of it, is the bonus. For a tree fixed before the target
    speaks no lossless rule accepts more, and the output is distributed (given the seed: is) as the target's own text.

    Args:
      tree: what was verified.
      tokens: the target's draw at each node.
      depth: static; no node is deeper. P = depth + 1.

    Returns:
      path: accepted node ids, the root first, -1 from ``count`` on.
      count: accepted nodes, root included; 0 for a tree without a root. With the bonus, tokens emitted.
    """
    rows = jnp.arange(tree.batch)

    def step(node, _):
        at = jnp.maximum(node, 0)
        wanted = tokens[rows, at][:, None]
        child = (
            (tree.parents == at[:, None])
            & (tree.tokens == wanted)
            & tree.live
            & (node >= 0)[:, None]
        )
        return jnp.where(child.any(axis=1), jnp.argmax(child, axis=1), -1), node

    root = jnp.where(tree.size > 0, 0, -1)
    _, path = jax.lax.scan(step, root, length=depth + 1)
    path = path.T
    return path, (path >= 0).sum(axis=1)
