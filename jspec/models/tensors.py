"""Safetensors onto the machine: exactly the tensors that a config asks for, one at a time."""

import contextlib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from jspec.models.config import TargetError, read_json

_FLOATS = ("F64", "F32", "F16", "BF16")  # narrower ones are scaled by tensors of their own
_INTEGERS = ("I32", "I64")
_SAMPLES = 4096  # bytes of each tensor that enter a fingerprint


def read_tensors(
    folder: Path,
    wanted: Mapping[str, jax.ShapeDtypeStruct],
    kind: str,
    spare: Collection[str] = (),
) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors in a hub-style directory, in order of name, as they are stored.

    Args:
      folder: with model.safetensors, or an index of several files.
      wanted: shapes by name; of the dtypes it only matters whether they are floats, integers or booleans.
      kind: what the tensors make, for messages.
      spare: names that may be there and are not read.

    Raises:
      TargetError: no tensors, damaged ones, or not exactly those that are wanted.
    """
    with contextlib.ExitStack() as stack:
        try:
            files = [stack.enter_context(safe_open(f, "numpy")) for f in _weight_files(folder)]
            where = {}
            for file in files:
                where |= dict.fromkeys(file.keys(), file)
            if missing := sorted(set(wanted) - set(where)):
                raise TargetError(f"the weights in {folder} lack {missing[0]}")
            extra = set(where) - set(wanted) - set(spare)
            if extra := [name for name in extra if not name.endswith("rotary_emb.inv_freq")]:
                raise TargetError(f"the weights in {folder} have {min(extra)}, unknown to {kind}")
            for name in sorted(wanted):
                supported = _supported(wanted[name].dtype)
                stored = where[name].get_slice(name).get_dtype()
                if stored not in supported:
                    raise TargetError(
                        f"{name} in {folder} is stored as {stored} (supported: {', '.join(supported)})"
                    )
                array = where[name].get_tensor(name)
                if array.shape != wanted[name].shape:
                    raise TargetError(
                        f"{name} in {folder} has shape {array.shape}, "
                        f"its config.json asks for {wanted[name].shape}"
                    )
                yield name, array
        except (SafetensorError, OSError) as error:
            raise TargetError(f"the weights in {folder} cannot be read: {error}") from None


def stored_names(folder: Path) -> set[str]:
    """The names of the tensors in a hub-style directory.

    Raises:
      TargetError: no tensors, or damaged ones.
    """
    names: set[str] = set()
    try:
        for path in _weight_files(folder):
            with safe_open(path, "numpy") as file:
                names |= set(file.keys())
    except (SafetensorError, OSError) as error:
        raise TargetError(f"the weights in {folder} cannot be read: {error}") from None
    return names


def sample(name: str, array: np.ndarray) -> bytes:
    """What of a tensor enters a fingerprint: its name, type, shape and 4096 evenly spaced bytes."""
    raw = array.reshape(-1).view(np.uint8)
    header = f"{name} {array.dtype} {array.shape}".encode()
    return header + raw[:: max(1, raw.size // _SAMPLES)].tobytes()


def _supported(dtype):
    if dtype == jnp.bool_:
        return ("BOOL",)
    return _FLOATS if jnp.issubdtype(dtype, jnp.floating) else _INTEGERS


def _weight_files(folder: Path) -> list[Path]:
    index = read_json(folder / "model.safetensors.index.json", {})
    weight_map = index.get("weight_map", {})
    if not isinstance(weight_map, dict) or not all(isinstance(f, str) for f in weight_map.values()):
        raise TargetError(f"the weight_map in {folder}/model.safetensors.index.json names no files")
    listed = sorted(set(weight_map.values())) or ["model.safetensors"]
    if missing := [name for name in listed if not (folder / name).is_file()]:
        raise TargetError(f"{folder} has no weights: {missing[0]} is missing")
    return [folder / name for name in listed]
