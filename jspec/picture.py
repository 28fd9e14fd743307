"""How a tree draws itself: text for the terminal, SVG for a notebook."""

import html
import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from jspec.tree import SOURCES, Tree

Text = Callable[[int], str]


class _Node(NamedTuple):
    label: str
    parent: int
    depth: int
    probability: float
    source: str
    accepted: bool
    children: list[int]


def draw_text(
    tree: Tree, row: int = 0, text: Text | None = None, path: Iterable | None = None
) -> str:
    """One row of a tree with box-drawing characters, a node a line.

    A line gives the node's token, the probability of its path under the drafter, the source where
    it is not the draft head, and a check mark where the node was accepted.

    Args:
      tree: concrete trees.
      row: which of them.
      text: a token's text; default its id.
      path: ids of the accepted nodes; -1 is skipped.
    """
    nodes = _nodes(tree, row, text, path)
    lines = []
    stack = [(0, "", "")] if nodes else []
    while stack:
        i, lead, indent = stack.pop()
        node = nodes[i]
        notes = [node.label] + [_probability(node)] * (i > 0)
        notes += [node.source] * (node.source != SOURCES[0]) + ["✓"] * node.accepted
        lines.append(lead + "  ".join(notes))
        for child in reversed(node.children):
            last = child == node.children[-1]
            branch, below = ("└─ ", "   ") if last else ("├─ ", "│  ")
            stack.append((child, indent + branch, indent + below))
    return "\n".join(lines) or "(empty tree)"


def draw_svg(
    tree: Tree, row: int = 0, text: Text | None = None, path: Iterable | None = None
) -> str:
    """One row of a tree as a standalone SVG image, the root at the left, a depth a column.

    Accepted nodes are green, dashed ones do not come from the draft head, a line is as strong as
    its node is probable, and pointing at a node tells all about it. Arguments as in
    :func:`draw_text`.
    """
    nodes = _nodes(tree, row, text, path)
    short = [x.label if len(x.label) <= 16 else x.label[:15] + "…" for x in nodes]
    heights = _heights(nodes)
    columns = 1 + max((x.depth for x in nodes), default=0)
    widths = [0.0] * columns
    for node, label in zip(nodes, short):
        widths[node.depth] = max(widths[node.depth], 24 + 7.3 * len(label))
    lefts = [16 + sum(widths[:depth]) + 40 * depth for depth in range(columns)]
    places = [(lefts[x.depth], 30 + 36 * h) for x, h in zip(nodes, heights)]
    edges, boxes = [], []
    for i, (node, label, (x, y)) in enumerate(zip(nodes, short, places)):
        accepted = " accepted" * node.accepted
        if i > 0:
            x0, y0 = places[node.parent]
            x0 += widths[node.depth - 1]
            bend, strength = (x0 + x) / 2, 0.25 + 0.75 * node.probability
            edges.append(
                f'<path class="edge{accepted}" stroke-opacity="{strength:.2f}" '
                f'd="M{x0:.1f} {y0:.1f}C{bend:.1f} {y0:.1f} {bend:.1f} {y:.1f} {x:.1f} {y:.1f}"/>'
            )
        dashed = "" if node.source == SOURCES[0] else ' stroke-dasharray="4 3"'
        width, middle = widths[node.depth], x + widths[node.depth] / 2
        about = f"node {i}, depth {node.depth}: {node.label}, p = {_probability(node)}"
        about += f", {node.source}" + ", accepted" * node.accepted
        boxes.append(
            f'<g class="node{accepted}"><title>{html.escape(about)}</title>'
            f'<rect x="{x:.1f}" y="{y - 14:.1f}" width="{width:.1f}" height="28" rx="7"{dashed}/>'
            f'<text x="{middle:.1f}" y="{y - 1:.1f}">{html.escape(label)}</text>'
            f'<text class="p" x="{middle:.1f}" y="{y + 10:.1f}">{_probability(node)}</text></g>'
        )
    width, height = lefts[-1] + widths[-1] + 16, 60 + 36 * max(heights, default=0)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="jspec" role="img" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}">'
        f"<style>{_STYLE}</style>"
        f'<rect class="page" width="100%" height="100%" rx="8"/>{"".join(edges + boxes)}</svg>'
    )


_STYLE = """
.jspec .page{fill:#fff}
.jspec .edge{fill:none;stroke:#7b8794;stroke-width:1.5}
.jspec .edge.accepted{stroke:#1a9850;stroke-width:3;stroke-opacity:1}
.jspec .node rect{fill:#f4f6f8;stroke:#9aa5b1;stroke-width:1}
.jspec .node.accepted rect{fill:#d9f2e3;stroke:#1a9850;stroke-width:2}
.jspec text{font:12px ui-monospace,Menlo,Consolas,monospace;fill:#1f2933;text-anchor:middle;
white-space:pre}
.jspec text.p{font-size:9px;fill:#616e7c}
"""


def _nodes(tree, row, text, path):
    """The real nodes of one row."""
    size = int(tree.size[row])
    fields = (tree.tokens, tree.parents, tree.depths, tree.scores, tree.source)
    accepted = set() if path is None else {int(i) for i in np.asarray(path)}
    nodes = []
    for i, values in enumerate(zip(*(np.asarray(x[row, :size]).tolist() for x in fields))):
        token, parent, depth, score, source = values
        label = str(token) if text is None else repr(text(token))
        name = SOURCES[source] if source < len(SOURCES) else f"source {source}"
        nodes.append(_Node(label, parent, depth, math.exp(score), name, i in accepted, []))
        if i > 0:
            nodes[parent].children.append(i)
    return nodes


def _heights(nodes):
    """Vertical places: leaves in order at 0, 1, ..., other nodes midway between their children."""
    order, stack = [], [0] if nodes else []
    while stack:
        order.append(stack.pop())
        stack.extend(reversed(nodes[order[-1]].children))
    leaves = [i for i in order if not nodes[i].children]
    heights = dict(zip(leaves, range(len(leaves))))
    for i in reversed(range(len(nodes))):
        if children := nodes[i].children:
            heights[i] = (heights[children[0]] + heights[children[-1]]) / 2
    return [heights[i] for i in range(len(nodes))]


def _probability(node):
    return f"{node.probability:.2g}"
