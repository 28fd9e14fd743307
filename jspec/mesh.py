"""More than one device: a mesh of a data axis, over which rows are spread, and a model axis, over which weights are.

A data shard is a decode of its own, with its own share of the batch: rows are packed within it, and it runs the code
that a single device runs (``jax.shard_map`` over the data axis, see ``jspec.state.each_shard``). Within a shard the
weights say how they are split (``param_shardings``), and XLA's partitioner does the rest: heads and feed-forward over
the model axis, two sums a layer, as in Megatron-LM (arXiv 1909.08053, section 3). Attention alone is split by hand,
head by head, since kernels cannot be partitioned (``over_heads``).
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

DATA, MODEL = "data", "model"

# Which axis of a weight is split, by its name. Under these names stand weights as ``fuse`` arranges them, those of a
# checkpoint, and those of heads: all that is not listed is whole on every device.
_SPLIT = {
    "qkv": 0, "qkv_bias": 0, "q": 0, "k": 0, "v": 0, "q_bias": 0, "k_bias": 0, "v_bias": 0, "o": 1,
    "gate_up": 1, "gate": 0, "up": 0, "down": 1, "fc": 1,
    "embed": 0, "lm_head": 0, "output": 0,
}  # fmt: skip


def parse_mesh(text: str) -> tuple[int, int]:
    """The sizes (data, model) that a text like "data=2,model=4" names; an axis that is left out is 1.

    Raises:
      ValueError: anything else.
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        found = re.fullmatch(r"\s*(data|model)\s*=\s*([1-9][0-9]{0,5})\s*", part)
        if found is None or found[1] in sizes:
            raise ValueError(f"mesh must be like data=2,model=4, got {text!r}")
        sizes[found[1]] = int(found[2])
    return sizes.get(DATA, 1), sizes.get(MODEL, 1)


def make_mesh(data: int = 1, model: int = 1, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh of ``data * model`` devices.

    Args:
      data: parts that batches fall into.
      model: parts that heads and weights fall into.
      devices: to take them from; default: those that all processes have.

    Raises:
      ValueError: fewer devices than that; or, with several processes, more.
    """
    asked = f"mesh data={data},model={model}"
    there = list(jax.devices() if devices is None else devices)
    if min(data, model) < 1:
        raise ValueError(f"{asked}: each must be 1 or above")
    if data * model > len(there):
        raise ValueError(f"{asked} takes {data * model} devices, JAX finds {len(there)}")
    if devices is None and jax.process_count() > 1 and data * model != len(there):
        raise ValueError(
            f"{asked} must take all {len(there)} devices of the {jax.process_count()} processes"
        )
    kinds, taken = (AxisType.Auto,) * 2, there[: data * model]
    return jax.make_mesh((data, model), (DATA, MODEL), axis_types=kinds, devices=taken)


def mesh_of(text: str) -> Mesh | None:
    """The mesh that a text names; None where that is one device.

    Raises:
      ValueError: see ``parse_mesh`` and ``make_mesh``.
    """
    sizes = parse_mesh(text)
    return None if sizes == (1, 1) and jax.process_count() == 1 else make_mesh(*sizes)


def data_shards(mesh: Mesh | None) -> int:
    """Into how many parts a batch falls."""
    return 1 if mesh is None else mesh.shape[DATA]


def check_heads(mesh: Mesh | None, config: Any, whose: str = "the target's") -> None:
    """Makes sure that a transformer can be split.

    Args:
      mesh: None splits nothing.
      config: with ``num_kv_heads`` and ``ffn_size``: a target's or a head's.
      whose: for the message.

    Raises:
      ValueError: the model axis does not divide its key/value heads or its feed-forward features.
    """
    size = 1 if mesh is None else mesh.shape[MODEL]
    for count, what in (
        (config.num_kv_heads, "key/value heads"),
        (config.ffn_size, "feed-forward features"),
    ):
        if count % size:
            raise ValueError(f"mesh: model={size} does not divide {whose} {count} {what}")


def check_batch(mesh: Mesh | None, batch: int, what: str = "batch") -> None:
    """Makes sure that every data shard gets as many rows.

    Raises:
      ValueError: the data axis does not divide the batch.
    """
    if batch % data_shards(mesh):
        raise ValueError(f"mesh: data={data_shards(mesh)} does not divide {what} {batch}")


def param_shardings(mesh: Mesh, params: Any) -> Any:
    """How a pytree of weights, or of an optimiser's moments, is split over the model axis: a sharding for each leaf.

    A leaf goes by its name, its key in the innermost dict. An axis that the model axis does not divide stays whole.
    """
    size = mesh.shape[MODEL]

    def one(path, x):
        names = [getattr(key, "key", getattr(key, "name", None)) for key in path]
        axis = _SPLIT.get(names[-1]) if names else None
        # A correction's parts share names with a layer's, and are small.
        if axis is None or "correction" in names or x.ndim <= axis or x.shape[axis] % size:
            return NamedSharding(mesh, P())
        return NamedSharding(mesh, P(*[None] * axis, MODEL))

    return jax.tree_util.tree_map_with_path(one, params)


def shard_params(mesh: Mesh | None, params: Any) -> Any:
    """Weights onto a mesh, as ``param_shardings`` splits them; what lies there already is not copied.

    Args:
      mesh: None leaves them where they are.
      params: the same in every process.
    """
    return params if mesh is None else place(params, param_shardings(mesh, params))


def mesh_under(params: Any) -> Mesh | None:
    """The mesh that ``shard_params`` put weights onto; None: they lie on one device."""
    leaf = next(iter(jax.tree.leaves(params)), None)
    mesh = getattr(getattr(leaf, "sharding", None), "mesh", None)
    return mesh if isinstance(mesh, Mesh) and mesh.axis_names == (DATA, MODEL) else None


def place(values: Any, shardings: Any) -> Any:
    """Arrays, the same in every process, onto the devices of all of them."""

    def one(x, sharding):
        if sharding.is_fully_addressable:
            return jax.device_put(x, sharding)
        if (
            isinstance(x, jax.Array) and not x.is_fully_addressable
        ):  # it is there, but split otherwise
            return jax.jit(lambda x: x, out_shardings=sharding)(x)
        host = np.asarray(x)
        return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

    return jax.tree.map(one, values, shardings)


def fetchable(values: Any) -> Any:
    """Arrays that this process can read: the given ones, or copies where other processes hold parts of them."""
    leaves = jax.tree.leaves(values)
    if all(x.is_fully_addressable for x in leaves if isinstance(x, jax.Array)):
        return values
    return multihost_utils.process_allgather(values, tiled=True)


def alike(mesh: Mesh | None, step: Callable[..., Any]) -> Callable[..., Any]:
    """A step of one device, of which every data shard of a mesh does all: where there is no batch to spread.

    Args:
      mesh: None: the step is returned as it is.
      step: of arrays; to be jitted.
    """
    if mesh is None:
        return step
    return jax.shard_map(
        step, mesh=mesh, in_specs=P(), out_specs=P(), axis_names={DATA}, check_vma=False
    )


def in_blocks(x: Array, size: int) -> Array:
    """The array, made whole on every device of the model axis, unless each holds whole blocks of its first axis.

    Where a split array is padded, or cut across the split, XLA moves the pieces by a permutation of all devices of the
    mesh, for which data shards that went into different branches wait forever. A gather is one shard's own.

    Args:
      x: inside ``each_shard`` or ``alike``; elsewhere it is returned as it is.
      size: of a block.
    """
    mesh = jax.sharding.get_abstract_mesh()
    kinds = dict(zip(mesh.axis_names, mesh.axis_types))
    if kinds.get(MODEL) != AxisType.Auto or x.shape[0] % (size * mesh.shape[MODEL]) == 0:
        return x
    return jax.lax.with_sharding_constraint(x, P())


def over_heads(attention: Callable[..., Array], *arrays: Array | None) -> Array:
    """Attention, of which each device of the model axis computes its own heads: inside ``each_shard`` or ``alike``.

    Args:
      attention: of (q [B, Q, nh, hd], k_ctx [B, kh, C, hd], v_ctx, length, k_new [B, M, kh, hd], v_new, visible,
        q_positions).
      *arrays: these.
    """
    mesh = jax.sharding.get_abstract_mesh()
    kinds = dict(zip(mesh.axis_names, mesh.axis_types))
    kv_heads = arrays[1].shape[1]
    if kinds.get(MODEL) != AxisType.Auto or kv_heads % mesh.shape[MODEL]:
        return attention(*arrays)
    rows, context, whole = P(None, None, MODEL), P(None, MODEL), P()
    specs = (rows, context, context, whole, rows, rows, whole, whole)
    return jax.shard_map(
        attention, in_specs=specs, out_specs=rows, axis_names={MODEL}, check_vma=False
    )(*arrays)
