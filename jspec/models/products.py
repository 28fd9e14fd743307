"""Products of weights and activations: inputs of the weights' dtype, sums and results in fp32.

Weights in bf16 thus halve the memory traffic and use the matrix units that read bf16 (tensor cores, MXUs, AMX), while
the residual stream stays in fp32. XLA:CPU takes AMX for a row-major product only; other layouts and single columns fall
back to conversions, up to twenty times slower, and so they are avoided here. (jax 0.10.2, measured on a Xeon with AMX:
[3072, 576] @ [576, 256] 870 GFLOP/s on a core, 120-160 with a transposed operand, 170 in fp32.)
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array


def product(weight: Array, x: Array) -> Array:
    """``weight [*out, in] @ x [in, M] -> [*out, M]`` in fp32; bf16 weights are differentiated in bf16 too."""
    flat = weight.reshape(-1, weight.shape[-1])
    wide = flat.dtype == x.dtype == jnp.float32
    out = flat @ x if wide else _narrow(flat, x)
    return out.reshape(*weight.shape[:-1], -1)


@jax.custom_vjp
def _narrow(weight, x):
    x = x.astype(weight.dtype)
    if x.shape[1] == 1:  # a second column, so that it is a matrix
        return lax.platform_dependent(weight, x, cpu=_doubled, default=_wide)
    return _wide(weight, _row_major(x))


def _doubled(weight, x):
    return lax.optimization_barrier(_wide(weight, jnp.pad(x, [(0, 0), (0, 1)])))[:, :1]


def _forth(weight, x):
    return _narrow(weight, x), (weight, x)


def _back(kept, by):
    weight, x = kept
    by = _row_major(by.astype(weight.dtype))  # it may be a sum of transposed ones
    to_weight = _wide(by, _row_major(x.astype(weight.dtype).T))
    to_x = _row_major(_wide(_row_major(by.T), weight)).T
    return to_weight.astype(weight.dtype), to_x.astype(x.dtype)


_narrow.defvjp(_forth, _back)


def _wide(a, b):
    return jnp.matmul(a, b, preferred_element_type=jnp.float32)


def _row_major(x):
    """``x`` with the layout of its shape: on a CPU, where a transposition would stay a view of the product."""

    def copied(x):
        return lax.optimization_barrier(x.reshape(-1)).reshape(x.shape)

    return lax.platform_dependent(x, cpu=copied, default=lambda x: x)
