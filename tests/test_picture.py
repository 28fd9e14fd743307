"""The pictures of a tree."""

import itertools
import re
import xml.etree.ElementTree as ET

import jax.numpy as jnp
import numpy as np
import oracles
import pytest

from jspec.picture import draw_svg, draw_text
from jspec.tree import Tree, root_only

LOG = {p: float(np.log(np.float32(p))) for p in (0.5, 0.25, 0.125)}
ROW = [
    (7, -1, 0, 0.0, 0),
    (1, 0, 1, LOG[0.5], 0),
    (2, 0, 1, LOG[0.25], 1),
    (3, 1, 2, LOG[0.25], 0),
    (4, 1, 2, LOG[0.125], 5),
]
WORDS = {7: "root", 1: "a\nb", 2: '<"&">', 3: "x" * 40, 4: "\x00\ud800"}
SVG = "{http://www.w3.org/2000/svg}"


def tree_of(*rows, budget=8):
    return Tree(**oracles.arrays_of(rows, budget))


def test_text():
    assert tree_of([], ROW).draw(row=1, path=[0, 1, 3, -1]) == "\n".join(
        [
            "7  ✓",
            "├─ 1  0.5  ✓",
            "│  ├─ 3  0.25  ✓",
            "│  └─ 4  0.12  source 5",
            "└─ 2  0.25  retrieved",
        ]
    )


def test_text_escapes():
    lines = draw_text(tree_of(ROW), text=WORDS.get).split("\n")
    assert len(lines) == 5
    assert lines[1] == r"├─ 'a\nb'  0.5"
    assert lines[3] == r"│  └─ '\x00\ud800'  0.12  source 5"


@pytest.mark.parametrize("shape", ["chain", "star", "any"])
def test_text_has_every_node(shape):
    row = oracles.random_row(np.random.default_rng(0), 512, shape, vocab=10**6)
    lines = draw_text(tree_of(row, budget=512)).split("\n")
    assert len(lines) == 512
    drawn = [re.match(r"(.*[├└]─ )?(\d+)", line).groups("") for line in lines]
    want = sorted((str(token), depth) for token, _, depth, _, _ in row)
    assert sorted((token, len(branch) // 3) for branch, token in drawn) == want


def test_empty_and_single():
    assert draw_text(tree_of([])) == "(empty tree)"
    assert ET.fromstring(draw_svg(tree_of([]))).findall(f"{SVG}g") == []
    assert draw_text(root_only(jnp.array([3]), 4)) == "3"
    assert len(ET.fromstring(draw_svg(root_only(jnp.array([3]), 4))).findall(f"{SVG}g")) == 1


def test_svg():
    image = ET.fromstring(draw_svg(tree_of(ROW), text=WORDS.get, path=jnp.array([0, 1, 3, -1])))
    nodes = image.findall(f"{SVG}g")
    assert [n.get("class") for n in nodes] == [
        "node accepted", "node accepted", "node", "node accepted", "node"
    ]  # fmt: skip
    assert [n.find(f"{SVG}text").text for n in nodes] == [
        "'root'", r"'a\nb'", "'<\"&\">'", "'" + "x" * 14 + "…", r"'\x00\ud800'"
    ]  # fmt: skip
    titles = [n.find(f"{SVG}title").text for n in nodes]
    assert titles[2] == "node 2, depth 1: '<\"&\">', p = 0.25, retrieved"
    assert titles[3] == "node 3, depth 2: '" + "x" * 40 + "', p = 0.25, head, accepted"
    assert [bool(n.find(f"{SVG}rect").get("stroke-dasharray")) for n in nodes] == [
        False, False, True, False, True
    ]  # fmt: skip
    edges = image.findall(f"{SVG}path")
    assert [e.get("class") for e in edges] == ["edge accepted", "edge", "edge accepted", "edge"]


@pytest.mark.parametrize("shape", ["chain", "star", "bush", "any"])
def test_svg_layout(shape):
    """Columns by depth; boxes inside the page and apart from each other."""
    row = oracles.random_row(np.random.default_rng(1), 64, shape)
    image = ET.fromstring(tree_of(row, budget=64)._repr_html_())
    _, _, width, height = (float(x) for x in image.get("viewBox").split())
    boxes = [
        [float(g.find(f"{SVG}rect").get(k)) for k in ("x", "y", "width", "height")]
        for g in image.findall(f"{SVG}g")
    ]
    assert len(boxes) == 64
    for (x, y, w, h), (_, parent, _, _, _) in zip(boxes, row):
        assert 0 <= x <= x + w <= width
        assert 0 <= y <= y + h <= height
        if parent >= 0:
            assert x > boxes[parent][0] + boxes[parent][2]
    for depth in {node[2] for node in row}:
        column = [box for box, node in zip(boxes, row) if node[2] == depth]
        assert len({x for x, _, _, _ in column}) == 1
        tops = sorted(y for _, y, _, _ in column)
        assert all(b - a >= 28 for a, b in itertools.pairwise(tops))
