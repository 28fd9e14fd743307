import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.models.products import product


def arrays(shape, columns, dtype):
    keys = jax.random.split(jax.random.key(0), 2)
    weight = jax.random.normal(keys[0], shape, dtype)
    return weight, jax.random.normal(keys[1], (shape[-1], columns))


@pytest.mark.parametrize("columns", [1, 2, 7])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_results_are_wide_whatever_the_weights_are(columns, dtype):
    weight, x = arrays((2, 3, 5), columns, dtype)
    found = jax.jit(product)(weight, x)
    assert found.dtype == jnp.float32
    rounded = np.asarray(x.astype(dtype), np.float64)
    expected = np.einsum("abi,im->abm", np.asarray(weight, np.float64), rounded)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("columns", [1, 6])
def test_narrow_gradients_are_the_wide_ones_rounded(columns):
    weight, x = arrays((4, 5), columns, jnp.bfloat16)

    def total(weight, x):
        return jnp.sin(product(weight, x)).sum()

    found = jax.jit(jax.grad(total, argnums=(0, 1)))(weight, x)
    assert [g.dtype for g in found] == [jnp.bfloat16, jnp.float32]
    wide = jax.grad(total, argnums=(0, 1))(
        weight.astype(jnp.float32), x.astype(jnp.bfloat16).astype(jnp.float32)
    )
    for ours, theirs in zip(found, wide):
        np.testing.assert_allclose(ours.astype(jnp.float32), theirs, rtol=0.05, atol=0.05)
