"""Replay of tables that are made once against replay of the methods themselves."""

import dataclasses
import itertools
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from experiments.jetspec.acceptance import TREES, make_tables, replay_tables
from jspec.heads.config import config_for
from jspec.heads.parallel import init_head, with_draft_ids
from jspec.method import Needs
from jspec.methods import ar
from jspec.models.transformer import fuse
from jspec.recording import record, replay
from jspec.sampling import Sampling
from jspec.state import Plan

VOCAB, BLOCK, NEW = 8, 6, 30
TAPS = (0, 1)
HEADS = {  # causal?, draft vocabulary
    "causal": (True, None),
    "bidirectional": (False, 6),
}


@pytest.fixture(scope="module")
def target(tiny_model):
    config, params = tiny_model(vocab_size=VOCAB, eos_ids=(3,))
    return SimpleNamespace(config=config, params=fuse(config, params))


@pytest.fixture(scope="module")
def recordings(target):
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, VOCAB, n).tolist() for n in (9, 1, 40, 2, 23)]
    keeping = ar()._replace(needs=Needs(depth=BLOCK - 1, taps=TAPS))
    plan = Plan(target.config, keeping, Sampling(0.8))
    return record(plan, {"target": target.params}, prompts, max_new_tokens=NEW, batch=5, seed=4)


@pytest.fixture(scope="module")
def heads(target):
    out = {}
    for name, (causal, vocab) in HEADS.items():
        settings = {"mask_token_id": VOCAB - 1, "taps": (1, 0), "block_size": BLOCK}
        config = config_for(target.config, causal=causal, draft_vocab_size=vocab, **settings)
        head = init_head(config, jax.random.key(1))
        if vocab:
            head = with_draft_ids(head, target.params, np.arange(1, 1 + vocab))
        out[name] = config, head
    return out


QUICK = [("causal", "chain", 16), ("causal", "jetspec", 16), ("bidirectional", "exact", 4)]


@pytest.mark.parametrize(
    ("name", "tree", "budget"),
    [
        pytest.param(*case, marks=[] if case in QUICK else [pytest.mark.slow])
        for case in itertools.product(HEADS, TREES, (4, 16))
    ],
)
def test_tables_give_the_rounds_that_the_method_has(target, recordings, heads, name, tree, budget):
    config, head = heads[name]
    tables = make_tables(config, head, target.params, recordings, TAPS, new=NEW, width=15)
    assert {x.tokens.shape for x in tables} == {(NEW, BLOCK - 1, config.draft_vocab_size or VOCAB)}
    found = replay_tables(target, recordings, tables, tree, budget, new=NEW)
    plan = Plan(target.config, TREES[tree](config, budget))
    turned = [dataclasses.replace(one, taps=one.taps[:, ::-1]) for one in recordings]
    real = replay(plan, {"target": target.params, "head": head}, turned, max_new_tokens=NEW)
    assert found == real
    assert sum(one.emitted for one in real) > sum(one.rounds for one in real)
