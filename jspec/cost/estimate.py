"""A cost profile for a TPU that is not there: an estimate, and labelled one wherever it is shown.

Operations are what XLA's cost analysis counts in the lowered program of each row bucket; bytes are the weights and the
cache, which every pass reads once. The slower of the two, by the chip's published peaks, is the time. Of a drafter that
works level by level every level is taken to cost as much as the first, which reads the same weights.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jspec.cost.measure import works_by_level
from jspec.cost.profile import Profile, Setting
from jspec.method import Params
from jspec.methods.smart import SmartShared
from jspec.state import Plan, new_state
from jspec.tree import root_only
from jspec.verification import run_rows


class Chip(NamedTuple):
    """Published peaks of one device: of a chip, but of TPU7x, a chip of two (cloud.google.com/tpu/docs)."""

    flops: float  # a second, in bf16
    bandwidth: float  # bytes a second, of its memory


CHIPS = {
    "v4": Chip(275e12, 1228e9),
    "v5e": Chip(197e12, 819e9),
    "v5p": Chip(459e12, 2765e9),
    "v6e": Chip(918e12, 1640e9),
    "tpu7x": Chip(2307e12 / 2, 7380e9 / 2),
}
REACHED = 0.7  # of a peak: assumed, not measured
START = 2e-5  # seconds of a pass that are neither: assumed too


def estimate_profile(plan: Plan, params: Params, setting: Setting, kind: str) -> Profile:
    """What rounds of a setting may cost on a TPU of a kind.

    Args:
      plan: its method is one of ``smart``.
      params: the weights, in the dtype that the TPU would hold; "cost" must be there, and is not read.
      setting: of the decode; its device becomes the TPU.
      kind: one of ``CHIPS``.

    Raises:
      ValueError: no such kind, or a method that is not one of ``smart``.
    """
    if kind not in CHIPS:
        raise ValueError(f"kind must be one of {', '.join(CHIPS)}, got {kind!r}")
    chip, batch = CHIPS[kind], setting.batch
    key = jax.random.key(0)
    state = jax.eval_shape(lambda p: new_state(plan, p, batch, setting.capacity, key), params)
    if not isinstance(state.method.shared, SmartShared):
        raise ValueError(f"method must be one of smart, got {plan.method.name}")
    roots = jax.ShapeDtypeStruct((batch,), jnp.int32)
    tree = jax.eval_shape(lambda r: root_only(r, plan.method.budget), roots)
    step = jax.jit(run_rows, static_argnums=(0, 4))
    read = _bytes(params["target"]) + _bytes((state.cache.keys, state.cache.values))
    times = [
        _seconds(chip, step.lower(plan, params, state, tree, rows), read)
        for rows in plan.row_buckets(batch)
    ]
    draft = jax.jit(plan.method.propose).lower(params, state.method, roots)
    drafted = _seconds(chip, draft, _bytes(params.get("head", ())) + _bytes(state.method.rows))
    levels = max(plan.method.needs.depth, 1)
    each = works_by_level(plan, params, state.method, roots)
    return Profile(
        setting=setting.__class__(**{**vars(setting), "device": f"tpu: {kind}"}),
        rows=plan.row_buckets(batch),
        verify=tuple(times),
        spread=(0.0,) * len(times),
        draft=tuple(drafted * (n + 1 if each else 1) for n in range(levels)),
        fixed=START,
        estimate=True,
    )


def _bytes(tree):
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def _seconds(chip, lowered, read):
    flops = (lowered.cost_analysis() or {}).get("flops", 0.0)
    return max(flops / chip.flops, read / chip.bandwidth) / REACHED + START
