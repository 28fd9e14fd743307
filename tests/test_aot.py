"""The table of what compiles for TPUs that are not there."""

import importlib.util
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jspec import aot
from jspec.aot import (
    METHODS,
    TARGETS,
    AotOptions,
    compile_cell,
    main,
    plan_and_shapes,
    table,
    tracing_for,
)
from jspec.models.config import ModelConfig

libtpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs jax[tpu]")
CELL = {
    "kind": "v5e",
    "target": "tiny",
    "method": "jetspec",
    "budget": 16,
    "batch": 2,
    "capacity": 256,
}


class Absent:
    device_kind, num_cores, platform = "TPU v5e", 1, "tpu"


@pytest.fixture
def tiny(monkeypatch, tiny_model):
    config, _ = tiny_model(num_layers=5, head_dim=64, vocab_size=512)
    assert isinstance(config, ModelConfig)
    monkeypatch.setitem(TARGETS, "tiny", config)
    return config


@pytest.mark.parametrize("method", METHODS)
def test_a_whole_generation_is_traced_and_lowered_with_the_kernel(tiny, method):
    """Targets and heads alike: as many calls as layers that run, in bf16, with a cache in bf16."""
    budget = 1 if method == "ar" else 16
    with tracing_for(Absent):
        plan, params, state = plan_and_shapes({**CELL, "method": method, "budget": budget})
        assert state.cache.keys[0].dtype == jnp.bfloat16
        ids = {"draft_ids"}  # of EAGLE's draft vocabulary; SMART's costs are no weights either
        head = {k: x for k, x in params.get("head", {}).items() if k not in ids}
        weights = jax.tree.leaves((params["target"], head))
        assert {x.dtype for x in weights} == {jnp.dtype("bfloat16")}
        lowered = aot.generate.trace(plan, params, state).lower(lowering_platforms=("tpu",))
    text = lowered.as_text()
    passes = 2 if "eagle3" in plan.method.name else 1  # EAGLE's first level is a program of its own
    of_head = passes if "head" in params else 0
    calls = tiny.num_layers * len(plan.row_buckets(2)) + of_head
    assert len(re.findall(r"call @_attend\w*\(", text)) == calls
    assert "tpu_custom_call" in text


def test_published_sizes():
    sizes = {}
    for name, config in TARGETS.items():
        shapes = aot.param_shapes(config)
        sizes[name] = sum(x.size for x in jax.tree.leaves(shapes))
    assert sizes == {"smollm2-135m": 134_515_008, "qwen3-8b": 8_190_735_360}


@libtpu
@pytest.mark.slow
@pytest.mark.parametrize("kind", aot.KINDS)
def test_it_compiles(tiny, kind):
    row = compile_cell({**CELL, "kind": kind})
    assert row["problem"] is None
    assert row["temporaries"] >= 0
    assert row["cache"] == 2 * tiny.num_layers * 2 * tiny.num_kv_heads * 256 * 64 * 2


def row(kind, budget, problem=None):
    sizes = dict.fromkeys(("weights", "head", "cache", "state", "temporaries"), 1 << 28)
    return {**CELL, "kind": kind, "budget": budget, **sizes, "problem": problem}


def test_the_table():
    text = table([row("v5e", 16), row("v6e", 16, "does not fit"), row("v6e", 64)])
    assert text.splitlines() == [
        "| target | method | budget | v5e | v6e |",
        "| :-- | :-- | --: | :-- | :-- |",
        "| tiny | jetspec | 16 | 1.00 + 0.25 GiB | does not fit |",
        "| tiny | jetspec | 64 | not run | 1.00 + 0.25 GiB |",
    ]


def test_the_readme_has_the_table():
    kept = Path(__file__).parents[1] / "experiments" / "aot" / "results.jsonl"
    assert table(aot.read_results(kept)) in (kept.parents[2] / "README.md").read_text()


def test_what_is_there_is_not_compiled_again(monkeypatch, tmp_path, capsys):
    asked = []

    def fake(cell):
        asked.append((cell["kind"], cell["method"], cell["budget"]))
        return row(cell["kind"], cell["budget"]) | cell | {"seconds": 1.0}

    monkeypatch.setattr(aot, "compile_cell", fake)
    kept, written = tmp_path / "results.jsonl", tmp_path / "table.md"
    command = ["--targets", "smollm2-135m", "--methods", "ar", "jetspec", "--budgets", "16"]
    command += ["--results", str(kept), "--table", str(written), "--kinds"]
    assert main([*command, "v5e"]) == 0
    assert asked == [("v5e", "ar", 1), ("v5e", "jetspec", 16)]
    assert main([*command, "v5e", "v6e"]) == 0
    assert asked[2:] == [("v6e", "ar", 1), ("v6e", "jetspec", 16)]
    assert [json.loads(line)["kind"] for line in kept.read_text().splitlines()] == ["v5e"] * 2 + [
        "v6e"
    ] * 2
    assert written.read_text() in capsys.readouterr().out
    kept.write_text("[]\n")
    assert main([*command, "v5e"]) == 2
    assert "has no results of python -m jspec.aot" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"kinds": ("v3",)}, "--kinds must be of v5e, v5p, v6e, tpu7x, got v3"),
        ({"targets": ("gpt",)}, "--targets must be of smollm2-135m, qwen3-8b, got gpt"),
        ({"methods": ("luck",)}, "--methods must be of .*, got luck"),
        ({"budgets": ("0",)}, "--budgets must be in 1..512, got 0"),
        ({"budgets": ("many",)}, "--budgets must be in 1..512, got many"),
        ({"batch": 0}, "--batch must be 1 or above, got 0"),
    ],
)
def test_what_is_refused(options, problem):
    with pytest.raises(ValueError, match=problem):
        AotOptions(**options)


def test_no_compiler(monkeypatch):
    def missing(**_):
        raise RuntimeError("Unable to initialize backend 'tpu'")

    monkeypatch.setattr(aot.topologies, "get_topology_desc", missing)
    with pytest.raises(
        ValueError, match=r"^the TPU's compiler is not here: pip install 'jax\[tpu\]'"
    ):
        aot.tpu_devices("v5e:2x2")
