"""Which accelerator is used, what it is called, and where its compiled programs are kept."""

import os
import platform
import tempfile
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import DTypeLike

from jspec.models.fetch import cache_dir

Accel = Literal["auto", "cpu", "gpu", "tpu"]
Dtype = Literal["auto", "fp32", "bf16"]
DTYPES = {"fp32": jnp.float32, "bf16": jnp.bfloat16}


def pick_accelerator(accel: Accel) -> None:
    """Makes JAX use an accelerator; to be called before its first computation. "auto" leaves the choice to JAX.

    Raises:
      ValueError: it isn't there.
    """
    before = jax.config.jax_platforms
    platforms = {"auto": [before], "gpu": ["cuda", "rocm"]}  # "gpu" alone would ask JAX for both
    for name in platforms.get(accel, [accel]):
        jax.config.update("jax_platforms", name)
        try:
            if accel in ("auto", jax.default_backend()):
                jax.devices()
                return
        except (RuntimeError, AssertionError):  # JAX asserts where no GPU is visible
            pass
    jax.config.update("jax_platforms", before)
    if accel == "auto":
        raise ValueError(f"JAX finds no {before} here: JAX_PLATFORMS should be unset, or cpu")
    raise ValueError(
        f"JAX finds no {accel} here: use --accel cpu, or install JAX for it (jspec's extra cuda or tpu)"
    )


def join_processes() -> None:
    """Makes this process one of several, whose devices are then one another's; to be called before JAX is used.

    On TPU pods, and under SLURM, Open MPI and Kubernetes, JAX finds the others itself. Elsewhere the environment says
    who they are: JAX_COORDINATOR_ADDRESS (HOST:PORT of the first one), JAX_NUM_PROCESSES and JAX_PROCESS_ID (from 0).
    Every process must then run the same program on the same input.

    Raises:
      ValueError: the others are not found.
    """
    names = ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
    try:
        numbers = [int(os.environ[name]) if name in os.environ else None for name in names]
        jax.distributed.initialize(None, *numbers)
    except (LookupError, RuntimeError, TypeError, ValueError) as error:
        reason = (str(error).strip() or repr(error)).splitlines()[0]
        raise ValueError(
            "the other processes are not found: where no cluster says who they are, JAX_COORDINATOR_ADDRESS, "
            f"{' and '.join(names)} must ({reason})"
        ) from None


def keep_compilations() -> None:
    """Keeps compiled programs in the user's cache, so that the next start only loads them.

    Does nothing where a cache of compilations is already set, or where the user's cannot be written.
    """
    if jax.config.jax_compilation_cache_dir is not None:
        return
    folder = cache_dir() / "xla"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def traced_platform() -> str:
    """What programs are traced for, "cpu", "gpu" or "tpu": an abstract mesh's device, or else JAX's own.

    ``jax.sharding.use_abstract_mesh`` with a mesh of ``jax.sharding.AbstractDevice``s thus traces for an accelerator
    that is not there (``python -m jspec.aot``).
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    name = getattr(device, "platform", None) or jax.default_backend()
    return "gpu" if name in ("cuda", "rocm") else name


def weights_dtype(name: Dtype) -> DTypeLike:
    """The dtype that an option names; auto: bf16, but fp32 on a CPU, where tokens should not depend on rounding."""
    if name == "auto":
        name = "fp32" if traced_platform() == "cpu" else "bf16"
    return DTYPES[name]


def cache_dtype(weights: DTypeLike) -> DTypeLike:
    """Of cached keys and values: that of the weights, but fp32 on a CPU, where few products are fast in bf16."""
    return jnp.float32 if traced_platform() == "cpu" else weights


def device_name() -> str:
    """What computes: the CPU's model and the cores that this process may use, or the accelerators."""
    devices = jax.devices()
    if devices[0].platform != "cpu":
        return f"{len(devices)} x {devices[0].device_kind}"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{_cpu_model()}, {cores} cores"


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())
