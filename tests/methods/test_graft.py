"""Graft against tries in plain Python: what is retained, what is retrieved, what is not drafted; and in real rounds."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest

from jspec.cost.table import make_cost
from jspec.decode import decode_round
from jspec.driver import decode_all
from jspec.growth import best_paths
from jspec.heads.config import config_for
from jspec.heads.parallel import init_head
from jspec.method import Proposal
from jspec.methods import ar, ddtree, graft, prompt_lookup, smart, token_recycling
from jspec.methods.graft import GraftMemory, confidence, inner_state
from jspec.methods.smart import hold
from jspec.models.transformer import fuse
from jspec.prefill import admit
from jspec.recording import record, replay
from jspec.sampling import Sampling
from jspec.state import Plan, new_state
from jspec.tree import HEAD, RETRIEVED, check, select
from tests.drafters import by_level, echo, given, wild
from tests.test_tree import tree_of

VOCAB, CAPACITY = 7, 32  # few tokens: much of what is retrieved is drafted too
PARAMS = {"target": {"embed": jnp.zeros((VOCAB, 2))}}
BUDGET = 24


def random_drafts(rng, batch):
    rows = oracles.random_rows(rng, batch, BUDGET, vocab=VOCAB)
    return [draft or [(3, -1, 0, 0.0, 0)] for draft in rows]


def random_memory(rng, k=3):
    """A table with holes."""
    table = np.stack([rng.permutation(VOCAB)[:k] for _ in range(VOCAB)]).astype(np.int32)
    for row in table:
        row[rng.integers(1, 2 * k) :] = -1
    table[rng.integers(VOCAB)] = -1
    return table


def with_text(method, texts):
    """A state whose rows know these texts but their last tokens."""
    state = method.init(PARAMS, len(texts), CAPACITY, None)
    tokens = np.array([text[:-1] + [-5] * (CAPACITY - len(text)) for text in texts], np.int32)
    counts = np.array([len(text) - 1 for text in texts], np.int32)
    return method.absorb(PARAMS, state, jnp.asarray(tokens), None, jnp.asarray(counts))


@functools.cache
def proposer(method):
    return jax.jit(method.propose)


def trees_of(method, state, roots):
    """What a retriever proposes below these tokens, as lists of nodes."""
    proposal, _ = proposer(method)(PARAMS, state, jnp.asarray(roots, jnp.int32))
    return oracles.rows_of(proposal.tree)


def full_paths(nodes):
    """Each node's tokens from below the root."""
    found = []
    for token, parent, *_ in nodes:
        found.append((*found[parent], token) if parent >= 0 else ())
    return found


def union(draft, retained, branches, budget):
    """{path: (score, source)}: retained nodes, then retrieved ones from the best on, then the draft's others.

    ``branches`` are (path of the leaf, its score, nodes of a retriever's tree).
    """
    listed = []  # (path, score, source, whether it is retained)
    for i, (path, node) in enumerate(zip(full_paths(draft), draft)):
        if i:
            listed.append((path, node[3], node[4], i in retained, False))
    for leaf, base, nodes in branches:
        for path, node in list(zip(full_paths(nodes), nodes))[1:]:
            score = float(np.float32(base) + np.float32(node[3]))
            listed.append((leaf + path, score, node[4], False, True))
    first = {}
    for i, (path, *_) in enumerate(listed):
        first.setdefault(path, i)
    chosen = {}
    for phase in ("retained", "retrieved", "others"):
        mine = [
            (path, score, source)
            for path, score, source, kept, retrieved in listed
            if phase == ("retained" if kept else "retrieved" if retrieved else "others")
        ]
        # Of equal paths the best counts: it comes first.
        mine.sort(key=lambda x: (-np.float32(np.float32(x[1]) - 1), len(x[0]), first[x[0]]))
        for path, score, source in mine:
            if path not in chosen and len(chosen) < budget - 1:
                chosen[path] = (score, source)
    out = {}
    for path in sorted(chosen, key=len):
        score, source = chosen[path]
        above = out[path[:-1]][0] if len(path) > 1 else 0.0
        out[path] = (min(score, above), source)
    return out


def as_dict(nodes):
    return {path: (score, source) for path, score, source in oracles.paths_of(nodes)}


def best_of(draft, count):
    order = sorted(range(1, len(draft)), key=lambda i: (-draft[i][3], i))
    return set(order[:count])


def stage_of(draft, checkpoints, thresholds):
    """The first checkpoint whose best candidate is not sure enough, or None."""
    for stage, (depth, threshold) in enumerate(zip(checkpoints, thresholds)):
        there = [node[3] for node in draft if node[2] == depth + 1]
        if (np.exp(max(there)) if there else 0.0) < threshold:
            return stage
    return None


def drafted(method, params, state, roots):
    tree = proposer(method)(params, state, jnp.asarray(roots, jnp.int32))[0].tree
    check(tree)
    assert int(tree.depths.max()) <= method.needs.depth
    return oracles.rows_of(tree)


@pytest.mark.parametrize("prune", [True, False])
def test_the_best_drafted_nodes_and_the_best_retrieved_ones(prune):
    rng = np.random.default_rng(0)
    checkpoints, thresholds, shares = (0, 2), (0.4, 0.3), (0.8, 0.5)
    options = {"checkpoints": checkpoints, "shares": shares, "k": 3, "depth": 5, "prune": prune}
    method = graft(given(BUDGET, BUDGET - 1), thresholds=thresholds, **options)
    table = token_recycling(BUDGET, k=3, depth=5)
    stages, sources = set(), set()
    for _ in range(6):
        drafts, memory = random_drafts(rng, 16), random_memory(rng)
        roots = [draft[0][0] for draft in drafts]
        state = method.init(PARAMS, 16, CAPACITY, GraftMemory((None, memory)))
        trees = drafted(method, PARAMS | {"draft": tree_of(drafts, BUDGET)}, state, roots)
        retrieved = trees_of(table, table.init(PARAMS, 16, CAPACITY, memory), roots)
        for draft, other, tree in zip(drafts, retrieved, trees):
            stage = stage_of(draft, checkpoints, thresholds) if prune else 1
            count = {None: BUDGET, 0: 5, 1: 11}[stage]  # of 23: 23 - 18, 23 - 12
            want = union(draft, best_of(draft, count), [((), 0.0, other)], BUDGET)
            assert as_dict(tree) == want
            stages.add(stage)
            sources |= {source for _, source in want.values()}
    assert stages == ({None, 0, 1} if prune else {1}) and sources == {HEAD, RETRIEVED}


def test_matches_of_the_text_beside_the_table():
    rng = np.random.default_rng(1)
    options = {"checkpoints": (0,), "shares": (0.7,), "k": 3, "depth": 4}
    method = graft(given(BUDGET, BUDGET - 1), thresholds=(1.0,), retrieve="both", **options)
    table, text = token_recycling(BUDGET, k=3, depth=4), prompt_lookup(BUDGET, depth=4)
    for _ in range(4):
        drafts, memory = random_drafts(rng, 5), random_memory(rng)
        texts = [rng.integers(0, VOCAB, n).tolist() for n in (1, 2, 9, 20, 30)]
        drafts = [[(t[-1], *d[0][1:]), *d[1:]] for t, d in zip(texts, drafts)]
        roots = [t[-1] for t in texts]
        state = method.init(PARAMS, 5, CAPACITY, GraftMemory((None, memory, None)))
        known = with_text(text, texts)
        # A row's text is the third part of its state.
        rows = state.rows._replace(parts=(*state.rows.parts[:2], known.rows))
        state = dataclasses.replace(state, rows=rows)
        trees = drafted(method, PARAMS | {"draft": tree_of(drafts, BUDGET)}, state, roots)
        found = zip(
            drafts,
            trees_of(table, table.init(PARAMS, 5, CAPACITY, memory), roots),
            trees_of(text, known, roots),
            trees,
        )
        for draft, successors, matches, tree in found:
            count = 7 if stage_of(draft, (0,), (1.0,)) == 0 else BUDGET  # of 23: 23 - 16
            branches = [((), 0.0, successors), ((), 0.0, matches)]
            assert as_dict(tree) == union(draft, best_of(draft, count), branches, BUDGET)


@pytest.mark.parametrize(("leaves", "prune"), [(1, True), (3, True), (3, False)])
def test_branches_at_the_leaves(leaves, prune):
    """They go on as if the text went on to the leaf, which is what the matches of the text need to know."""
    rng = np.random.default_rng(2)
    options = {"place": "tail", "leaves": leaves, "prune": prune, "depth": 4}
    source = {"retrieve": "text", "checkpoints": (0,), "shares": (0.5,), "thresholds": (0.85,)}
    method = graft(given(BUDGET, BUDGET - 1), **options, **source)
    text = prompt_lookup(BUDGET, depth=4)
    hung = 0
    for _ in range(4):
        drafts = random_drafts(rng, 6)
        drafts[0] = oracles.random_row(rng, 8, "chain", vocab=VOCAB)
        texts = [rng.integers(0, VOCAB, n).tolist() for n in (8, 1, 2, 3, 5, 6)]
        drafts = [[(t[-1], *d[0][1:]), *d[1:]] for t, d in zip(texts, drafts)]
        state = method.init(PARAMS, 6, CAPACITY, None)
        rows = state.rows._replace(parts=(state.rows.parts[0], with_text(text, texts).rows))
        state = dataclasses.replace(state, rows=rows)
        params = PARAMS | {"draft": tree_of(drafts, BUDGET)}
        trees = drafted(method, params, state, [t[-1] for t in texts])
        for draft, known, tree in zip(drafts, texts, trees):
            retained = best_of(draft, 11)
            if prune:
                retained = {0}
                for i, (_, parent, _, score, _) in enumerate(draft[1:], 1):
                    if parent in retained and np.exp(score - draft[parent][3]) >= 0.85:
                        retained.add(i)
            inner = {draft[i][1] for i in retained if i}
            ends = sorted(({0} | retained) - inner, key=lambda i: (-draft[i][3], i))[:leaves]
            branches, paths = [], full_paths(draft)
            for end in ends:
                longer = [*known, *paths[end]]
                [nodes] = trees_of(text, with_text(text, [longer]), longer[-1:])
                branches.append((paths[end], draft[end][3], nodes))
                hung += len(nodes) > 1 and end > 0
            assert as_dict(tree) == union(draft, retained, branches, BUDGET)
    assert hung > 5


def test_confidence_is_the_best_path_at_a_depth():
    rng = np.random.default_rng(3)
    rows = oracles.random_rows(rng, 12, 9)
    found = np.asarray(confidence(Proposal(tree_of(rows, 9)), (0, 1, 5)))
    for nodes, mine in zip(rows, found):
        for depth, value in zip((1, 2, 6), mine):
            there = [score for _, _, d, score, _ in nodes if d == depth]
            assert value == pytest.approx(np.exp(max(there)) if there else 0.0)


@pytest.mark.parametrize(
    ("sure", "limits", "passes", "deepest"),
    [
        ([0.2, 0.2], (0.35, 0.25, 0.15), 1, [1, 1]),
        ([0.4, 0.2], (0.35, 0.25, 0.15), 2, [2, 1]),
        ([0.7, 0.4], (0.35, 0.25, 0.15), 6, [6, 2]),
        ([0.8, 0.4], (0.35, 0.25, 0.15), 8, [8, 2]),
        ([0.2, 0.1], (0.0, 0.0, 0.0), 8, [8, 8]),
        ([0.9, 0.9], (1.0, 0.0, 0.0), 1, [1, 1]),
        ([0.2, 0.1], 0.0, 8, [8, 8]),  # one number for all
    ],
)
def test_what_is_not_sure_is_not_drafted(sure, limits, passes, deepest):
    """Checkpoints 0, 1 and 5 look at depths 1, 2 and 6: a pass not needed by any row is not run."""
    method = graft(by_level(8, 2, 0.5, VOCAB), k=3)
    params = PARAMS | {"text": jnp.arange(40) % VOCAB, "sure": jnp.array(sure)}
    params["graft"] = jnp.array(limits)
    state = method.init(params, 2, CAPACITY, None)
    roots = jnp.zeros(2, jnp.int32)
    proposal, _ = proposer(method)(params, state, roots)
    assert int(proposal.passes) == passes
    assert proposal.tree.depths.max(axis=1).tolist() == deepest  # the table is empty


@functools.cache
def chosen(budget, sure):
    """Drafts by level, and then leaves out all but the best nodes, as EAGLE-3 does."""
    inner = by_level(8, 2, sure, VOCAB)

    def propose(params, state, roots, keep_growing=None):
        proposal, state = inner.propose(params, state, roots, keep_growing)
        tree = proposal.tree
        return proposal._replace(tree=select(tree, budget), sure=best_paths(tree, 8)), state

    return inner._replace(propose=propose, budget=budget)


@pytest.mark.parametrize(("sure", "stage", "passes"), [(0.8, None, 8), (0.6, 5, 6), (0.3, 0, 1)])
def test_a_drafter_that_leaves_nodes_out_is_as_sure_as_it_was(sure, stage, passes):
    """Depth 6 is never in a tree of 4; whether the draft was sure of it decides all the same."""
    method = graft(chosen(4, sure), shares=(1.0, 1.0, 1.0), k=3, depth=3)
    params = PARAMS | {"text": jnp.arange(40) % VOCAB}
    full = np.stack([np.roll(np.arange(VOCAB), n)[:3] for n in range(VOCAB)]).astype(np.int32)
    state = method.init(params, 1, CAPACITY, GraftMemory((None, jnp.asarray(full))))
    proposal, _ = proposer(method)(params, state, jnp.zeros(1, jnp.int32))
    assert int(proposal.passes) == passes
    retrieved = (np.asarray(proposal.tree.source) == RETRIEVED) & np.asarray(proposal.tree.live)
    assert retrieved.any() == (stage is not None)


def test_smart_says_how_sure_the_drafter_was():
    """Whatever it cuts; and while it rests nothing was drafted."""
    method = smart(chosen(4, 0.8))
    params = PARAMS | {"text": jnp.arange(40) % VOCAB, "cost": make_cost((1, 4), (0.03, 9.0))}
    state, roots = method.init(params, 1, CAPACITY, None), jnp.zeros(1, jnp.int32)
    proposal, _ = method.propose(params, hold(state, False), roots)
    assert proposal.tree.size.tolist() == [1]
    # The first level is always drafted, and that its nodes are too dear to verify changes nothing.
    assert float(np.exp(proposal.sure[0, 0])) == pytest.approx(0.8, rel=1e-5)
    assert (method.propose(params, hold(state, True), roots)[0].sure == -np.inf).all()


@pytest.mark.parametrize("prune", [True, False])
def test_an_outer_predicate_has_its_say(prune):
    method = graft(by_level(8, 2, 0.9, VOCAB), k=3, prune=prune)
    params = PARAMS | {"text": jnp.arange(40) % VOCAB}
    state, roots = method.init(params, 2, CAPACITY, None), jnp.zeros(2, jnp.int32)

    @jax.jit
    def propose(least):
        proposal, _ = method.propose(params, state, roots, lambda _, scores: scores[:, 0] > least)
        return proposal.passes, proposal.tree.size

    assert int(propose(-0.25)[0]) == 3  # 0.9 ** 3 is below exp(-0.25)
    passes, size = propose(0.0)
    assert int(passes) == 0 and size.tolist() == [1, 1]


# Real rounds.


@pytest.fixture(scope="module")
def tiny(tiny_model):
    config, params = tiny_model(vocab_size=VOCAB)
    head = config_for(config, mask_token_id=VOCAB - 1, taps=(1,), block_size=6, causal=True)
    weights = init_head(head, jax.random.key(1))
    return config, head, {"target": fuse(config, params), "head": weights}


def test_the_table_learns_from_every_verified_node(tiny):
    config, _, params = tiny
    method = graft(wild(3, 4, VOCAB), k=3)
    plan = Plan(config, method, Sampling(0.9), buckets=())
    state = new_state(plan, params, 2, 256, jax.random.key(0))
    prompt = [1, 2, 3, 1, 2, 5]
    state = admit(plan, params, state, 1, prompt, 0, 40)
    table = np.asarray(state.method.rows.parts[1])
    assert ((table[1] >= 0).all(axis=1) == np.isin(np.arange(VOCAB), prompt[:-1])).all()
    step = jax.jit(decode_round, static_argnums=0)
    want, rejected = {t: table[1, t].tolist() for t in prompt[:-1]}, 0
    for _ in range(8):
        state, verdict = step(plan, params, state)
        size = int(verdict.tree.size[1])
        rejected += size - int(verdict.count[1])
        for token, best in zip(verdict.tree.tokens[1, :size], verdict.top_tokens[1, :size]):
            want[int(token)] = best.tolist()
        assert verdict.top_tokens.shape[2] == 3
    table = np.asarray(state.method.rows.parts[1])
    assert (table[0] == -1).all() and rejected > 20
    for token in range(VOCAB):
        assert table[1, token].tolist() == want.get(token, [-1] * 3)


def test_a_drafter_is_shown_what_it_asked_for(tiny):
    """Neither prompts' top tokens, if it asked for none, nor more of them than it asked for."""
    config, _, params = tiny
    seen = []

    def watching(top):
        inner = token_recycling(4, k=top) if top else prompt_lookup(4)

        def observe(params, state, verdict):
            seen.append(verdict.top_tokens.shape)
            return state

        return inner._replace(observe=observe)

    for top in (0, 2):
        plan = Plan(config, graft(watching(top), k=5), buckets=())
        state = new_state(plan, params, 1, 64, jax.random.key(0))
        state = admit(plan, params, state, 0, [1, 2, 3], 0, 9)
        jax.eval_shape(functools.partial(decode_round, plan), params, state)
        assert {shape[2] for shape in seen} == {top}
        seen.clear()


def test_prompts_are_no_rounds(tiny):
    config, _, params = tiny

    def observe(params, state, verdict):
        return dataclasses.replace(state, rows=state.rows + 100)

    counting = echo(4, 2)._replace(observe=observe)
    plan = Plan(config, graft(counting, k=3), buckets=())
    params = params | {"text": jnp.arange(40) % VOCAB}
    state = new_state(plan, params, 1, 64, jax.random.key(0))
    state = admit(plan, params, state, 0, [1, 2, 3], 0, 9)
    assert inner_state(state.method).rows.tolist() == [2]
    state, verdict = jax.jit(decode_round, static_argnums=0)(plan, params, state)
    assert inner_state(state.method).rows.tolist() == [2 + 100 + int(verdict.count[0])]


def test_what_it_remembers(tiny):
    config, head, params = tiny
    queue = [[1, 2, 3, 4], [5, 1, 2]]
    options = {"max_new_tokens": 20, "capacity": 256}
    method = graft(ddtree(head, 6), k=3, scope="kept", thresholds=(1.0,) * 3)
    plan = Plan(config, method, buckets=())
    done, run = decode_all(plan, params, queue, **options)
    memory = run.memory()
    assert isinstance(memory, GraftMemory) and memory.parts[0] is None
    assert (np.asarray(memory.parts[1]) >= 0).any()
    again, _ = decode_all(plan, params, queue, memory=memory, **options)
    assert [one.tokens for one in again] == [one.tokens for one in done]
    np.testing.assert_array_equal(method.init(params, 1, 64, memory).shared[1], memory.parts[1])
    assert all(not leaf.is_deleted() for leaf in jax.tree.leaves(memory))
    with pytest.raises(ValueError, match="memory must be one of graft"):
        method.init(params, 1, 64, memory.parts[1])


@pytest.mark.slow
def test_replay_of_retrieval_from_the_text_alone(tiny):
    config, head, params = tiny
    queue = [[1, 2, 3, 1, 2], [4]]
    method = graft(ddtree(head, 6), retrieve="text", thresholds=(0.9,) * 3)
    plan = Plan(config, method, Sampling(0.5), buckets=())
    recordings = record(plan, params, queue, max_new_tokens=30)
    replayed = replay(plan, params, recordings, max_new_tokens=30, capacity=256)
    done, _ = decode_all(plan, params, queue, max_new_tokens=30, capacity=256)
    assert [one.trace for one in replayed] == [one.trace for one in done]
    assert sum(x.by_source[RETRIEVED] for x in done) > 0
    with pytest.raises(ValueError, match="measure it by decoding"):
        replay(Plan(config, graft(ddtree(head, 6), k=3)), params, recordings, max_new_tokens=30)


def test_nothing_compiles_anew():
    method = graft(by_level(8, 2, 0.5, VOCAB), k=3)
    chex.clear_trace_counter()
    propose = jax.jit(chex.assert_max_traces(method.propose, 1))
    params = PARAMS | {"text": jnp.arange(40) % VOCAB, "sure": jnp.array([0.7, 0.4])}
    state = method.init(params, 2, CAPACITY, None)
    found = []
    for limits in ((0.0, 0.0, 0.0), (1.0, 0.0, 0.0), (0.5, 0.3, 0.2)):
        params["graft"] = jnp.array(limits)
        found.append(int(propose(params, state, jnp.zeros(2, jnp.int32))[0].passes))
    assert found == [8, 1, 6]
    assert graft(by_level(8, 2, 0.5, VOCAB), k=3, thresholds=[0.35, 0.25, 0.15]) is method
    assert graft(ar()) is ar()


WRONG = {
    r"thresholds must be in \[0, 1\], got 1.5": {"thresholds": (0.3, 1.5, 0)},
    r"thresholds must be in \[0, 1\], got -0.1": {"thresholds": (-0.1, 0.5, 0)},
    r"thresholds must be in \[0, 1\], got nan": {"thresholds": (0.1, 0.5, float("nan"))},
    "thresholds must be 3, got 2": {"thresholds": (0.3, 0.2)},
    "thresholds must be 1, got 3": {"thresholds": (0.3, 0.2, 0.1), "place": "tail"},
    r"shares must be in \[0, 1\], at most the whole budget, got 1.1": {"shares": (0.2, 1.1, 0)},
    "shares must be 3, as many as checkpoints, got": {"shares": (0.5,)},
    "checkpoints must ascend from 0 or above, got": {"checkpoints": (1, 1, 2)},
    "checkpoints must be 0 or above, got -1": {"checkpoints": (-1, 0, 2)},
    "retrieve must be 'table', 'text' or 'both', got 'web'": {"retrieve": "web"},
    "place must be 'root' or 'tail', got 'top'": {"place": "top"},
    r"k must be in 1\.\.256, got 0": {"k": 0},
    "scope must be 'prompt' or 'kept', got 'all'": {"scope": "all"},
    r"leaves must be in 1\.\.64, got 0": {"leaves": 0},
}


@pytest.mark.parametrize("says", WRONG)
def test_what_it_refuses(says):
    with pytest.raises(ValueError, match=says):
        graft(echo(8, 7), **WRONG[says])


def test_smart_over_it_and_it_over_smart(tiny):
    """Shapes and needs fit; the texts are compared in tests/test_equality.py."""
    inner = by_level(3, 2, 0.5, VOCAB)
    for method in (smart(graft(inner, k=3)), graft(smart(inner), k=3)):
        assert method.needs.top_k == 3 and method.budget == 7
        assert method.needs.depth >= 3
