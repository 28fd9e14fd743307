"""What the tree primitives must return, in plain Python, one row at a time.

A row is a list of nodes ``(token, parent, depth, score, source)``, without padding.
"""

import heapq
import math

import numpy as np

BLANK = (0, -1, 0, -math.inf, 0)  # canonical padding
FIELDS = ("tokens", "parents", "depths", "scores", "source")


# Rows and arrays.


def rows_of(tree):
    """The live nodes of each tree."""
    columns = [np.asarray(getattr(tree, name)).tolist() for name in FIELDS]
    sizes = np.asarray(tree.size).tolist()
    return [list(zip(*(c[b][:size] for c in columns))) for b, size in enumerate(sizes)]


def padded_rows_of(tree):
    """All slots of each tree, padding included."""
    columns = [np.asarray(getattr(tree, name)).tolist() for name in FIELDS]
    return [list(zip(*row)) for row in zip(*columns)]


def pad(nodes, budget):
    return nodes + [BLANK] * (budget - len(nodes))


def arrays_of(rows, budget):
    """The fields of a Tree, as NumPy arrays."""
    padded = [pad(nodes, budget) for nodes in rows]
    dtypes = (np.int32, np.int32, np.int32, np.float32, np.int8)
    columns = {
        name: np.array([[node[k] for node in row] for row in padded], dtype).reshape(-1, budget)
        for k, (name, dtype) in enumerate(zip(FIELDS, dtypes))
    }
    return columns | {"size": np.array([len(nodes) for nodes in rows], np.int32)}


# Random rows.


def random_row(rng, size, shape, scores="eighths", vocab=1000):
    """A random tree of ``size`` nodes; ``shape`` is chain, star, bush or any.

    Scores are multiples of 1/8 from a small set, so that sums and ties are exact, or ``real``.
    """
    nodes, taken = [], set()
    for i in range(size):
        if i == 0:
            nodes.append((int(rng.integers(vocab)), -1, 0, 0.0, 0))
            continue
        parent = {
            "chain": i - 1,
            "star": 0,
            "bush": int(rng.integers(max(0, i - 4), i)),
            "any": int(rng.integers(i)),
        }[shape]
        token = int(rng.integers(vocab))
        while (parent, token) in taken:
            token += 1
        taken.add((parent, token))
        drop = int(rng.integers(4)) / 8 if scores == "eighths" else float(rng.random())
        score = float(np.float32(nodes[parent][3] - drop))
        nodes.append((token, parent, nodes[parent][2] + 1, score, int(rng.integers(2))))
    return nodes


def random_rows(rng, batch, budget, scores="eighths", vocab=1000):
    """Rows of all sizes, 0, 1 and ``budget`` always among them."""
    sizes = [0, 1, budget, budget, *rng.integers(0, budget + 1, batch).tolist()]
    shapes = ["any", "any", "chain", "star", *rng.choice(["chain", "bush", "any"], batch).tolist()]
    return [random_row(rng, n, s, scores, vocab) for n, s in zip(sizes, shapes)][:batch]


# The primitives.


def ancestors(nodes, budget):
    table = [[False] * budget for _ in range(budget)]
    for i in range(len(nodes)):
        j = i
        while j >= 0:
            table[i][j] = True
            j = nodes[j][1]
    return table


def pack(bits):
    """Python ints as signed 32-bit words."""
    words = []
    for start in range(0, len(bits), 32):
        word = sum(1 << j for j, bit in enumerate(bits[start : start + 32]) if bit)
        words.append(word - (1 << 32) if word >= 1 << 31 else word)
    return words


def compact(nodes, keep, budget):
    new, out = {-1: -1}, []
    for i, (token, parent, depth, score, source) in enumerate(nodes):
        if keep[i] and parent in new and len(out) < budget:
            new[i] = len(out)
            out.append((token, new[parent], depth, score, source))
    return out


def select(nodes, budget, penalty=0.0):
    """Best-first search from the root."""
    heap, chosen = [(-math.inf, 0)] if nodes else [], set()
    while heap and len(chosen) < budget:
        _, i = heapq.heappop(heap)
        chosen.add(i)
        for child, (_, parent, depth, score, _) in enumerate(nodes):
            if parent == i and child > 0:
                heapq.heappush(heap, (-(score - penalty * depth), child))
    return compact(nodes, [i in chosen for i in range(len(nodes))], budget)


def assemble(root, candidates, budget, depth, order=None):
    """Level by level; ``candidates`` are (parent, token, score, source, valid), compared by ``order`` or by score."""
    ok = [v and s > -math.inf for _, _, s, _, v in candidates]
    order = [s for _, _, s, _, _ in candidates] if order is None else order
    nodes, keys, owner = [(root, -1, 0, 0.0, 0)], [0.0], {-1: 0}
    level = {-1}
    for d in range(1, depth + 1):
        groups = {}
        for i, (parent, token, _, _, _) in enumerate(candidates):
            if ok[i] and parent in level:
                groups.setdefault((owner[parent], token), []).append(i)
        level = set()
        for (parent, token), members in groups.items():  # in the order of their first members
            best = max(members, key=lambda i: order[i])  # the first of the highest
            score = min(candidates[best][2], nodes[parent][3])
            keys.append(min(order[best], keys[parent]))
            for i in members:
                owner[i] = len(nodes)
            level.update(members)
            nodes.append((token, parent, d, score, candidates[best][3]))
    keyed = [(*node[:3], key, i) for i, (node, key) in enumerate(zip(nodes, keys))]
    return [(*node[:3], *nodes[node[4]][3:]) for node in select(keyed, budget)]


def union(root, paths, budget):
    """The tree of ``(path, score, source)``, ordered by depth, then by first appearance.

    Of equal paths the higher score counts; scores are cut to their parent's.
    """
    found = {}
    for path, score, source in paths:
        if path not in found or score > found[path][0]:
            found[path] = (score, source)  # a key keeps its place
    nodes, index = [(root, -1, 0, 0.0, 0)], {(): 0}
    for path in sorted(found, key=len):
        parent = index[path[:-1]]
        score, source = found[path]
        index[path] = len(nodes)
        nodes.append((path[-1], parent, len(path), min(score, nodes[parent][3]), source))
    return select(nodes, budget)


def paths_of(nodes):
    """(path, score, source) of all nodes but the root."""
    paths = []
    for token, parent, _, score, source in nodes:
        prefix = paths[parent][0] if parent >= 0 else None
        paths.append(((*prefix, token) if prefix is not None else (), score, source))
    return paths[1:]


def grow(root, children, depth, width, keep, stops=lambda level, scores: False):
    """``children[level][token]`` is [(token, logp), ...]; returns the nodes and the frontiers.

    A frontier is a list of valid slots (token, slot of the parent, depth, score).
    """
    nodes, frontiers = [(root, -1, 0, 0.0, 0)], []
    frontier = [(0, 0)]  # (node, slot of its parent)
    for level in range(depth):
        if stops(level, [nodes[i][3] for i, _ in frontier]):
            break
        frontiers.append([(nodes[i][0], slot, level, nodes[i][3]) for i, slot in frontier])
        found = []
        for slot, (i, _) in enumerate(frontier):
            for token, logp in children[level][nodes[i][0]]:
                if logp > -math.inf:
                    score = float(np.float32(nodes[i][3]) + np.float32(min(logp, 0.0)))
                    found.append((score, slot, int(token), i))
        found.sort(key=lambda x: -x[0])  # stable: ties stay in the order of slots and candidates
        frontier = []
        for score, slot, token, i in found[:keep]:
            frontier.append((len(nodes), slot))
            nodes.append((token, i, level + 1, score, 0))
        frontier = frontier[:width]
    return nodes, frontiers
