"""What Domino and DARTree have in common: a parallel head's pass, then drafts level by level, each given its path.

A level costs the step of a small GRU and a projection of low rank, no pass of the head's layers. Since what smart and
graft save is levels, a level counts as a pass: the first is that of the head, with the correction's first step.
"""

import functools
from collections.abc import Callable

import jax.numpy as jnp

from jspec.growth import best_paths, grow
from jspec.heads.config import HeadConfig
from jspec.heads.correction import Score, gru_step, read_tokens, widened
from jspec.heads.parallel import draft_block
from jspec.method import Method, Proposal
from jspec.methods.one_pass import head_reader
from jspec.tree import select, take


def corrected(
    name: str,
    scorer: Callable[..., Score],
    head_config: HeadConfig,
    budget: int,
    depth: int,
    keep: int,
    limits: tuple[int, ...] | None = None,
    depth_penalty: float = 0.0,
    detail: str = "",
) -> Method:
    """Drafts level by level with ``params["head"]``; its rows of state are the head's cache.

    Args:
      name: the method's.
      scorer: ``scorer(config, head, target_params, hidden, batch) -> Score``: see ``jspec.heads.correction``.
      head_config: of the head: causal or bidirectional, with a correction.
      budget: most nodes, root included.
      depth: levels, in 1..min(budget - 1, head_config.depth), or 0 where the budget is 1.
      keep: nodes of a level, at most; all of them are expanded.
      limits: of each level, where they differ.
      depth_penalty: of ``select``, where the levels hold more nodes than the budget.
      detail: see ``Method``.

    Raises:
      ValueError: a head without a correction.
    """
    if head_config.correction is None:
        raise ValueError(
            f"{name} drafts with a head that has Domino's correction, and this one has none: "
            "it is one for jetspec, dflash and ddtree"
        )
    shape = keep, limits, float(depth_penalty)
    return _corrected(name, scorer, head_config, budget, depth, *shape, detail)


@functools.cache
def _corrected(name, scorer, head_config, budget, depth, keep, limits, depth_penalty, detail):
    def propose(params, state, roots, keep_growing=None):
        head, target, batch = widened(params["head"]), params["target"], roots.shape[0]
        hidden = draft_block(head_config, head, target, state.rows, roots, depth)
        score = scorer(head_config, head, target, hidden, batch)

        def expand(carry, frontier):
            level, states = carry
            read = read_tokens(head, target, frontier.tokens.reshape(-1))
            before = take(states, frontier.slots[:, :, None]).reshape(batch * keep, -1).T
            states = gru_step(head["correction"], read, before).T.reshape(states.shape)
            return score(level, states), (level + 1, states)

        empty = jnp.zeros((batch, keep, head_config.correction.gru_size))
        tree, (levels, _) = grow(
            expand, (jnp.int32(0), empty), roots, depth, keep, keep, keep_growing, limits
        )
        sure = best_paths(tree, depth)
        if tree.budget > budget:
            tree = select(tree, budget, depth_penalty)
        return Proposal(tree, passes=levels, sure=sure), state

    return head_reader(name, propose, head_config, budget, depth, detail)
