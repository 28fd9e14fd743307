import dataclasses

import jax.numpy as jnp
import numpy as np

from jspec.method import Needs
from jspec.methods import ar
from jspec.tree import check


def test_is_a_root_and_nothing_else():
    method = ar()
    state = method.init({}, 3, 8, None)
    proposal, state = method.propose({}, state, jnp.array([5, 0, 2]))
    check(proposal.tree)
    assert np.asarray(proposal.tree.tokens).tolist() == [[5], [0], [2]]
    assert method.budget == 1 and method.needs == Needs()
    assert not dataclasses.asdict(state)["rows"] and method.memory(state) is None


def test_is_one_object():
    assert ar() is ar()
