"""Drafts off the best path, counted by a slow reference; and a table of all that was measured."""

from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.cells import Cells
from experiments.paths import run
from experiments.paths.offpath import KINDS, offpath
from experiments.paths.report import write_report
from jspec.checkpoint import Head
from jspec.heads.config import Correction, config_for
from jspec.heads.parallel import block_hidden, draft_logits, init_head, with_draft_ids
from jspec.models.transformer import fuse

VOCAB, BLOCK, NEW, LENGTH = 8, 6, 12, 40
DRAFTED = np.arange(1, 7)


@pytest.fixture(scope="module")
def target(tiny_model):
    config, params = tiny_model(vocab_size=VOCAB, eos_ids=(3,))
    encode = SimpleNamespace(encode=lambda text: [1 + len(text) % 5, 2, 4])
    return SimpleNamespace(config=config, params=fuse(config, params), tokenizer=encode)


@pytest.fixture(scope="module")
def heads(target):
    out = {}
    for name, correction in {"domino": Correction(gru_size=4, rank=3), "dflash": None}.items():
        settings = {"mask_token_id": VOCAB - 1, "taps": (1, 0), "block_size": BLOCK}
        config = config_for(
            target.config, causal=False, draft_vocab_size=6, correction=correction, **settings
        )
        head = init_head(config, jax.random.key(1))
        if correction:
            up = head["correction"]["up"]
            head["correction"]["up"] = 9 * jax.random.normal(jax.random.key(2), up.shape)
        out[name] = Head(config, with_draft_ids(head, target.params, DRAFTED), "tiny", name * 2)
    return out


@pytest.fixture(scope="module")
def recorded(target, heads):
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, VOCAB, n).tolist() for n in (9, 1, 20)]
    prompts = [SimpleNamespace(encode=lambda _, ids=ids: ids) for ids in prompts]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("experiments.jetspec.acceptance.load_bench", lambda bench, count: prompts)
        patch.setattr(run, "NEW", NEW)
        patch.setattr(run, "BUDGETS", (4, 8))
        one = run.Recorded(target, heads, "1", "gsm8k")
        one()
    return one


@partial(jax.jit, static_argnums=0)
def block(config, head, target_params, states, tokens, anchors):
    hidden = block_hidden(config, head, target_params, states, tokens, anchors)
    return hidden, draft_logits(head, target_params, hidden)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def reference(config, head, target, one, taps):
    """Root by root, depth by depth."""
    columns = [taps.index(tap) for tap in config.taps]
    found = {kind: np.zeros((2, BLOCK - 1), int) for kind in KINDS[: 4 if config.correction else 2]}
    states, tokens = np.zeros((LENGTH, *one.taps[0, columns].shape)), np.zeros(LENGTH, int)
    states[: len(one.taps)], tokens[: len(one.tokens)] = one.taps[:, columns], one.tokens
    text = jnp.asarray(states, jnp.float32), jnp.asarray(tokens, jnp.int32)
    for root in range(one.start - 1, min(one.start - 1 + NEW, one.end)):
        hidden, rows = block(config, head, target.params, *text, jnp.asarray([root]))
        rows = np.asarray(rows, np.float64)
        state, off = 0.0, False
        for i in range(BLOCK - 1):
            if root + 1 + i >= one.end:
                break
            true, before = one.tokens[root + 1 + i], one.tokens[root + i]
            row = rows[:, i]
            picks = {"row": DRAFTED[row.argmax()]}
            if config.correction:
                w = {k: np.asarray(x, np.float64) for k, x in head["correction"].items()}
                read = np.split(w["gru_in"] @ np.asarray(target.params["embed"][before]), 3)
                kept = np.split(w["gru_state"] @ np.broadcast_to(state, 4), 3)
                reset, update = sigmoid(read[0] + kept[0]), sigmoid(read[1] + kept[1])
                state = (1 - update) * np.tanh(read[2] + reset * kept[2]) + update * state
                mixed = w["down"] @ np.concatenate([np.asarray(hidden[:, i]), state])
                if i >= config.correction.prefix:
                    row = row + w["up"] @ (mixed * sigmoid(mixed))
                picks["corrected"] = DRAFTED[row.argmax()]
            for who, pick in picks.items():
                where = ("off it" if off else "on it") if who == "corrected" else None
                where = where or ("off it" if off else "on the best path")
                found[f"{who}, {where}"][:, i] += (pick == true, 1)
            off |= picks["row"] != true
    return found


@pytest.mark.parametrize("name", ["domino", "dflash"])
def test_right_drafts_are_counted_on_the_best_path_and_off_it(target, heads, recorded, name):
    config, params = heads[name].config, heads[name].params
    found = offpath(config, params, target.params, recorded(), recorded.taps, new=NEW)
    want = [reference(config, params, target, one, recorded.taps) for one in recorded()]
    assert found == {kind: sum(one[kind] for one in want).tolist() for kind in want[0]}
    assert sum(found["row, off it"][0]) > 0 and found["row, off it"][1][0] == 0


@pytest.mark.slow
def test_everything_measured_is_in_the_report(target, heads, recorded, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "NEW", NEW)
    monkeypatch.setattr(run, "TURNS", 2)
    cells, tables = Cells(tmp_path / "results.jsonl"), {}
    for lane in run.lanes_of(heads):
        [budget] = lane.budgets((8,))
        found = run.replayed(target, lane, budget, recorded, tables)
        assert sum(found["rounds"]) <= sum(found["passes"])
        for bench in run.BENCHES:
            keys = {"part": "acceptance", "T": "0", "bench": bench, "budget": budget}
            cells.add(**keys, **lane.keys, **found)
    heads_counts = offpath(
        heads["domino"].config,
        heads["domino"].params,
        target.params,
        recorded(),
        recorded.taps,
        new=NEW,
    )
    cells.add(part="offpath", bench="gsm8k", head="domino", counts=heads_counts)
    lane = run.lanes_of(heads)[0]
    monkeypatch.setattr(run, "lanes_of", lambda heads: [lane])
    prompt = SimpleNamespace(encode=lambda tokenizer: [1, 2, 4])
    monkeypatch.setattr(run, "load_bench", lambda bench, count: [prompt])
    run.levels(target, heads, cells, "fp32")
    write_report(cells, tmp_path)
    text = (tmp_path / "README.md").read_text()
    for words in ("dartree_fixed", "What a tree of corrected nodes gains", "Off the best path"):
        assert words in text
    assert "What drafting costs, fp32" in text and (tmp_path / "paths.svg").exists()
    before = len(cells.rows)
    run.levels(target, heads, cells, "fp32")
    assert len(cells.rows) == before
