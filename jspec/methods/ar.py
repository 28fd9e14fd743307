"""Autoregressive decoding: the method that drafts nothing."""

import functools

from jspec.method import Method, MethodState, Needs, Proposal
from jspec.tree import root_only


@functools.cache
def ar() -> Method:
    """One token a round: every tree is its root alone."""

    def init(params, batch, capacity, memory):
        return MethodState()

    def absorb(params, state, tokens, taps, counts):
        return state

    def propose(params, state, roots, keep_growing=None):
        return Proposal(root_only(roots)), state

    def observe(params, state, verdict):
        return state

    def memory(state):
        return None

    return Method("ar", 1, Needs(), init, absorb, propose, observe, memory)
