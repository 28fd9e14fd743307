import json

import jax
import numpy as np
import pytest
from tiny_target import write_target

import jspec
from jspec.heads.config import Correction, config_for
from jspec.heads.parallel import with_draft_ids
from jspec.methods import ar, dartree, ddtree, dflash, domino
from jspec.recording import record
from jspec.state import Plan
from jspec.train.data import BatchConfig, Text, draft_vocabulary, split
from jspec.train.features import with_taps
from jspec.train.loop import Trainer
from jspec.train.losses import LossConfig
from jspec.train.optim import OptimConfig

TAPS = (0, 1, 2)  # the last is the final normed state
GAMMA = LossConfig(gamma=4.0)
OPTIM = OptimConfig(
    steps=6,
    learning_rate=3e-3,
    eval_every=2,
    eval_texts=2,
    eval_tokens=8,
    eval_budget=8,
    held_out=3,
)


@pytest.fixture(scope="module")
def target(tiny_model, tmp_path_factory):
    return jspec.load(write_target(tmp_path_factory.mktemp("tiny"), tiny_model, num_layers=2))


@pytest.fixture(scope="module")
def texts(target):
    """Greedy answers of the target, which soon go round in circles: easily learned."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 48, rng.integers(1, 6)).tolist() for _ in range(11)]
    params = {"target": target.params}
    plan = Plan(target.config, ar())
    recordings = record(plan, params, prompts, max_new_tokens=24, batch=11)
    bare = [Text(one.tokens, one.start, None) for one in recordings]
    made = with_taps(target.config, target.params, bare, TAPS)
    return [text._replace(taps=text.taps.astype(np.float16)) for text in made]


def trainer(
    target,
    texts,
    folder,
    loss=GAMMA,
    optim=OPTIM,
    vocab=None,
    causal=True,
    taps=TAPS,
    correction=None,
    shift_labels=False,
):
    config = config_for(
        target.config,
        mask_token_id=7,
        taps=(0, 1),
        block_size=4,
        causal=causal,
        draft_vocab_size=vocab,
        correction=correction,
        shift_labels=shift_labels,
    )
    ids = None if vocab is None else draft_vocabulary(texts, vocab, 64)
    tree, chain = (ddtree, dflash) if correction is None else (dartree, domino)
    plans = {
        "tree": Plan(target.config, tree(config, 8)),
        "chain": Plan(target.config, chain(config, config.depth + 1)),
    }
    train, held_out = split(texts, optim.held_out)
    return Trainer(
        target,
        config,
        train,
        held_out,
        taps,
        plans,
        folder,
        batch=BatchConfig(texts=2, anchors=4, lengths=(32,)),
        loss=loss,
        optim=optim,
        draft_ids=ids,
        as_params=lambda h: h if ids is None else with_draft_ids(h, target.params, ids),
    )


def log(folder):
    rows = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    timed = ("seconds", "slots_per_second")
    return [{k: v for k, v in row.items() if k not in timed} for row in rows]


def test_a_run_that_was_killed_ends_like_one_that_was_not(target, texts, tmp_path):
    whole = trainer(target, texts, tmp_path / "whole")
    whole.run()
    assert [row["step"] for row in log(tmp_path / "whole")] == [2, 4, 6]
    parts = trainer(target, texts, tmp_path / "parts")
    parts.run(until=2)
    # What a kill between two checkpoints leaves: log rows and steps that are made again.
    with (tmp_path / "parts" / "log.jsonl").open("a") as file:
        file.write(json.dumps(log(tmp_path / "parts")[0] | {"step": 4}) + "\n" + '{"step": 5, "lo')
    parts = trainer(target, texts, tmp_path / "parts")
    assert int(parts.state.step) == 2
    parts.run()
    assert log(tmp_path / "parts") == log(tmp_path / "whole")
    jax.tree.map(np.testing.assert_array_equal, parts.state, whole.state)
    jax.tree.map(np.testing.assert_array_equal, parts.best_head(), whole.best_head())
    best = max(row["tree"] for row in log(tmp_path / "whole"))
    assert float(whole.state.best) == pytest.approx(best)


@pytest.mark.parametrize(
    ("loss", "causal", "vocab"),
    [
        (LossConfig(), False, None),
        (LossConfig("fkl"), True, 30),
        (LossConfig("rkl", teacher_top_k=4), True, None),
        (LossConfig(dpace=0.5), True, 30),
    ],
    ids=str,
)
def test_every_loss_makes_a_head_that_foresees_the_target(
    target, texts, tmp_path, loss, causal, vocab
):
    steps = 120
    optim = OptimConfig(
        steps=steps,
        learning_rate=5e-3,
        eval_every=steps // 2,
        eval_texts=2,
        eval_tokens=8,
        eval_budget=8,
        held_out=2,
    )
    run = trainer(target, texts, tmp_path, loss, optim, vocab, causal)
    run.run()
    rows = log(tmp_path)
    assert rows[1]["loss"] < rows[0]["loss"]
    assert rows[1]["hits"][0] > 10 / 64  # ten times chance


CORRECTED = {"correction": Correction(gru_size=16, rank=12), "vocab": 30}


@pytest.mark.parametrize("causal", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_correction_is_trained_with_its_head_and_foresees_more_than_the_slots(
    target, texts, tmp_path, causal
):
    optim = OptimConfig(
        steps=160,
        learning_rate=5e-3,
        eval_every=80,
        eval_texts=2,
        eval_tokens=8,
        eval_budget=8,
        held_out=2,
    )
    options = CORRECTED | {"causal": causal, "shift_labels": not causal}
    run = trainer(target, texts, tmp_path, GAMMA, optim, **options)
    first = jax.tree.map(np.asarray, run.state.head["correction"])
    run.run()
    for name, weights in run.state.head["correction"].items():
        assert np.abs(weights - first[name]).max() > 1e-3, name
    rows = log(tmp_path)
    assert rows[1]["loss"] < rows[0]["loss"]
    assert len(rows[1]["hits"]) == run.config.depth == (3 if causal else 4)
    assert rows[1]["hits"][0] == rows[1]["base_hits"][0] > 10 / 64  # ten times chance
    assert sum(rows[1]["hits"]) > sum(rows[1]["base_hits"])


@pytest.mark.slow
def test_a_run_with_a_correction_that_was_killed_ends_like_one_that_was_not(
    target, texts, tmp_path
):
    whole = trainer(target, texts, tmp_path / "whole", **CORRECTED)
    whole.run()
    trainer(target, texts, tmp_path / "parts", **CORRECTED).run(until=2)
    parts = trainer(target, texts, tmp_path / "parts", **CORRECTED)
    assert int(parts.state.step) == 2
    parts.run()
    assert log(tmp_path / "parts") == log(tmp_path / "whole")
    jax.tree.map(np.testing.assert_array_equal, parts.state, whole.state)


def test_text_that_is_too_short_is_refused(target, texts, tmp_path):
    short = [text._replace(tokens=text.tokens[: text.start + 4]) for text in texts]
    with pytest.raises(ValueError, match="no held-out answer has the 11 tokens"):
        trainer(target, short, tmp_path)
    with pytest.raises(ValueError, match="held_out must be below the 2 texts"):
        trainer(target, texts[:2], tmp_path)


def test_states_that_were_not_kept_are_made_while_training(target, texts, tmp_path):
    bare = [text._replace(taps=None) for text in texts]
    kept = [text._replace(taps=np.asarray(text.taps, np.float32)) for text in texts]
    for loss in (LossConfig(), LossConfig("fkl")):
        runs = []
        for name, given, taps in (("kept", kept, TAPS), ("bare", bare, ())):
            run = trainer(target, given, tmp_path / f"{loss.kind}-{name}", loss, taps=taps)
            run.run(until=2)
            runs.append(log(tmp_path / f"{loss.kind}-{name}")[0])
        assert runs[0]["loss"] == pytest.approx(runs[1]["loss"], rel=1e-2)  # kept in fp16 once


def test_a_library_that_lacks_a_state_is_refused(target, texts, tmp_path):
    few = [text._replace(taps=text.taps[:, :2]) for text in texts]
    with pytest.raises(ValueError, match="needs the target's final states kept"):
        trainer(target, few, tmp_path / "a", LossConfig("fkl"), taps=(0, 1))
    with pytest.raises(ValueError, match="does not keep tap 1"):
        trainer(target, few, tmp_path / "b", taps=(0, 2))
