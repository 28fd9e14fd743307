"""Counts of a deep model from two shallow ones, and where a chip's roofline turns."""

import math

import pytest

from experiments.cells import Cells
from experiments.roofline.report import H100, by_arithmetic, mask_bytes, turning_point, write_report
from experiments.roofline.run import LAYERS, whole
from jspec.aot import KINDS, TARGETS
from jspec.cost.estimate import CHIPS, Chip


def test_layers_cost_alike():
    few, more = (100.0 + 7 * n for n in LAYERS)
    assert whole((few, more), 30) == pytest.approx(100 + 7 * 30)


def test_where_it_turns():
    chip = Chip(flops=10.0, bandwidth=2.0)
    counts = {n: (5.0 * n, 8.0) for n in (1, 4, 8, 16)}  # 0.5 n seconds against 4
    assert turning_point(chip, counts) == pytest.approx(8)
    counts = {n: (5.0 * n, 8.0 + n) for n in (1, 4, 8, 16)}  # against 4 + n / 2: never
    assert turning_point(chip, counts) is None


def test_arithmetic_counts_every_weight_once_for_bytes_and_twice_a_row_for_operations():
    """SmolLM2 has 134.5 million weights; its output head is its embedding; norms are left out."""
    flops, read = by_arithmetic("smollm2-135m", [1])[1]
    config = TARGETS["smollm2-135m"]
    norms = config.hidden_size * (2 * config.num_layers + 1)
    kept = 2 * config.num_layers * config.num_kv_heads * config.head_dim * 1024
    assert read == 2 * (134_515_008 - norms + kept)
    over_cache = 4 * config.num_layers * config.num_heads * config.head_dim * 1024
    assert flops == 2 * (134_515_008 - norms) + over_cache
    assert mask_bytes(64) == [64, 8, 4160, 16640]


def test_the_report(tmp_path):
    """On counts of a chip that turns at 100 rows: said of each kind, and drawn."""
    cells = Cells(tmp_path / "results.jsonl")
    for kind in KINDS:
        for budget in (1, 64, 256):
            chip = CHIPS[kind]
            flops, read = chip.flops * budget / 100, chip.bandwidth
            cells.add(target="qwen3-8b", kind=kind, budget=budget, flops=flops, bytes=read)
    write_report(cells, tmp_path)
    text = (tmp_path / "README.md").read_text()
    lines = {
        line.split(" | ")[1]: line.split(" | ") for line in text.splitlines() if "qwen3" in line
    }
    assert set(lines) == {*KINDS, "H100"}
    for kind in KINDS:
        assert lines[kind][5] == "100"
        assert math.isclose(float(lines[kind][7].rstrip(" |")), 2.56)
    assert lines["H100"][5] == "above 256"
    # 989 / 3.35 operations a byte, and a row does one for each byte of weights; its reading of the cache is little.
    assert 270 < turning_point(H100, by_arithmetic("qwen3-8b", [1, 512])) < 989 / 3.35
    assert (tmp_path / "roofline.svg").read_text().startswith("<?xml")
