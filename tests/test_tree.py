"""Each primitive against its oracle, on trees whose padding holds garbage."""

import dataclasses
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jspec import growth as jg
from jspec import tree as jt
from jspec.tree import Tree

BATCH = 64
BUDGETS = (1, 2, 17, 32, 64)
nan, inf = float("nan"), float("inf")


def tree_of(rows, budget):
    return Tree(**{name: jnp.asarray(x) for name, x in oracles.arrays_of(rows, budget).items()})


def poison(tree, rng):
    """Garbage in all padding."""
    dead = ~np.asarray(tree.live)
    fill = {
        "tokens": [-(2**31), -1, 2**31 - 1, 7],
        "parents": [-(2**31), -2, 0, 3, 10**6, 2**31 - 1],
        "depths": [-5, 0, 1, 10**6],
        "scores": [nan, inf, -inf, 0.0, 9.0],
        "source": [-128, 1, 127],
    }
    fields = {}
    for name, values in fill.items():
        x = np.array(getattr(tree, name))
        x[dead] = rng.choice(np.array(values, x.dtype), dead.sum())
        fields[name] = jnp.asarray(x)
    return dataclasses.replace(tree, **fields)


def random_cases(seed, budget, count, **kwargs):
    """``count`` batches of (rng, rows, poisoned tree)."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        rows = oracles.random_rows(rng, BATCH, budget, **kwargs)
        yield rng, rows, poison(tree_of(rows, budget), rng)


def expect(tree, rows):
    """The tree is exactly these rows, and all that a Tree must be."""
    jt.check(tree)
    assert np.asarray(tree.size).tolist() == [len(nodes) for nodes in rows]
    padded = oracles.padded_rows_of(tree)
    for b, nodes in enumerate(rows):
        assert padded[b] == oracles.pad(nodes, tree.budget), f"row {b}"


# Views.


@pytest.mark.parametrize("budget", BUDGETS)
def test_ancestors_visibility_positions(budget):
    @jax.jit
    def views(tree, lengths):
        return jt.ancestors(tree), jt.visibility(tree), jt.positions(tree, lengths)

    for rng, rows, tree in random_cases(1, budget, 6):
        lengths = rng.integers(0, 5000, BATCH).astype(np.int32)
        table, words, places = (np.asarray(x) for x in views(tree, jnp.asarray(lengths)))
        want = [oracles.ancestors(nodes, budget) for nodes in rows]
        assert table.tolist() == want
        assert words.tolist() == [[oracles.pack(line) for line in t] for t in want]
        depths = [[node[2] for node in nodes] + [0] * (budget - len(nodes)) for nodes in rows]
        assert places.tolist() == (lengths[:, None] + np.array(depths)).tolist()


def test_largest_budget():
    rng = np.random.default_rng(0)
    rows = [oracles.random_row(rng, n, s) for n, s in [(512, "chain"), (512, "any"), (300, "bush")]]
    tree = poison(tree_of(rows, 512), rng)
    want = [oracles.ancestors(nodes, 512) for nodes in rows]
    assert np.array_equal(jax.jit(jt.ancestors)(tree), want)
    expect(
        jax.jit(partial(jt.select, budget=100))(tree),
        [oracles.select(nodes, 100) for nodes in rows],
    )


@pytest.mark.parametrize("count", [0, 1, 31, 32, 33, 64, 100])
def test_bits(count):
    bits = np.random.default_rng(count).random((3, 5, count)) < 0.5
    bits[0, 0], bits[0, 1] = True, False
    words = jax.jit(jt.pack_bits)(jnp.asarray(bits))
    assert words.dtype == jnp.int32
    assert words.shape == (3, 5, -(-count // 32))
    assert words.tolist() == [[oracles.pack(line) for line in block] for block in bits.tolist()]
    assert np.array_equal(jax.jit(jt.unpack_bits, static_argnums=1)(words, count), bits)


def test_root_only():
    tree = jax.jit(partial(jt.root_only, budget=5))(jnp.array([7, 0]))
    expect(tree, [[(7, -1, 0, 0.0, 0)], [(0, -1, 0, 0.0, 0)]])
    assert (tree.batch, tree.budget) == (2, 5)
    assert jt.root_only(jnp.array([7])).budget == 1


# Fewer nodes.


@pytest.mark.parametrize(("budget", "new"), [(1, 1), (1, 3), (17, 17), (64, 20), (64, 70)])
def test_compact(budget, new):
    run = jax.jit(partial(jt.compact, budget=new))
    for rng, rows, tree in random_cases(2, budget, 6):
        share = rng.choice([0.3, 0.8, 0.97, 1.0], (BATCH, 1))
        keep = rng.random((BATCH, budget)) < share
        want = [oracles.compact(nodes, k, new) for nodes, k in zip(rows, keep.tolist())]
        expect(run(tree, jnp.asarray(keep)), want)


@pytest.mark.parametrize("length", [2, 17, 33])
def test_compact_drops_descendants_at_any_distance(length):
    chain = [(i, i - 1, i, 0.0, 0) for i in range(length)]
    keep = ~jnp.eye(length, dtype=bool)  # row i drops node i
    tree = jax.jit(jt.compact)(tree_of([chain] * length, length), keep)
    assert tree.budget == length
    expect(tree, [chain[:i] for i in range(length)])


@pytest.mark.parametrize(("budget", "new"), [(1, 1), (17, 1), (17, 16), (64, 8), (64, 33), (8, 9)])
def test_select(budget, new):
    run = jax.jit(partial(jt.select, budget=new))
    for penalty in (0.0, 0.25, 3.0):
        for _, rows, tree in random_cases(3, budget, 4):
            want = [oracles.select(nodes, new, penalty) for nodes in rows]
            expect(run(tree, depth_penalty=jnp.float32(penalty)), want)


def test_select_real_scores():
    run = jax.jit(partial(jt.select, budget=20))
    for _, rows, tree in random_cases(4, 64, 6, scores="real"):
        expect(run(tree), [oracles.select(nodes, 20) for nodes in rows])


@pytest.mark.parametrize("penalty", [0, 0.125])
def test_select_static_penalty(penalty):
    run = jax.jit(lambda tree: jt.select(tree, 9, penalty))
    for _, rows, tree in random_cases(5, 17, 2):
        expect(run(tree), [oracles.select(nodes, 9, penalty) for nodes in rows])


def test_select_ties_go_to_the_lower_index():
    chain = [(i, i - 1, i, 0.0, 0) for i in range(6)]
    star = [(0, -1, 0, 0.0, 0)] + [(i, 0, 1, -1.0, 0) for i in range(1, 6)]
    tree = jax.jit(partial(jt.select, budget=4))(tree_of([chain, star], 6))
    expect(tree, [chain[:4], star[:4]])


@pytest.mark.parametrize("penalty", [-0.1, nan, inf, -1])
def test_select_refuses_penalty(penalty):
    with pytest.raises(ValueError, match="depth_penalty must be finite and >= 0, got"):
        jt.select(jt.root_only(jnp.array([1]), 4), 2, penalty)


# From candidates.


def random_candidates(rng, count):
    """(parent, token, score, source, valid), with duplicates, ties, cycles, rubbish."""
    parents = [-1 if rng.random() < 0.2 else int(rng.integers(-1, max(i, 1))) for i in range(count)]
    order = rng.permutation(count) if rng.random() < 0.7 else np.arange(count)
    place = {-1: -1} | {int(old): new for new, old in enumerate(order)}
    rubbish = float(rng.choice([0.0, 0.03, 0.2]))
    out = []
    for old in order:
        parent = place[parents[old]]
        score = float(rng.integers(-12, 2)) / 8
        valid = True
        if rng.random() < rubbish:
            parent = int(rng.choice([-(2**31), -2, int(rng.integers(count)), count, 2**31 - 1]))
        if rng.random() < rubbish:
            score = float(rng.choice([nan, inf, -inf]))
        if rng.random() < rubbish:
            valid = False
        out.append((parent, int(rng.integers(3)), score, int(rng.integers(2)), valid))
    return out


def candidate_arrays(lists):
    dtypes = (jnp.int32, jnp.int32, jnp.float32, jnp.int8, bool)
    return [jnp.asarray([[c[k] for c in row] for row in lists], t) for k, t in enumerate(dtypes)]


@pytest.mark.parametrize(
    ("count", "budget", "depth"),
    [(1, 4, 0), (12, 13, 12), (12, 5, 3), (40, 16, 7), (64, 64, None)],
)
def test_assemble(count, budget, depth):
    run = jax.jit(partial(jt.assemble, budget=budget, depth=depth))
    rng = np.random.default_rng(6)
    for _ in range(8):
        roots = rng.integers(0, 3, BATCH).astype(np.int32)
        lists = [random_candidates(rng, count) for _ in range(BATCH)]
        reach = count if depth is None else depth
        want = [oracles.assemble(int(r), c, budget, reach) for r, c in zip(roots, lists)]
        expect(run(jnp.asarray(roots), *candidate_arrays(lists)), want)


@pytest.mark.parametrize(("count", "budget"), [(12, 13), (40, 16)])
def test_assemble_in_another_order(count, budget):
    """Scores and sources are those of the candidates that the order prefers."""
    run = jax.jit(partial(jt.assemble, budget=budget))
    rng = np.random.default_rng(16)
    for _ in range(4):
        roots = rng.integers(0, 3, BATCH).astype(np.int32)
        lists = [random_candidates(rng, count) for _ in range(BATCH)]
        order = rng.integers(-9, 2, (BATCH, count)) / 4
        want = [
            oracles.assemble(int(r), c, budget, count, keys.tolist())
            for r, c, keys in zip(roots, lists, order)
        ]
        tree = run(jnp.asarray(roots), *candidate_arrays(lists), order=jnp.asarray(order))
        expect(tree, want)


def test_assemble_merges_transitively():
    # Two copies of the path 5, 6, children first; the second copy has the better end and a child.
    candidates = [
        (1, 6, -1.0, 0, True),
        (-1, 5, -0.5, 0, True),
        (3, 6, -0.75, 1, True),
        (-1, 5, -0.5, 1, True),
        (2, 8, -0.25, 1, True),
        (0, 8, -3.0, 0, True),
    ]
    run = jax.jit(partial(jt.assemble, budget=8))
    tree = run(jnp.array([4]), *candidate_arrays([candidates]))
    want = [(4, -1, 0, 0.0, 0), (5, 0, 1, -0.5, 0), (6, 1, 2, -0.75, 1), (8, 2, 3, -0.75, 1)]
    expect(tree, [want])


def test_assemble_cycles_never_join_a_path():
    # A cycle and a too deep chain, all of one token, beside a chain that is just deep enough.
    cycle = [(1, 0, -1.0, 0, True), (0, 0, -1.0, 0, True)]
    chain = [(2 + i - 1 if i else -1, 0, -0.5, 0, True) for i in range(6)]
    arrays = candidate_arrays([cycle + chain])
    for depth in (1, 2, 3, 4):
        run = jax.jit(partial(jt.assemble, budget=9, depth=depth))
        tree = run(jnp.array([0]), *arrays)
        want = [(0, -1, 0, 0.0, 0)] + [(0, i, i + 1, -0.5, 0) for i in range(depth)]
        expect(tree, [want])


@st.composite
def candidate_lists(draw):
    score = st.sampled_from([-inf, nan, -2.0, -1.0, -0.5, 0.0, 0.5, inf])
    parent = st.integers(-2, 10)
    entry = st.tuples(parent, st.integers(0, 2), score, st.integers(0, 1), st.booleans())
    easy = st.tuples(st.just(-1), st.integers(0, 1), st.just(-1.0), st.just(0), st.just(True))
    return draw(st.lists(entry | easy, min_size=10, max_size=10))


ASSEMBLE_TEN = jax.jit(partial(jt.assemble, budget=8, depth=6))
ASSEMBLE_ALL = jax.jit(partial(jt.assemble, budget=11))


@settings(max_examples=200, deadline=None)
@given(candidate_lists())
def test_assemble_any_list(candidates):
    tree = ASSEMBLE_TEN(jnp.array([1]), *candidate_arrays([candidates]))
    expect(tree, [oracles.assemble(1, candidates, 8, 6)])


@settings(max_examples=50, deadline=None)
@given(candidate_lists(), st.randoms(use_true_random=False))
def test_assemble_the_order_of_the_list_matters_only_in_ties(candidates, random):
    """As sets of (path, score), unselected trees do not depend on the order of the list."""
    order = list(range(10))
    random.shuffle(order)
    place = {old: new for new, old in enumerate(order)}
    shuffled = [(place.get(candidates[i][0], candidates[i][0]), *candidates[i][1:]) for i in order]
    trees = [ASSEMBLE_ALL(jnp.array([1]), *candidate_arrays([x])) for x in (candidates, shuffled)]
    sets = [{p[:2] for p in oracles.paths_of(oracles.rows_of(t)[0])} for t in trees]
    assert sets[0] == sets[1]


@pytest.mark.parametrize(
    ("rows", "depth", "budget", "mixed"),
    [(1, 1, 2, True), (1, 7, 8, False), (8, 8, 65, True), (8, 8, 20, True), (5, 3, 64, False)],
)
def test_from_paths(rows, depth, budget, mixed):
    run = jax.jit(jt.from_paths, static_argnames="budget")
    rng = np.random.default_rng(7)
    for _ in range(5):
        shape = (BATCH, rows, depth)
        roots = rng.integers(0, 9, BATCH)
        paths = rng.integers(0, 2, shape)
        lengths = rng.integers(0, depth + 1, shape[:2])
        scores = (-rng.integers(0, 3, shape) / 8).cumsum(-1)
        source = rng.integers(0, 2, shape) if mixed else np.ones(shape, int)
        want = []
        for b in range(BATCH):
            found = [
                (tuple(paths[b, r, : d + 1].tolist()), float(scores[b, r, d]), int(source[b, r, d]))
                for r in range(rows)
                for d in range(lengths[b, r])
            ]
            want.append(oracles.union(int(roots[b]), found, budget))
        beyond = np.arange(depth) >= lengths[:, :, None]
        paths[beyond], scores[beyond] = -77, nan
        tree = run(
            jnp.asarray(roots, jnp.int32),
            jnp.asarray(paths, jnp.int32),
            jnp.asarray(lengths, jnp.int32),
            jnp.asarray(scores, jnp.float32),
            jnp.asarray(source, jnp.int8) if mixed else jt.RETRIEVED,
            budget=budget,
        )
        expect(tree, want)


@pytest.mark.parametrize(
    ("one", "other", "budget"), [(1, 1, 1), (1, 9, 9), (24, 16, 39), (24, 9, 12)]
)
def test_merge(one, other, budget):
    run = jax.jit(partial(jt.merge, budget=budget))
    # Few tokens and close siblings: the two trees share many paths.
    left = random_cases(8, one, 8, vocab=2)
    right = random_cases(9, other, 8, vocab=2)
    for (rng, a_rows, _), (_, b_rows, _) in zip(left, right):
        b_rows = [b_rows[i] for i in rng.permutation(BATCH)]
        for b in range(BATCH):
            for rows in (a_rows, b_rows):
                rows[b][:1] = [(b, -1, 0, 0.0, 0)] * bool(rows[b])
        trees = [poison(tree_of(x, n), rng) for x, n in ((a_rows, one), (b_rows, other))]
        want = [
            oracles.union(b, oracles.paths_of(x) + oracles.paths_of(y), budget) if x or y else []
            for b, (x, y) in enumerate(zip(a_rows, b_rows))
        ]
        expect(run(*trees), want)


# Level by level.

VOCAB, FAN = 13, 4


def random_table(rng, depth):
    """Children (tokens, logps) [depth, VOCAB, FAN], with ties, holes and positive logps."""
    tokens = np.argsort(rng.random((depth, VOCAB, VOCAB)))[..., :FAN].astype(np.int32)
    values = [-0.125, -0.125, -0.25, -0.5, -1.0, -2.0, 0.5, -inf, nan]
    return tokens, rng.choice(np.array(values, np.float32), tokens.shape)


def expand_table(carry, frontier):
    """Reads a table; its carry also counts the calls and records each frontier."""
    tokens, logps, calls, record = carry
    record = jax.tree.map(lambda old, new: old.at[calls].set(new), record, frontier)
    children = tokens[calls][frontier.tokens], logps[calls][frontier.tokens]
    return children, (tokens, logps, calls + 1, record)


def grow_table(roots, tokens, logps, limit, depth, width, keep, early):
    blank = jnp.zeros((depth, roots.shape[0], width), jnp.int32)
    record = jg.Frontier(blank, blank, blank, blank, blank.astype(jnp.float32), blank > 0)

    def keep_growing(level, scores):
        return (level < limit[:, 0]) & jnp.any(scores > -limit[:, 1:] / 8, axis=1)

    return jg.grow(
        expand_table,
        (tokens, logps, jnp.int32(0), record),
        roots,
        depth,
        width,
        keep,
        keep_growing if early else None,
    )


def stops(levels, lowest, level, scores):
    """Not ``keep_growing`` of :func:`grow_table`, for one row."""
    return level >= levels or all(score <= -lowest / 8 for score in scores)


def frontiers_of(record, calls, row):
    """The valid slots of each recorded frontier, as the oracle gives them."""
    out = []
    for level in range(calls):
        valid = np.asarray(record.valid[level, row])
        columns = (record.tokens, record.slots, record.depths, record.scores)
        out.append(list(zip(*(np.asarray(x)[level, row][valid].tolist() for x in columns))))
        rest = [np.asarray(x)[level, row][~valid] for x in record]
        assert not any(x.any() for x in (*rest[:4], rest[5]))
        assert (rest[4] == -inf).all()
    return out


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize(
    ("depth", "width", "keep"), [(1, 1, 1), (6, 1, 1), (5, 3, 3), (4, 3, 12), (4, 5, 2)]
)
def test_grow(depth, width, keep, early):
    run = jax.jit(partial(grow_table, depth=depth, width=width, keep=keep, early=early))
    rng, batch = np.random.default_rng(10), 16
    for _ in range(6):
        roots = rng.integers(0, VOCAB, batch).astype(np.int32)
        tokens, logps = random_table(rng, depth)
        limit = rng.integers(0, [depth + 1, 24], (batch, 2)).astype(np.int32)
        tree, (_, _, calls, record) = run(*map(jnp.asarray, (roots, tokens, logps, limit)))

        table = np.stack([tokens, logps], axis=-1).tolist()
        want, longest = [], 0
        for b in range(batch):
            rule = partial(stops, *limit[b].tolist()) if early else lambda *_: False
            nodes, frontiers = oracles.grow(int(roots[b]), table, depth, width, keep, rule)
            want.append(nodes)
            used = [f for f in frontiers if f]
            longest = max(longest, len(used))
            got = frontiers_of(record, int(calls), b)
            assert got == used + [[]] * (len(got) - len(used))
        assert tree.budget == 1 + depth * keep
        assert int(calls) == (longest if early else depth)
        expect(tree, want)


def test_grow_frontier_ids_are_nodes():
    """Where every level is full, a frontier's ids are the tree's."""
    depth, width, keep = 4, 3, 4
    tokens, _ = random_table(np.random.default_rng(0), depth)
    logps = np.broadcast_to(np.float32([-1, -1.5, -2, -3]), tokens.shape)
    roots, limit = jnp.array([3]), jnp.zeros((1, 2), jnp.int32)
    arrays = (jnp.asarray(tokens), jnp.asarray(logps))
    run = jax.jit(partial(grow_table, depth=depth, width=width, keep=keep, early=False))
    tree, (_, _, _, record) = run(roots, *arrays, limit)
    assert int(tree.size[0]) == tree.budget
    for level in range(depth):
        valid = np.asarray(record.valid[level, 0])
        ids = np.asarray(record.nodes)[level, 0][valid]
        assert np.array_equal(tree.tokens[0, ids], record.tokens[level, 0][valid])
        assert np.array_equal(tree.scores[0, ids], record.scores[level, 0][valid])


def fan_of_four(carry, frontier):
    tokens = jnp.broadcast_to(jnp.arange(4), (*frontier.tokens.shape, 4))
    return (tokens, -1.0 - tokens), carry


def test_grow_no_levels():
    tree, carry = jg.grow(fan_of_four, jnp.int32(4), jnp.array([5]), 0, 3, 3)
    expect(tree, [[(5, -1, 0, 0.0, 0)]])
    assert int(carry) == 4


def test_grow_keeps_no_more_of_a_level_than_its_limit():
    """Two nodes, then one, then two again: of a level of one its children alone are left."""
    grown, _ = jg.grow(fan_of_four, (), jnp.array([5]), 3, 2, 2, limits=(2, 1, 2))
    rows = [(5, -1, 0, 0.0, 0), (0, 0, 1, -1.0, 0), (1, 0, 1, -2.0, 0), (0, 1, 2, -2.0, 0)]
    expect(grown, [[*rows, (0, 3, 3, -3.0, 0), (1, 3, 3, -4.0, 0)]])
    assert grown.budget == 7
    with pytest.raises(ValueError, match="limits must be one for each of 3 levels, got 2"):
        jg.grow(fan_of_four, (), jnp.array([5]), 3, 2, 2, limits=(2, 1))


@pytest.mark.parametrize("keep", [0, 9])
def test_grow_refuses_keep(keep):
    with pytest.raises(ValueError, match=r"keep must be from 1 to width \* candidates = 8, got"):
        jg.grow(fan_of_four, (), jnp.array([5]), 2, 2, keep)


# All of them.


def test_contents_do_not_recompile():
    @jax.jit
    @partial(chex.assert_max_traces, n=1)
    def everything(tree, other, keep, lists, limit, table):
        grown, _ = grow_table(tree.tokens[:, 0], *table, limit, 3, 2, 4, True)
        return (
            jt.visibility(tree),
            jt.compact(tree, keep),
            jt.merge(jt.select(tree, 9), other, 12),
            jt.assemble(tree.tokens[:, 0], *lists, budget=8, depth=5),
            grown,
        )

    rng = np.random.default_rng(11)
    for _, rows, tree in random_cases(12, 17, 5, vocab=VOCAB - 1):
        other = tree_of(rows[::-1], 17)
        lists = candidate_arrays([random_candidates(rng, 10) for _ in range(BATCH)])
        limit = jnp.asarray(rng.integers(0, 20, (BATCH, 2)).astype(np.int32))
        table = tuple(map(jnp.asarray, random_table(rng, 3)))
        keep = jnp.asarray(rng.random((BATCH, 17)) < 0.9)
        everything(tree, other, keep, lists, limit, table)
    assert everything._cache_size() == 1


def test_tree_is_a_pytree():
    tree = tree_of([oracles.random_row(np.random.default_rng(0), 5, "any")], 8)
    assert jax.tree.map(jnp.shape, tree).size == (1,)
    assert jax.eval_shape(lambda t: t, tree).tokens.shape == (1, 8)
    assert jax.vmap(lambda t: t.tokens[0])(tree).tolist() == [int(tree.tokens[0, 0])]


def test_repr_is_safe_under_tracing():
    seen = []
    jax.jit(lambda t: seen.extend([repr(t), t._repr_html_()]) or t.size)(
        jt.root_only(jnp.array([1]))
    )
    assert seen[0].startswith("Tree(tokens=")
    assert seen[1] is None


# check

GOOD = [(9, -1, 0, 0.0, 0), (1, 0, 1, -1.0, 0), (2, 0, 1, -1.0, 1), (2, 1, 2, -1.0, 0)]


def test_check_accepts():
    jt.check(tree_of([GOOD, GOOD[:1], []], 4))
    jt.check(tree_of([], 4))


@pytest.mark.parametrize(
    ("node", "value", "message"),
    [
        (
            0,
            (9, 0, 0, 0.0, 0),
            r"node 0: parent, depth, score of a root: -1, 0, 0, not \(0, 0, 0.0",
        ),
        (0, (9, -1, 1, 0.0, 0), "node 0: .* of a root"),
        (0, (9, -1, 0, -0.5, 0), "node 0: .* of a root"),
        (0, (-9, -1, 0, 0.0, 0), "node 0: token -9 and source 0 must not be negative"),
        (2, (2, 0, 1, -1.0, -1), "node 2: token 2 and source -1 must not be negative"),
        (2, (2, 2, 1, -1.0, 0), "node 2: parent 2 is not an earlier node"),
        (2, (2, -1, 1, -1.0, 0), "node 2: parent -1 is not an earlier node"),
        (3, (2, 1, 1, -1.0, 0), "node 3: depth 1 is not one more than its parent's 1"),
        (3, (2, 1, 2, -0.5, 0), "node 3: score -0.5 is not finite or above its parent's -1.0"),
        (3, (2, 1, 2, nan, 0), "node 3: score nan is not finite"),
        (3, (2, 1, 2, -inf, 0), "node 3: score -inf is not finite"),
        (3, (2, 0, 1, -1.0, 0), "node 3: token 2 is already a child of node 0"),
        (3, oracles.BLANK, "node 3: parent -1 is not"),
        (4, (0, 0, 0, -inf, 0), "node 4: padding must be"),
        (5, (0, -1, 0, nan, 0), "node 5: padding must be"),
    ],
)
def test_check_names_the_fault(node, value, message):
    arrays = oracles.arrays_of([GOOD, GOOD], 6)
    for name, x in zip(oracles.FIELDS, value):
        arrays[name][1, node] = x
    with pytest.raises(ValueError, match=f"^row 1, {message}"):
        jt.check(Tree(**arrays))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("tokens", np.zeros(4, np.int32), r"tokens must be i32\[B, N\] with N >= 1, got \(4,\)"),
        ("tokens", np.zeros((1, 0), np.int32), "tokens must be"),
        ("tokens", np.zeros((1, 4), np.int64), r"tokens must be int32\(1, 4\), got int64\(1, 4\)"),
        ("source", np.zeros((1, 4), np.int32), "source must be int8"),
        ("scores", np.zeros((1, 3), np.float32), r"scores must be float32\(1, 4\), got float32\(1"),
        ("size", np.array([5], np.int32), "row 0: size must be from 0 to 4, got 5"),
        ("size", np.array([-1], np.int32), "row 0: size must be from 0 to 4, got -1"),
    ],
)
def test_check_names_the_field(field, value, message):
    with pytest.raises(ValueError, match=message):
        jt.check(Tree(**(oracles.arrays_of([GOOD], 4) | {field: value})))
