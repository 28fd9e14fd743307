"""An EAGLE-3 head through the same trainer: its steps, runs that are killed, and the command from text to decoding."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest
import yaml
from tiny_target import EOS, write_target

import jspec
from jspec import run
from jspec.heads.eagle import best_drafts, block_hidden, with_draft_ids
from jspec.heads.eagle_config import eagle_config_for
from jspec.methods import ar
from jspec.recording import record
from jspec.state import Plan
from jspec.train import __main__ as command
from jspec.train.data import BatchConfig, Text, draft_vocabulary, split
from jspec.train.evaluation import evaluate, held_out_recordings, long_enough
from jspec.train.features import with_taps
from jspec.train.log import read_log
from jspec.train.loop import Trainer
from jspec.train.losses import LossConfig
from jspec.train.optim import OptimConfig
from jspec.train.stages import evaluated

TAPS = (0, 1, 2)  # the last is the final normed state
LOSS = LossConfig("fkl", gamma=4.48)  # each step counts 0.8 times the one before
SMALL = {"eval_texts": 2, "eval_tokens": 8, "eval_budget": 8, "held_out": 3}


@pytest.fixture(scope="module")
def target(tiny_model, tmp_path_factory):
    return jspec.load(write_target(tmp_path_factory.mktemp("tiny"), tiny_model, num_layers=2))


@pytest.fixture(scope="module")
def texts(target):
    """Greedy answers of the target, which soon go round in circles: easily learned."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 48, rng.integers(1, 6)).tolist() for _ in range(11)]
    plan = Plan(target.config, ar())
    recordings = record(plan, {"target": target.params}, prompts, max_new_tokens=24, batch=11)
    bare = [Text(one.tokens, one.start, None) for one in recordings]
    return with_taps(target.config, target.params, bare, TAPS)


def trainer(target, texts, folder, steps, rate=3e-3, vocab=30, **shape):
    config = eagle_config_for(target.config, steps=7, draft_vocab_size=vocab, **shape)
    ids = None if vocab is None else draft_vocabulary(texts, vocab, 64)
    methods = evaluated(config, 8)
    plans = {name: Plan(target.config, method) for name, method in methods.items()}
    optim = OptimConfig(steps=steps, learning_rate=rate, eval_every=steps // 2, **SMALL)
    train, held_out = split(texts, optim.held_out)
    return Trainer(
        target,
        config,
        train,
        held_out,
        TAPS,
        plans,
        folder,
        batch=BatchConfig(texts=2, anchors=8, lengths=(32,)),
        loss=LOSS,
        optim=optim,
        draft_ids=ids,
        as_params=lambda h: h if ids is None else with_draft_ids(h, target.params, ids),
    )


def log(folder):
    timed = ("seconds", "slots_per_second")
    return [{k: v for k, v in row.items() if k not in timed} for row in read_log(folder)]


def test_a_run_that_was_killed_ends_like_one_that_was_not(target, texts, tmp_path):
    given = {"taps": (0, 1, 1), "vocab": 30}
    whole = trainer(target, texts, tmp_path / "whole", 4, **given)
    whole.run()
    parts = trainer(target, texts, tmp_path / "parts", 4, **given)
    parts.run(until=2)
    parts = trainer(target, texts, tmp_path / "parts", 4, **given)
    assert int(parts.state.step) == 2
    parts.run()
    assert log(tmp_path / "parts") == log(tmp_path / "whole")
    jax.tree.map(np.testing.assert_array_equal, parts.state, whole.state)
    assert len(log(tmp_path / "whole")[0]["hits"]) == 7
    before, after = whole.first_weights(), whole.state.head
    moved = jax.tree.map(lambda a, b: bool((np.asarray(a) != np.asarray(b)).any()), before, after)
    assert all(jax.tree.leaves(moved))  # its own output rows too
    ids = draft_vocabulary(texts, 30, 64)
    np.testing.assert_array_equal(before["output"], target.params["lm_head"][ids])


def foreseen(run, recordings):
    """Acceptance length of chains by the training pass alone, which has no cache and is fed the text's own tokens."""
    head, target = run.as_params(run.state.head), run.frozen.target

    @jax.jit
    def drafts(taps, tokens, anchor):
        hidden = block_hidden(run.config, head, target, taps, tokens, anchor)
        return best_drafts(head, target, hidden, 1)[0][:, 0]

    emitted = rounds = 0
    for one in recordings:
        at = one.start - 1
        while at < one.end - 1:
            text = one.tokens[at + 1 : at + 1 + run.config.steps]
            found = np.asarray(drafts(one.taps, one.tokens[:-1], np.asarray([at])))
            count = 1 + int(np.cumprod(found[: len(text)] == text).sum())
            emitted, rounds, at = emitted + count, rounds + 1, at + count
    return emitted / rounds


@pytest.mark.parametrize(
    ("taps", "own", "vocab"),
    [((0, 1, 1), True, None), ((2,), False, 30)],
    ids=["eagle3", "as eagle2 reads"],
)
def test_what_a_head_learned_is_accepted_by_replay(target, texts, tmp_path, taps, own, vocab):
    """On the texts that it was trained on: eight texts of a random target say nothing about others."""
    run = trainer(target, texts, tmp_path, 120, 5e-3, vocab, taps=taps, own_output=own)
    run.run()
    rows = log(tmp_path)
    assert rows[1]["loss"] < rows[0]["loss"]
    assert min(rows[1]["hits"]) > 10 / 64  # ten times chance, at every step that was unrolled
    assert ("output" in run.state.head) == own
    seen, _ = split(texts, SMALL["held_out"])
    optim = dataclasses.replace(run.optim, eval_texts=len(seen))
    chosen = long_enough(seen, run.config, optim)
    recordings = held_out_recordings(chosen, TAPS, run.config, optim)
    params = {"target": run.frozen.target, "head": run.as_params(run.state.head)}
    found = evaluate(run.plans, params, recordings, SMALL["eval_tokens"])
    assert len(chosen) > 4 and found["tree"] >= found["chain"] > 1.5
    assert found["chain"] == pytest.approx(foreseen(run, recordings))


CONFIG = {
    "text": {
        "turns": 12,
        "turn_tokens": 12,
        "temperatures": [0.0, 0.9],
        "max_new_tokens": 20,
        "max_prompt_tokens": 40,
        "batch": 2,
        "shard": 3,
    },
    "head": {"kind": "eagle", "taps": [0, 1, 1], "block_size": 3, "draft_vocab_size": 40},
    "batch": {"texts": 2, "anchors": 4, "lengths": [32, 64]},
    "loss": {"kind": "fkl", "gamma": 4.48},
    "optim": {
        "steps": 4,
        "learning_rate": 3e-3,
        "eval_every": 2,
        "eval_texts": 1,
        "eval_tokens": 4,
        "eval_budget": 4,
        "held_out": 2,
    },
}


@pytest.mark.slow
def test_from_text_to_decoding_by_the_commands(tiny_model, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "keep_compilations", lambda: None)
    monkeypatch.setattr(run, "keep_compilations", lambda: None)
    ends = (EOS, *range(20, 28))  # many, so that short user turns come to an end
    folder = tmp_path / "target"
    folder.mkdir()
    write_target(folder, tiny_model, num_layers=2, eos_ids=ends)
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(CONFIG))
    places = ["--library", str(tmp_path / "library"), "--run", str(tmp_path / "run")]
    train = ["--config", str(tmp_path / "c.yaml"), "--target", str(folder), *places]
    assert command.main(train) == 0
    head = tmp_path / "run" / "head"
    first = {path.name: path.read_bytes() for path in head.iterdir()}
    shutil.rmtree(head)
    assert command.main([*train, "export"]) == 0
    assert {path.name: path.read_bytes() for path in head.iterdir()} == first
    card = (head / "README.md").read_text()
    for part in (
        "# An EAGLE-3 head for",
        "one layer drafts a token a pass; 2 passes were unrolled in training",
        "40 of the target's 64 tokens",
        "the embedding is the target's own",
        "(`eagle3`);",
        "with chains of 3 nodes",
    ):
        assert part in card
    assert "mask token" not in card
    # It is decoded with, by the method that suits it; another method refuses it.
    capsys.readouterr()
    argv = ["--target", str(folder), "--head", str(head), "--budget", "5", "--max-new-tokens", "8"]
    argv += ["--prompt", "HELLO", "A", "--json", str(tmp_path / "out.json")]
    assert run.main([*argv, "--depth", "2", "--width", "3"]) == 0
    report = json.loads((tmp_path / "out.json").read_text())
    assert (report["method"], report["depth"], report["width"]) == ("eagle3", 2, 3)
    assert report["summary"]["identical_to_ar"] == "2/2"
    assert report["summary"]["draft_passes"] > 0
    capsys.readouterr()
    assert run.main([*argv, "--method", "ddtree"]) == 2
    says = (
        "the head of ddtree must be a parallel one (JetSpec's, DFlash's or Domino's), this one is"
    )
    assert f"jspec: error: {says} one of EAGLE-3's\n" in capsys.readouterr().err
    # It is gone on from; a head of another kind is not.
    again = ["--init", str(head), "--run", str(tmp_path / "more"), "head", "export"]
    assert command.main([*train, *again]) == 0
    assert read_log(tmp_path / "more")[0]["step"] == 0
    capsys.readouterr()
    other = ["--head.kind", "parallel", "--head.mask_token", "<s>", "--head.num_layers", "1"]
    other += ["--run", str(tmp_path / "other")]
    assert command.main([*train, "--init", str(head), *other, "head"]) == 2
    assert "Domino's), it is one of EAGLE-3's" in capsys.readouterr().err
    few = ["--head.taps", "[]", "--run", str(tmp_path / "few")]
    assert command.main([*train, *few, "head"]) == 2
    assert "taps need a target of 5 layers or more, this one has 2" in capsys.readouterr().err
