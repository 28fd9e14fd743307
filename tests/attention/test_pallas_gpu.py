"""The GPU's kernel in interpret mode and lowered: it has not run on a GPU yet."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from jspec.attention import pallas_gpu, pick_attention, tree_attention
from jspec.attention.pallas_gpu import check_gpu, pallas_gpu_tree_attention
from jspec.attention.xla import xla_tree_attention
from jspec.tree import pack_bits
from tests.attention.cases import Case
from tests.attention.test_pallas_tpu import structs

INTERPRETED = hasattr(plgpu, "InterpretGPUParams")
new_jax = pytest.mark.skipif(not INTERPRETED, reason="needs jax 0.12")
# Interpreted, a product is NumPy's, which warns of the NaN that spoiled rows bring; the kernel masks what comes of it.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")
BF16 = {"dtype": jnp.bfloat16}
QUICK = {
    "a tree, a part of a block": (5, 5, 4, 2, 64, 80, (0, 80), BF16),
}
SLOW = {
    "two tiles, parts": (40, 70, 4, 2, 128, 1000, (0, 1, 1000), BF16),
    "a window": (9, 40, 4, 2, 96, 200, (77, 200), {"window": 50, **BF16}),
    "wide heads, a small cache": (17, 33, 6, 2, 256, 24, (0, 24), {"window": 5, **BF16}),
}


def check(case, **options):
    """Against xla and float64, and to the bit against itself where what may not be read is garbage."""
    visible = pack_bits(jnp.asarray(case.seen))
    rest = visible, case.positions, case.window, None
    options = {"interpret": plgpu.InterpretGPUParams(**options)}
    run = jax.jit(pallas_gpu_tree_attention, static_argnums=(8, 9), static_argnames="interpret")
    out = run(*case.inputs, *rest, **options)
    assert out.dtype == case.inputs[0].dtype
    wide = np.asarray(out, np.float64)
    np.testing.assert_allclose(wide, case.reference(), atol=3e-2, rtol=0)
    want = np.asarray(jax.jit(xla_tree_attention, static_argnums=(8, 9))(*case.inputs, *rest))
    np.testing.assert_allclose(wide, want.astype(np.float64), atol=2e-2, rtol=0)
    again = run(*case.spoiled(), *rest, **options)
    np.testing.assert_array_equal(again, out)


def make(*shape):
    *shape, options = shape
    return Case(*shape, **options)


@new_jax
@pytest.mark.parametrize("name", QUICK)
def test_numerics(name):
    check(make(*QUICK[name]))


@new_jax
@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_more_numerics(name):
    check(make(*SLOW[name]))


@new_jax
@pytest.mark.slow
def test_no_race_and_nothing_read_that_was_not_written(capfd):
    check(make(5, 9, 4, 2, 64, 200, (0, 200), BF16), detect_races=True, uninitialized_memory="nan")
    assert "race" not in capfd.readouterr().out.lower()


@new_jax
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("head_dim", [64, pytest.param(96, marks=pytest.mark.slow), 128, 256])
def test_it_lowers(head_dim, window):
    arrays = structs(2, 17, 70, 8, 2, head_dim, 1000, jnp.bfloat16, window)
    step = jax.jit(pallas_gpu_tree_attention, static_argnums=8)
    text = step.trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text


def test_xla_lowers_for_gpus_everywhere():
    arrays = structs(2, 17, 70, 8, 2, 64, 1000, jnp.bfloat16, None)[:7]
    step = jax.jit(lambda *x: tree_attention(*x, implementation="xla"))
    assert step.trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()


class Device:
    device_kind, compute_capability = "NVIDIA A100", "8.0"


def test_who_may_have_it(monkeypatch):
    with pytest.raises(
        ValueError, match=r"^attention by pallas_gpu needs a GPU, and this is a cpu: use xla$"
    ):
        pick_attention("pallas_gpu")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [Device()])
    assert pick_attention() == "xla"
    if not INTERPRETED:
        with pytest.raises(
            ValueError, match=r"^pallas_gpu needs jax 0.12 or newer, and this is .*: use xla$"
        ):
            pick_attention("pallas")
        return
    with pytest.raises(ValueError, match=r"Hopper GPUs .*, and this NVIDIA A100 has 8.0: use xla$"):
        pick_attention("pallas")
    monkeypatch.setattr(Device, "compute_capability", pallas_gpu.CAPABILITY)
    assert pick_attention("pallas") == "pallas_gpu"
    check_gpu()


@new_jax
@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"dtype": jnp.float32}, "takes bfloat16, not float32"),
        ({"capacity": 1001}, "takes caches of a multiple of 8 rows, not 1001"),
        ({"head_dim": 80}, "takes a head_dim of 32, 64, .. 256, not 80"),
        ({"rows": 513}, "attends to at most 512 new rows, not 513"),
    ],
)
def test_what_it_does_not_serve(monkeypatch, changes, problem):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [Device()])
    monkeypatch.setattr(Device, "compute_capability", pallas_gpu.CAPABILITY)
    shape = {"rows": 9, "head_dim": 64, "capacity": 1000, "dtype": jnp.bfloat16} | changes
    arrays = structs(1, 3, shape["rows"], 4, 2, *list(shape.values())[1:], None)[:7]
    with pytest.raises(ValueError, match=f"^pallas_gpu {problem}: use xla"):
        jax.jit(lambda *x: tree_attention(*x, implementation="pallas")).trace(*arrays)
