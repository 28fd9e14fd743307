"""Against dictionaries in plain Python: what is learnt, and the tree that is filled from it."""

import dataclasses
import itertools
from collections import Counter

import chex
import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest

from jspec.method import Verdict
from jspec.methods import seed_table, token_recycling
from jspec.methods.token_recycling import best_template
from jspec.tree import RETRIEVED, Tree, check, select

VOCAB = 13
PARAMS = {"target": {"embed": jnp.zeros((VOCAB, 2))}}
GARBAGE = np.array([-(2**31), -1, VOCAB, 2**31 - 1, 1])


def random_verdict(rng, batch, nodes, k, sizes=None):
    """Trees of random tokens, each with k distinct top tokens; garbage in the padding."""
    sizes = rng.integers(0, nodes + 1, batch) if sizes is None else np.asarray(sizes)
    rows = [oracles.random_row(rng, n, "any", vocab=VOCAB - 1) for n in sizes]
    arrays = oracles.arrays_of(rows, nodes)
    arrays["tokens"] %= VOCAB
    tops = np.stack([rng.permutation(VOCAB)[:k] for _ in range(batch * nodes)])
    tops = tops.reshape(batch, nodes, k).astype(np.int32)
    dead = np.arange(nodes) >= sizes[:, None]
    arrays["tokens"][dead] = rng.choice(GARBAGE, dead.sum())
    tops[dead] = rng.choice(GARBAGE, (dead.sum(), k))
    tree = Tree(**jax.tree.map(jnp.asarray, arrays))
    empty = jnp.zeros((batch, nodes, 0, 2))
    return Verdict(tree, None, None, None, jnp.asarray(tops), jnp.full(tops.shape, jnp.nan), empty)


def learn(table, verdict, row):
    """A dictionary takes in the live nodes of a row, in order."""
    for node in range(int(verdict.tree.size[row])):
        table[int(verdict.tree.tokens[row, node])] = verdict.top_tokens[row, node].tolist()


def expected(table, root, budget, k, depth):
    """The template's paths for which the table has tokens at all."""
    edge = [np.log(0.39 * (r + 1) ** -1.7) for r in range(k)]
    paths, level = [()], [()]
    for _ in range(depth):
        level = [(*path, r) for path in level for r in range(k)]
        level = sorted(level, key=lambda p: -sum(edge[r] for r in p))[:budget]
        paths += level
    paths = sorted(paths, key=lambda p: (-sum(edge[r] for r in p), len(p)))[:budget]
    found = {(): ()}
    for path in sorted(paths, key=len)[1:]:
        above = found.get(path[:-1])
        token = None if above is None else table.get((root, *above)[-1], {})
        if token and token[path[-1]] >= 0:
            found[path] = (*above, token[path[-1]])
    return {found[p]: sum(edge[r] for r in p) for p in found if p}


def draft(method, state, roots):
    tree = jax.jit(method.propose)(PARAMS, state, jnp.array(roots, jnp.int32))[0].tree
    check(tree)
    return tree


def tree_as_dict(nodes):
    return {path: score for path, score, _ in oracles.paths_of(nodes)}


@pytest.mark.parametrize("scope", ["prompt", "kept"])
@pytest.mark.parametrize("budget, k, depth", [(1, 4, 3), (4, 8, 8), (16, 2, 3), (64, 4, 5)])
def test_learns_and_drafts_as_dictionaries_do(scope, budget, k, depth):
    rng = np.random.default_rng(budget)
    method = token_recycling(budget, k, depth, scope)
    batch = 5
    state = method.init(PARAMS, batch, 32, None)
    shared = {}
    tables = [shared if scope == "kept" else {} for _ in range(batch)]
    observe = jax.jit(method.observe)
    for _ in range(6):
        verdict = random_verdict(rng, batch, 6, k)
        state = observe(PARAMS, state, verdict)
        for row, table in enumerate(tables):
            learn(table, verdict, row)
        roots = rng.integers(0, VOCAB, batch)
        tree = draft(method, state, roots)
        for row, nodes in enumerate(oracles.rows_of(tree)):
            assert all(source == RETRIEVED for *_, source in nodes[1:])
            want = expected(tables[row], int(roots[row]), budget, k, depth)
            assert tree_as_dict(nodes) == pytest.approx(want, abs=1e-4)
            assert nodes[0][0] == roots[row]
        assert int(tree.depths.max()) <= method.needs.depth


def test_the_last_node_with_a_token_counts():
    method = token_recycling(4, k=2)
    state = method.init(PARAMS, 1, 32, None)
    verdict = random_verdict(np.random.default_rng(0), 1, 4, 2, sizes=[3])
    tree = dataclasses.replace(verdict.tree, tokens=jnp.array([[5, 6, 5, 5]]))  # the 4th is padding
    tops = jnp.array([[[1, 2], [3, 4], [7, 8], [9, 10]]])
    state = method.observe(PARAMS, state, verdict._replace(tree=tree, top_tokens=tops))
    assert state.rows[0, 5].tolist() == [7, 8]
    assert state.rows[0, 6].tolist() == [3, 4]
    assert int((state.rows >= 0).sum()) == 4


def test_an_unknown_root_is_alone():
    method = token_recycling(16)
    tree = draft(method, method.init(PARAMS, 2, 32, None), [0, 12])
    assert tree.size.tolist() == [1, 1]


def test_rows_are_independent():
    rng = np.random.default_rng(1)
    method = token_recycling(16, k=4)
    verdict = random_verdict(rng, 4, 12, 4)
    observe = jax.jit(method.observe)
    state = observe(PARAMS, method.init(PARAMS, 4, 32, None), verdict)
    for row in range(4):
        one = jax.tree.map(lambda x, row=row: x[row : row + 1], verdict)
        alone = observe(PARAMS, method.init(PARAMS, 1, 32, None), one)
        chex.assert_trees_all_equal(state.rows[row : row + 1], alone.rows)


def test_memory_by_scope():
    seed = seed_table(np.random.default_rng(2).integers(0, VOCAB, 200), VOCAB, 4)
    verdict = random_verdict(np.random.default_rng(3), 2, 6, 4, sizes=[6, 6])
    for scope in ("prompt", "kept"):
        method = token_recycling(16, 4, scope=scope)
        start = method.init(PARAMS, 2, 32, seed)
        end = method.observe(PARAMS, start, verdict)
        table = end.rows[0] if scope == "prompt" else end.shared
        changed = np.any(np.asarray(table) != seed, axis=1)
        assert changed.any() and not changed.all()
        kept = np.asarray(method.memory(end))
        np.testing.assert_array_equal(kept, seed if scope == "prompt" else table)
        tree = draft(method, method.init(PARAMS, 2, 32, kept), [1, 2])
        assert int(tree.size.min()) > 4
    assert token_recycling(16).memory(token_recycling(16).init(PARAMS, 2, 32, None)) is None


def test_a_donated_state_leaves_memory_alone():
    memory = jnp.zeros((VOCAB, 8), jnp.int32)
    for scope in ("prompt", "kept"):
        method = token_recycling(4, scope=scope)
        state = method.init(PARAMS, 1, 32, memory)
        verdict = random_verdict(np.random.default_rng(4), 1, 4, 8, sizes=[4])
        jax.jit(method.observe, donate_argnums=1)(PARAMS, state, verdict)
        assert int(memory.sum()) == 0


def test_template_has_the_best_paths():
    parents, ranks, depths, scores = best_template(16, 3, 4)
    assert parents[0] == -1 and (parents[1:] < np.arange(1, 16)).all()
    assert (np.diff(depths) >= 0).all() and depths[-1] <= 4
    edge = np.log(0.39 * np.arange(1, 4) ** -1.7)
    np.testing.assert_allclose(scores[1:], scores[parents[1:]] + edge[ranks[1:]], rtol=1e-5)
    paths = [p for d in range(5) for p in itertools.product(range(3), repeat=d)]
    best = sorted((sum(edge[r] for r in p) for p in paths), reverse=True)[:16]
    np.testing.assert_allclose(np.sort(scores)[::-1], best, rtol=1e-5)


def test_a_small_template_leaves_the_budget_unused():
    method = token_recycling(64, k=2, depth=1)
    state = method.init(PARAMS, 1, 32, np.full((VOCAB, 2), [3, 4], np.int32))
    tree = draft(method, state, [1])
    assert tree.budget == 64 and tree.tokens[0, : int(tree.size[0])].tolist() == [1, 3, 4]
    assert select(tree, 2).tokens.tolist() == [[1, 3]]


def test_seed_table_counts_successors():
    tokens = np.random.default_rng(5).integers(0, 6, 300)
    counts = Counter(zip(tokens[:-1].tolist(), tokens[1:].tolist()))
    table = seed_table(tokens, 8, 4)
    for first in range(8):
        after = sorted((-n, b) for (a, b), n in counts.items() if a == first)[:4]
        assert table[first].tolist() == [b for _, b in after] + [-1] * (4 - len(after))
    assert (seed_table([3], 8) == -1).all() and (seed_table([], 8) == -1).all()


@pytest.mark.parametrize("scope", ["prompt", "kept"])
def test_compiles_once(scope):
    chex.clear_trace_counter()
    method = token_recycling(16, 4, scope=scope)
    observe = jax.jit(chex.assert_max_traces(method.observe, n=1))
    propose = jax.jit(chex.assert_max_traces(method.propose, n=1))
    state = method.init(PARAMS, 3, 32, None)
    rng = np.random.default_rng(6)
    for _ in range(3):
        state = observe(PARAMS, state, random_verdict(rng, 3, 6, 4))
        _, state = propose(PARAMS, state, jnp.asarray(rng.integers(0, VOCAB, 3), jnp.int32))
    assert token_recycling(budget=16, k=4, depth=8, scope=scope) is method


def test_refuses_bad_arguments():
    for name in ("budget", "k", "depth"):
        with pytest.raises(ValueError, match=f"{name} must be .*, got 0"):
            token_recycling(**({"budget": 4} | {name: 0}))
    with pytest.raises(ValueError, match="scope must be 'prompt' or 'kept', got 'none'"):
        token_recycling(4, scope="none")
    with pytest.raises(ValueError, match="memory must be integers of shape"):
        token_recycling(4).init(PARAMS, 1, 32, np.zeros((VOCAB, 3), np.int32))
    with pytest.raises(ValueError, match=r"tokens must be in 0\.\.7"):
        seed_table([1, 8], 8)
