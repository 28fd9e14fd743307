"""``python -m jspec.aot``: compiles whole generations for TPUs that are not there, and tabulates what fits.

The compiler is the TPU's own: ``pip install 'jax[tpu]'`` brings it, and it needs no TPU. Weights are shapes alone. A
row of the table is one program: ``jspec.generate``, with all its row buckets, for a target, a method and a budget. What
the chip's memory cannot hold is said, and which part is the largest. Nothing here says that results are right or fast.
"""

import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, SingleDeviceSharding

from jspec.cost.table import make_cost
from jspec.decode import generate
from jspec.files import put
from jspec.heads.config import Correction, config_for, spread_taps
from jspec.heads.eagle import init_head as init_eagle
from jspec.heads.eagle_config import eagle_config_for
from jspec.heads.parallel import init_head
from jspec.method import MAX_BUDGET, Method
from jspec.methods import (
    ar,
    dartree,
    ddtree,
    dflash,
    domino,
    eagle3,
    graft,
    jetspec,
    prompt_lookup,
    smart,
    token_recycling,
)
from jspec.models.config import ModelConfig
from jspec.models.params import param_shapes
from jspec.models.transformer import fuse
from jspec.options import exit_status, parse_into
from jspec.state import Plan, new_state

GIB = 1 << 30


class Chip(NamedTuple):
    """A kind of TPU: a topology that its compiler knows, and the memory of a device (cloud.google.com/tpu)."""

    topology: str
    memory: float  # bytes


KINDS = {
    "v5e": Chip("v5e:2x2", 16 * GIB),
    "v5p": Chip("v5p:2x2x1", 95 * GIB),
    "v6e": Chip("v6e:2x2", 32 * GIB),
    "tpu7x": Chip("tpu7x:2x2x1", 96 * GIB),  # a chip is two devices
}


def _target(layers, hidden, ffn, heads, kv_heads, head_dim, vocab, theta, context, **more):
    return ModelConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        ffn_size=ffn,
        rope_theta=theta,
        rope_scaling=None,
        qkv_bias=False,
        max_positions=context,
        eos_ids=(2,),
        **more,
    )


TARGETS = {  # as their config.json files have them
    "smollm2-135m": _target(
        30, 576, 1536, 9, 3, 64, 49152, 1e5, 8192,
        arch="llama", norm_eps=1e-5, tie_embeddings=True, qk_norm=False,
    ),
    "qwen3-8b": _target(
        36, 4096, 12288, 32, 8, 128, 151936, 1e6, 40960,
        arch="qwen3", norm_eps=1e-6, tie_embeddings=False, qk_norm=True,
    ),
}  # fmt: skip


def _headed(make, causal, correction=None):
    """A method of a parallel head."""

    def drafter(config, budget):
        taps = spread_taps(config.num_layers, min(5, config.num_layers - 3))
        mask = config.vocab_size - 1
        head = config_for(
            config,
            mask_token_id=mask,
            taps=taps,
            block_size=8,
            causal=causal,
            correction=correction,
        )
        shapes = jax.eval_shape(lambda: init_head(head, jax.random.key(0), jnp.bfloat16))
        return make(head, budget), {"head": shapes}

    return drafter


def _eagle3(config, budget):
    head = eagle_config_for(config, draft_vocab_size=min(32000, config.vocab_size))
    shapes = jax.eval_shape(lambda: init_eagle(head, jax.random.key(0), jnp.bfloat16))
    ids = jax.ShapeDtypeStruct((head.draft_vocab_size,), jnp.int32)
    return eagle3(head, budget), {"head": {**shapes, "draft_ids": ids}}


def _graft(config, budget):
    method, params = METHODS["eagle3"](config, budget)
    return graft(method, retrieve="both"), params


def _smart(config, budget):
    method, params = METHODS["ddtree"](config, budget)
    return smart(method), params


Drafter = Callable[[ModelConfig, int], tuple[Method, dict[str, Any]]]
"""From a target and a budget to the method, and the shapes of what it has in ``params``."""

METHODS: dict[str, Drafter] = {
    "ar": lambda config, budget: (ar(), {}),
    "prompt_lookup": lambda config, budget: (prompt_lookup(budget), {}),
    "token_recycling": lambda config, budget: (token_recycling(budget), {}),
    "jetspec": _headed(jetspec, True),
    "dflash": _headed(dflash, False),
    "ddtree": _headed(ddtree, True),
    "domino": _headed(domino, False, Correction(1024, 256)),
    "dartree": _headed(dartree, False, Correction(1024, 256)),
    "eagle3": _eagle3,
    "graft": _graft,
    "smart": _smart,
}


@dataclasses.dataclass(frozen=True)
class AotOptions:
    """What to compile; each field's annotation is its help.

    Raises:
      ValueError: a name that there is not, or a number out of range.
    """

    kinds: Annotated[tuple[str, ...], f"of TPUs: {', '.join(KINDS)}"] = tuple(KINDS)
    targets: Annotated[tuple[str, ...], f"{', '.join(TARGETS)}"] = tuple(TARGETS)
    methods: Annotated[tuple[str, ...], f"{', '.join(METHODS)}"] = tuple(METHODS)
    budgets: Annotated[tuple[str, ...], "nodes of a tree, root included"] = ("16", "64", "256")
    batch: Annotated[int, "prompts decoded at a time"] = 1
    capacity: Annotated[int, "cache rows of a prompt and its answer"] = 4096
    results: Annotated[
        str | None, "JSON lines: what stands there is not compiled again, what is new is added"
    ] = None
    table: Annotated[str | None, "write the table there, in markdown"] = None

    def __post_init__(self):
        for name, known in (("kinds", KINDS), ("targets", TARGETS), ("methods", METHODS)):
            if unknown := [x for x in getattr(self, name) if x not in known]:
                raise ValueError(f"--{name} must be of {', '.join(known)}, got {unknown[0]}")
        for budget in self.budgets:
            if not budget.isdecimal() or not 1 <= int(budget) <= MAX_BUDGET:
                raise ValueError(f"--budgets must be in 1..{MAX_BUDGET}, got {budget}")
        for name in ("batch", "capacity"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} must be 1 or above, got {getattr(self, name)}")

    def cells(self) -> Iterator[dict[str, Any]]:
        """What there is to compile, one dict a program; ar has no budget but 1."""
        for kind in self.kinds:
            for target in self.targets:
                for method in self.methods:
                    for budget in ("1",) if method == "ar" else self.budgets:
                        yield {
                            "kind": kind,
                            "target": target,
                            "method": method,
                            "budget": int(budget),
                            "batch": self.batch,
                            "capacity": self.capacity,
                            "jax": jax.__version__,
                        }


def plan_and_shapes(cell: dict[str, Any]) -> tuple[Plan, dict[str, Any], Any]:
    """The plan of a cell and the shapes of its params and state, in bf16; to be traced for a TPU (``tracing_for``)."""
    config, budget = TARGETS[cell["target"]], cell["budget"]
    method, extra = METHODS[cell["method"]](config, budget)
    buckets = tuple(b for b in (1, 16, 64, 256, 1024) if b <= max(1, budget * cell["batch"]))
    plan = Plan(config, method, buckets=buckets)
    if cell["method"] == "smart":
        rows = plan.row_buckets(cell["batch"])
        extra["cost"] = jax.eval_shape(lambda: make_cost(rows, rows))
    return plan, *step_shapes(plan, extra, cell["batch"], cell["capacity"])


def step_shapes(
    plan: Plan, extra: dict[str, Any], batch: int, capacity: int
) -> tuple[dict[str, Any], Any]:
    """The shapes of params, in bf16 and with what a method has there beside the target, and of a state."""
    shapes = param_shapes(plan.config, jnp.bfloat16)
    params = {"target": jax.eval_shape(lambda p: fuse(plan.config, p), shapes), **extra}
    key = jax.random.key(0)
    return params, jax.eval_shape(lambda p: new_state(plan, p, batch, capacity, key), params)


def placed(shapes: Any, device: Any) -> Any:
    """The shapes, said to lie on a device."""
    where = SingleDeviceSharding(device)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), shapes)


def tracing_for(device: Any):
    """A context in which programs are traced for a device, real or of a topology."""
    there = AbstractDevice(device.device_kind, getattr(device, "num_cores", None), device.platform)
    return jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=there))


def compile_cell(cell: dict[str, Any]) -> dict[str, Any]:
    """Compiles a cell's program.

    Returns:
      The cell with sizes in bytes, and "problem": what does not fit or compile, or None.

    Raises:
      ValueError: the TPU's compiler is not installed.
    """
    chip = KINDS[cell["kind"]]
    device = tpu_devices(chip.topology)[0]
    with tracing_for(device):
        plan, params, state = plan_and_shapes(cell)
        start = time.perf_counter()
        lowered = generate.trace(plan, *placed((params, state), device)).lower(
            lowering_platforms=("tpu",)
        )
    parts = {
        "weights": _bytes(params["target"]),
        "head": _bytes(params.get("head", ())),
        "cache": _bytes((state.cache.keys, state.cache.values)),
        "state": _bytes((state.rows, state.method, state.stops)),
    }
    found = {**cell, **parts, "temporaries": None, "problem": None}
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        found["problem"] = _problem(parts, chip, str(error))
    else:
        sizes = compiled.memory_analysis()
        found["temporaries"] = sizes.temp_size_in_bytes
        found["code"] = sizes.generated_code_size_in_bytes
        held = sizes.argument_size_in_bytes + sizes.temp_size_in_bytes
        if held > chip.memory:
            found["problem"] = _problem(parts, chip, "")
    return {**found, "seconds": round(time.perf_counter() - start, 1)}


def _problem(parts, chip, message):
    if sum(parts.values()) > chip.memory or "hbm" in message.lower():
        name = max(parts, key=parts.get)
        size = f"{parts[name] / GIB:.1f} GiB"
        return f"does not fit {chip.memory / GIB:.0f} GiB: the {name} alone take {size}"
    return " ".join(message.split())[:200]


def _bytes(tree):
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def tpu_devices(topology: str) -> Sequence[Any]:
    """The devices of a topology, of which none is there.

    Raises:
      ValueError: the TPU's compiler is not installed.
    """
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    try:
        return topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    except (RuntimeError, NotImplementedError, ValueError) as error:
        raise ValueError(
            f"the TPU's compiler is not here: pip install 'jax[tpu]' ({str(error).splitlines()[0]})"
        ) from None


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The results as a markdown table, one line a target, method and budget, one column a kind."""
    kinds = [k for k in KINDS if any(row["kind"] == k for row in rows)]
    found = {(r["target"], r["method"], r["budget"], r["kind"]): r for r in rows}
    lines = [
        f"| target | method | budget | {' | '.join(kinds)} |",
        "| :-- | :-- | --: |" + " :-- |" * len(kinds),
    ]
    for key in dict.fromkeys((r["target"], r["method"], r["budget"]) for r in rows):
        cells = [_cell(found.get((*key, kind))) for kind in kinds]
        lines.append(f"| {' | '.join(map(str, (*key, *cells)))} |")
    return "\n".join(lines) + "\n"


def _cell(row):
    if row is None:
        return "not run"
    if row["problem"]:
        return row["problem"]
    held = sum(row[name] for name in ("weights", "head", "cache", "state")) / GIB
    return f"{held:.2f} + {row['temporaries'] / GIB:.2f} GiB"


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns the exit status: 0, 2 for a user's error, 130 for Ctrl-C."""

    def work():
        said = "Compiles whole generations for TPUs that are not there, and says what fits."
        options = parse_into(AotOptions, argv, "python -m jspec.aot", said)
        jax.config.update("jax_platforms", "cpu")
        kept = Path(options.results) if options.results is not None else None
        rows = [] if kept is None or not kept.exists() else read_results(kept)
        keys = list(next(options.cells()))
        done = [[row.get(key) for key in keys] for row in rows]
        for cell in options.cells():
            if list(cell.values()) in done:
                continue
            row = compile_cell(cell)
            rows.append(row)
            if kept is not None:
                _write(kept, "".join(json.dumps(r) + "\n" for r in rows))
            named = " ".join(str(row[k]) for k in ("kind", "target", "method", "budget"))
            print(f"{named}: {_cell(row)}, {row['seconds']} s", file=sys.stderr)
        text = table(rows)
        print(text, end="")
        if options.table is not None:
            _write(Path(options.table), text)

    return exit_status(work)


def _write(path: Path, text: str) -> None:
    put(path, lambda file: file.write(text.encode()))


def read_results(path: Path) -> list[dict[str, Any]]:
    """The rows of a file of results.

    Raises:
      ValueError: it is not one.
    """
    try:
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        return [row for row in rows if row["kind"] and row["budget"]]
    except (ValueError, TypeError, KeyError):
        raise ValueError(f"{path} has no results of python -m jspec.aot") from None


if __name__ == "__main__":
    sys.exit(main())
