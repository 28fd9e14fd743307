"""Tree attention against a dense reference in float64, with garbage wherever nothing may be read."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import TypeCheckError

from jspec.attention import tree_attention
from jspec.tree import pack_bits
from tests import oracles
from tests.attention.cases import dense, poison, random_visibility

CAPACITY, HEAD_DIM = 24, 8
LENGTHS = np.array([0, 1, 0, 23, 24, 24], np.int32)
BATCH = len(LENGTHS)

run = jax.jit(tree_attention, static_argnames=("window", "scale", "implementation"))


def random_inputs(rng, queries, rows, heads, kv_heads, dtype=np.float32):
    def normal(*shape):
        return rng.normal(size=(BATCH, *shape)).astype(dtype)

    cached = (kv_heads, CAPACITY, HEAD_DIM)
    fresh = (rows, kv_heads, HEAD_DIM)
    return (
        normal(queries, heads, HEAD_DIM),
        normal(*cached),
        normal(*cached),
        LENGTHS,
        normal(*fresh),
        normal(*fresh),
    )


def compare(rng, inputs, seen, atol=1e-5, **options):
    """Against the reference, and to the bit against itself with garbage."""
    visible = pack_bits(jnp.asarray(seen))
    out = np.asarray(run(*inputs, visible, **options))
    assert out.dtype == inputs[0].dtype
    names = {"q_positions": "positions"}
    want = dense(*inputs, seen, **{names.get(k, k): v for k, v in options.items()})
    np.testing.assert_allclose(out.astype(np.float64), want, atol=atol, rtol=0)
    spoiled = run(*poison(rng, inputs, seen), visible, **options)
    np.testing.assert_array_equal(spoiled, out)
    return out


@pytest.mark.parametrize("heads", [(3, 3), (6, 2), (4, 1)], ids=["G1", "G3", "G4"])
@pytest.mark.parametrize("budget", [1, 17, 70])
def test_trees(heads, budget):
    rng = np.random.default_rng(budget)
    nodes = oracles.random_rows(rng, BATCH, budget)
    seen = np.array([oracles.ancestors(row, budget) for row in nodes])
    inputs = random_inputs(rng, budget, budget, *heads)
    out = compare(rng, inputs, seen)
    blind = ~seen.any(axis=2) & (LENGTHS == 0)[:, None]
    assert blind.any()
    assert not out[blind].any()


@pytest.mark.parametrize(
    ("queries", "rows", "options"),
    [
        (1, 33, {}),
        (5, 100, {"window": 5}),
        (40, 3, {"scale": 2.0}),
        (7, 64, {"window": 1, "scale": 0.01}),
        (3, 31, {"window": 1000}),
    ],
)
def test_queries_that_are_not_the_rows(queries, rows, options):
    rng = np.random.default_rng(rows)
    inputs, seen = (
        random_inputs(rng, queries, rows, 4, 2),
        random_visibility(rng, BATCH, queries, rows),
    )
    if "window" in options:
        ahead = rng.integers(0, 6, (BATCH, queries), np.int32)
        options = options | {"q_positions": LENGTHS[:, None] + ahead}
    compare(rng, inputs, seen, **options)


def test_large_scores():
    """Either part may hold all the weight: both are normalized by the maximum over both."""
    rng = np.random.default_rng(0)
    q, k_ctx, v_ctx, length, k_new, v_new = random_inputs(rng, 9, 9, 4, 2)
    seen = random_visibility(rng, BATCH, 9, 9)
    for here, there in [(100, 1), (1, 100), (100, 100)]:
        inputs = (q, k_ctx * np.float32(here), v_ctx, length, k_new * np.float32(there), v_new)
        compare(rng, inputs, seen, atol=2e-4)


def test_bfloat16():
    rng = np.random.default_rng(2)
    inputs, seen = (
        random_inputs(rng, 17, 40, 6, 2, jnp.bfloat16),
        random_visibility(rng, BATCH, 17, 40),
    )
    compare(rng, inputs, seen, atol=3e-2)


def test_bad_arguments():
    rng = np.random.default_rng(0)
    inputs = [jnp.asarray(x) for x in random_inputs(rng, 1, 1, 2, 2)]
    visible = jnp.ones((BATCH, 1, 1), jnp.int32)
    with pytest.raises(ValueError, match="q_positions are needed"):
        tree_attention(*inputs, visible, window=4)
    with pytest.raises((ValueError, TypeCheckError), match="implementation"):
        tree_attention(*inputs, visible, implementation="cuda")
