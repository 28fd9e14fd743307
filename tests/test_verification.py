"""Verify against each root-to-node path read alone, and packing against plain Python."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.acceptance import accept
from jspec.models.transformer import forward, fuse, output_logits
from jspec.sampling import Sampling, warp
from jspec.state import KVCache, Plan, new_state
from jspec.tree import root_only
from jspec.verification import packing, row_bucket, run_rows, verify
from tests import oracles
from tests.drafters import noise
from tests.test_tree import poison, tree_of

BUDGET, CAPACITY, TEXT, SEED, FIRST = 40, 64, 64, 4, 5
TAPS, TOP = (0, 2), 3
PROMPTS = ([20, 9, 1, 33], [9, 0, 1, 35])  # lengths of the prompts, sizes of the trees
LIVE = sum(PROMPTS[1])
SAMPLED = Sampling(0.8, min_p=0.05)
METHOD = noise(BUDGET, BUDGET - 1, 61, TAPS, TOP)

run_rows = jax.jit(run_rows, static_argnums=(0, 4, 5))
verify = jax.jit(verify, static_argnums=0)


# Packing.


@pytest.mark.parametrize("batch", [1, 2, 5])
def test_packing_is_the_live_nodes_in_order(batch):
    rng = np.random.default_rng(batch)
    nodes = 7
    for rows in (1, 6, 7, 16, batch * nodes):
        run = jax.jit(partial(packing, nodes=nodes, rows=min(rows, batch * nodes)))
        for turn in range(30):
            sizes = rng.integers(0, nodes + 1, batch) * (rng.random(batch) < 0.6)
            while sizes.sum() > rows:
                sizes[rng.integers(batch)] //= 2
            if turn == 0:  # full to the last row, after and before empty trees
                sizes[:] = 0
                sizes[batch // 2] = min(rows, nodes)
            packs = run(jnp.asarray(sizes, jnp.int32))
            want = [(b, i) for b in range(batch) for i in range(sizes[b])]
            row, node, at = (np.asarray(x) for x in packs)
            assert list(zip(row, node))[: len(want)] == want
            assert all(at[b, i] == m for m, (b, i) in enumerate(want))
            assert row.min() >= 0 and row.max() < batch
            assert node.min() >= 0 and node.max() < nodes
            assert at.min() >= 0 and at.max() < len(row)
            x = rng.normal(size=(batch, nodes, 2)).astype(np.float32)
            packed = np.asarray(packs.pack(jnp.asarray(x)))
            assert packed.shape == (len(row), 2)
            spread = np.asarray(packs.unpack(jnp.asarray(packed)))
            for m, (b, i) in enumerate(want):
                np.testing.assert_array_equal(packed[m], x[b, i])
                np.testing.assert_array_equal(spread[b, i], packed[m])


# The forward.


@partial(jax.jit, static_argnums=0)
def read(config, target, texts):
    """Texts [T, X], each a causal chain: logits [T, X, V], and the forward's outputs with a leading T."""

    def one(ids):
        past = jnp.tril(jnp.ones((len(ids), len(ids)), bool))

        def attend(layer, q, k, v):
            k, v = (jnp.repeat(x, config.num_heads // config.num_kv_heads, axis=1) for x in (k, v))
            scores = jnp.einsum("qhd,khd->hqk", q, k) / config.head_dim**0.5
            weights = jax.nn.softmax(jnp.where(past, scores, -jnp.inf), axis=-1)
            return jnp.einsum("hqk,khd->qhd", weights, v)

        out = forward(config, target, ids, jnp.arange(len(ids)), attend, TAPS)
        return output_logits(target, out.hidden).T, out

    return jax.vmap(one)(texts)


def setting(tiny_model, arch, sampling, batch, buckets):
    """A plan, params, a state whose prompts are cached, trees on it, and the text of each live node.

    Garbage stands in the cache beyond each length and in the trees' padding.
    """
    rng = np.random.default_rng(0)
    config, weights = tiny_model(arch)
    params = {"target": fuse(config, weights)}
    plan = Plan(config, METHOD, sampling, buckets)
    lengths, sizes = (x[-batch:] for x in PROMPTS)
    prompts = [rng.integers(0, 61, n).tolist() for n in lengths]
    rows = [
        oracles.random_row(rng, n, s, vocab=40)
        for n, s in zip(sizes, ["any", "any", "any", "bush"][-batch:])
    ]
    rows = [
        [(prompt[-1], *row[0][1:]), *row[1:]] if row else [] for prompt, row in zip(prompts, rows)
    ]
    texts = {}
    for b, nodes in enumerate(rows):
        for i, (token, parent, *_) in enumerate(nodes):
            texts[b, i] = [*texts[b, parent], token] if i else prompts[b]
    state = new_state(plan, params, batch, CAPACITY, jax.random.key(SEED))
    known = np.array(lengths, np.int32) - 1
    _, cached = read(config, params["target"], padded(prompts))
    stale = np.arange(CAPACITY) >= known[:, None]

    def store(x, garbage):  # [B, X, kh, hd] -> [B, kh, C, hd]
        x = np.pad(x, ((0, 0), (0, CAPACITY - TEXT), (0, 0), (0, 0)))
        return jnp.asarray(np.where(stale[..., None, None], garbage, x).transpose(0, 2, 1, 3))

    cache = KVCache(
        tuple(store(k, np.float32(np.nan)) for k in cached.keys),
        tuple(store(v, np.float32(1e30)) for v in cached.values),
        jnp.asarray(known),
    )
    prompt = jnp.arange(batch, dtype=jnp.int32) + FIRST
    state = dataclasses.replace(
        state, cache=cache, rows=dataclasses.replace(state.rows, prompt=prompt)
    )
    return plan, params, state, poison(tree_of(rows, BUDGET), rng), texts


def padded(texts):
    return jnp.asarray([[*text, *[0] * (TEXT - len(text))] for text in texts], jnp.int32)


def check(plan, params, texts, out, tree=None):
    """Every live node of ``out`` is the last row of its text; with a tree, keys and values are its accepted path's."""
    live = rows, _ = tuple(np.array(list(texts)).T)
    length = np.array([len(text) for text in texts.values()])
    last = np.arange(len(texts)), length - 1
    logits, alone = read(plan.config, params["target"], padded(texts.values()))
    raw, near = np.asarray(logits[last]), partial(np.testing.assert_allclose, atol=1e-5, rtol=1e-5)
    best = np.argsort(-raw, axis=1)
    np.testing.assert_array_equal(out.top_tokens[live], best[:, :TOP])
    near(out.top_logits[live], np.take_along_axis(raw, best[:, :TOP], axis=1))
    near(out.taps[live], alone.taps[last])
    kept = np.arange(len(texts)), live
    if tree is not None:
        path = np.asarray(accept(tree, out.tokens, plan.method.needs.depth)[0])
        row, slot = np.nonzero(path >= 0)
        ends = {one: number for number, one in enumerate(texts)}
        kept = np.array([ends[b, i] for b, i in zip(row, path[row, slot])]), (row, slot)
    for ours, theirs in zip(out.keys + out.values, alone.keys + alone.values, strict=True):
        near(ours[kept[1]], theirs[last][kept[0]])
    if plan.sampling.greedy:
        np.testing.assert_array_equal(out.tokens[live], best[:, 0])
        return

    def gumbel(prompt, position):
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(SEED), prompt), position)
        return jax.random.gumbel(key, raw[0].shape)

    scores = warp(plan.sampling, jnp.asarray(raw.T)).T + jax.vmap(gumbel)(rows + FIRST, length)
    np.testing.assert_array_equal(out.tokens[live], scores.argmax(axis=1))


@pytest.mark.parametrize(
    ("arch", "sampling", "batch"),
    [
        ("llama", SAMPLED, 4),
        ("qwen3", Sampling(), 1),
        pytest.param("qwen2", SAMPLED, 1, marks=pytest.mark.slow),
        pytest.param("qwen2", Sampling(), 4, marks=pytest.mark.slow),
    ],
)
def test_every_node_is_the_end_of_its_own_chain(tiny_model, arch, sampling, batch):
    live = sum(PROMPTS[1][-batch:])  # verify: without a row to spare; below: with many
    plan, params, state, tree, texts = setting(tiny_model, arch, sampling, batch, (5, live))
    check(plan, params, texts, verify(plan, params, state, tree), tree)
    check(plan, params, texts, run_rows(plan, params, state, tree, batch * BUDGET, True))


def test_without_a_draw(tiny_model):
    plan, params, state, tree, texts = setting(tiny_model, "llama", SAMPLED, 4, (5, LIVE))
    drawn = run_rows(plan, params, state, tree, 4 * BUDGET, True)
    out = run_rows(plan, params, state, tree, LIVE, False)
    assert not out.tokens.any()
    assert drawn.tokens.any()
    live = tuple(zip(*texts))
    np.testing.assert_array_equal(out.top_tokens[live], drawn.top_tokens[live])
    np.testing.assert_allclose(out.taps[live], drawn.taps[live], atol=1e-5)
    silent = dataclasses.replace(plan, method=noise(BUDGET, BUDGET - 1, 61))
    out = run_rows(silent, params, state, tree, LIVE, False)
    assert out.top_tokens.shape == out.top_logits.shape == (4, BUDGET, 0)
    assert out.taps.shape == (4, BUDGET, 0, plan.config.hidden_size)
    np.testing.assert_allclose(out.keys[1][live], drawn.keys[1][live], atol=1e-5)


@pytest.mark.parametrize("batch", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_trees_narrower_than_the_budget(tiny_model, batch):
    plan, params, state, _, texts = setting(tiny_model, "llama", SAMPLED, batch, (4,))
    roots = [texts.get((b, 0), [0])[-1] for b in range(batch)]
    alone = root_only(jnp.asarray(roots))
    out = verify(plan, params, state, alone)
    assert out.tokens.shape == (batch, 1)
    alone = dataclasses.replace(
        alone, size=jnp.asarray([(b, 0) in texts for b in range(batch)], jnp.int32)
    )
    check(plan, params, {(b, i): text for (b, i), text in texts.items() if i == 0}, out, alone)


# Buckets.


def test_the_smallest_bucket_that_holds_the_live_rows(tiny_model):
    config, params = tiny_model()
    for budget, batch, buckets, want in [
        (16, 1, (1, 2, 4, 8, 32), (1, 2, 4, 8, 16)),
        (12, 1, (1, 2, 4, 8, 16), (1, 2, 4, 8, 12)),
        (12, 3, (4, 36, 64), (4, 36)),
        (1, 1, (1, 2), (1,)),
        (8, 2, (), (16,)),
        (300, 5, None, (*(1 << i for i in range(11)), 1500)),
    ]:
        options = {} if buckets is None else {"buckets": buckets}
        plan = Plan(config, noise(budget, 4, 61), **options)
        assert plan.row_buckets(batch) == want
        state = new_state(plan, {"target": params}, batch, 8, jax.random.key(0))
        rng = np.random.default_rng(0)
        for _ in range(20):
            size = rng.integers(0, budget + 1, batch) * (rng.random(batch) < 0.5)
            tree = root_only(jnp.zeros(batch, jnp.int32), budget)
            tree = dataclasses.replace(tree, size=jnp.asarray(size, jnp.int32))
            for least in (0, min(3, want[-1]), want[-1]):
                rows = want[row_bucket(plan, dataclasses.replace(state, least_rows=least), tree)]
                # finished rows cost nothing
                assert rows == min(b for b in want if b >= max(size.sum(), least))
