"""Autoregressive decoding: the method that drafts nothing."""

import functools

from jspec.method import Method, Proposal
from jspec.tree import root_only


@functools.cache
def ar() -> Method:
    """One token a round: every tree is its root alone."""

    def propose(params, state, roots, keep_growing=None):
        return Proposal(root_only(roots)), state

    return Method("ar", 1, propose)
