"""The TPU's kernel in interpret mode, lowered, and compiled by the TPU's own compiler where that is installed."""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from jspec.aot import KINDS, tpu_devices
from jspec.attention import pick_attention, tree_attention
from jspec.attention.pallas_tpu import pallas_tpu_tree_attention
from jspec.attention.xla import xla_tree_attention
from jspec.tree import pack_bits
from tests.attention.cases import WILD, Case

# queries, new rows, heads, kv heads, head_dim, capacity, lengths, and what is not usual
QUICK = {
    "a tree, two blocks of context": (17, 17, 6, 2, 64, 600, (0, 599, 600), {}),
    "one query, a window, bf16": (
        1,
        33,
        8,
        2,
        96,
        40,
        (0, 1, 40),
        {"window": 5, "dtype": jnp.bfloat16},
    ),
    "two tiles": (131, 70, 8, 2, 128, 24, (3, 24), {}),
}
SLOW = {
    "many queries and rows": (256, 256, 9, 3, 64, 1300, (0, 700, 1300), {}),
    "wide heads": (5, 40, 4, 4, 256, 1100, (0, 513, 1100), {"dtype": jnp.bfloat16}),
    "a window that begins beyond a block": (9, 40, 8, 8, 128, 1500, (1500, 40, 1024), {"window": 300}),
    "no cache": (7, 64, 4, 2, 128, 0, (0, 0), {}),
    "all rows that it takes": (3, 512, 14, 2, 64, 100, (0, 100), {"dtype": jnp.bfloat16}),
}  # fmt: skip


def check(case, interpret):
    """Against xla and float64, and to the bit against itself where all that may not be read is garbage, NaN too."""
    visible = pack_bits(jnp.asarray(case.seen))
    rest = visible, case.positions, case.window, None
    narrow = case.inputs[0].dtype != np.float32
    run = jax.jit(pallas_tpu_tree_attention, static_argnums=(8, 9), static_argnames="interpret")
    out = run(*case.inputs, *rest, interpret=interpret)
    assert out.dtype == case.inputs[0].dtype
    wide = np.asarray(out, np.float64)
    np.testing.assert_allclose(wide, case.reference(), atol=3e-2 if narrow else 2e-5, rtol=0)
    want = np.asarray(jax.jit(xla_tree_attention, static_argnums=(8, 9))(*case.inputs, *rest))
    np.testing.assert_allclose(wide, want.astype(np.float64), atol=2e-2 if narrow else 2e-5, rtol=0)
    again = run(*case.spoiled(WILD), *rest, interpret=interpret)
    np.testing.assert_array_equal(again, out)


def make(*shape):
    *shape, options = shape
    return Case(*shape, **options)


@pytest.mark.parametrize("name", QUICK)
def test_numerics(name):
    check(make(*QUICK[name]), True)


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_more_numerics(name):
    check(make(*SLOW[name]), True)


def test_no_race_and_nothing_read_that_was_not_written():
    params = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
    check(make(5, 9, 4, 2, 64, 600, (0, 600), {"window": 590}), params)
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call as found

    assert not found.races.races_found


SHAPES = {  # batch, queries, rows, heads, kv heads, head_dim, capacity, dtype, window
    "qwen3-8b, one row": (1, 1, 1, 32, 8, 128, 4096, jnp.bfloat16, None),
    "qwen3-8b, 256 nodes": (4, 256, 256, 32, 8, 128, 4096, jnp.bfloat16, None),
    "smollm2": (2, 17, 33, 9, 3, 64, 1000, jnp.bfloat16, None),
    "fp32, a window": (2, 17, 33, 9, 3, 64, 1000, jnp.float32, 5),
    "head_dim 96": (3, 200, 256, 24, 2, 96, 1100, jnp.bfloat16, 300),
    "head_dim 256": (1, 60, 70, 16, 8, 256, 2048, jnp.float32, None),
}


def structs(
    batch, queries, rows, heads, kv_heads, head_dim, capacity, dtype, window, sharding=None
):
    def one(*shape, dtype=dtype):
        return jax.ShapeDtypeStruct((batch, *shape), dtype, sharding=sharding)

    cached, fresh = (kv_heads, capacity, head_dim), (rows, kv_heads, head_dim)
    ids = {"dtype": jnp.int32}
    positions = None if window is None else one(queries, **ids)
    arrays = one(queries, heads, head_dim), one(*cached), one(*cached), one(**ids)
    marks = one(queries, -(-rows // 32), **ids), positions
    return *arrays, one(*fresh), one(*fresh), *marks, window


STEP = jax.jit(pallas_tpu_tree_attention, static_argnums=8)


@pytest.mark.parametrize("name", SHAPES)
def test_it_lowers(name):
    lowered = STEP.trace(*structs(*SHAPES[name])).lower(lowering_platforms=("tpu",))
    assert "tpu_custom_call" in lowered.as_text()


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs jax[tpu]")
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_it_compiles(kind, name):
    device = tpu_devices(KINDS[kind].topology)[0]
    arrays = structs(*SHAPES[name], jax.sharding.SingleDeviceSharding(device))
    compiled = STEP.trace(*arrays).lower(lowering_platforms=("tpu",)).compile()
    assert "tpu_custom_call" in compiled.as_text()


def test_who_may_have_it():
    with pytest.raises(
        ValueError, match=r"^attention by pallas_tpu needs a TPU, and this is a cpu: use xla$"
    ):
        pick_attention("pallas_tpu")
    with pytest.raises(
        ValueError, match=r"^attention by pallas needs a TPU or GPU, and this is a cpu: use xla$"
    ):
        pick_attention("pallas")
    assert pick_attention() == pick_attention("xla") == "xla"


def test_what_it_does_not_serve():
    from jspec.aot import tracing_for

    class Absent:
        device_kind, num_cores, platform = "TPU v5e", 1, "tpu"

    def trace(shape, **options):
        arrays = structs(*shape)[:7]
        return jax.jit(lambda *x: tree_attention(*x, **options)).trace(*arrays).jaxpr

    served = (1, 3, 40, 4, 2, 64, 64, jnp.bfloat16, None)
    rows = (1, 3, 513, 4, 2, 64, 64, jnp.bfloat16, None)
    half = (1, 3, 40, 4, 2, 64, 64, jnp.float16, None)
    with tracing_for(Absent):
        assert pick_attention() == pick_attention("pallas") == "pallas_tpu"
        assert "pallas_call" in str(trace(served))
        assert "pallas_call" not in str(trace(served, implementation="xla"))
        assert "pallas_call" not in str(trace(rows))  # by itself it leaves that to xla
        for shape, problem in ((rows, "at most 512 new rows, not 513"), (half, "not float16")):
            with pytest.raises(ValueError, match=f"^pallas_tpu .*{problem}: use xla"):
                trace(shape, implementation="pallas")
