"""``python -m jspec.train``: the stages, runs that are killed, and what is refused."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
import yaml
from safetensors.flax import load_file, save_file
from tiny_target import EOS, write_target

import jspec
from jspec import files as files_module
from jspec import run
from jspec.train import __main__ as command
from jspec.train.lock import only_one
from jspec.train.log import read_log
from jspec.train.loop import Trainer
from jspec.train.options import TrainOptions, parse

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
    "head": {"mask_token": "<s>", "taps": [0, 1], "block_size": 3, "num_layers": 1},
    "batch": {"texts": 2, "anchors": 4, "lengths": [32, 64]},
    "optim": {
        "steps": 6,
        "learning_rate": 3e-3,
        "eval_every": 2,
        "eval_texts": 1,
        "eval_tokens": 4,
        "eval_budget": 4,
        "held_out": 2,
    },
}


@pytest.fixture(scope="module")
def target(tiny_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    ends = (EOS, *range(20, 28))  # many, so that short user turns come to an end
    return write_target(folder, tiny_model, num_layers=2, eos_ids=ends)


@pytest.fixture(autouse=True)
def no_cache_of_compilations(monkeypatch):
    monkeypatch.setattr(command, "keep_compilations", lambda: None)
    monkeypatch.setattr(run, "keep_compilations", lambda: None)


def arguments(folder, target, *argv, config=CONFIG):
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    places = ["--library", str(folder / "library"), "--run", str(folder / "run")]
    return ["--config", str(path), "--target", str(target), *places, *argv]


def files(folder):
    """What must be the same however often a run was stopped."""
    log = [{k: v for k, v in row.items() if "second" not in k} for row in read_log(folder / "run")]
    head = [folder / "run" / "head" / name for name in ("config.json", "model.safetensors")]
    kept = [*(folder / "library").rglob("*.*"), *head]
    return log, {str(path.relative_to(folder)): path.read_bytes() for path in kept}


def everything(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def made(target, tmp_path_factory):
    """A whole run, which tests must leave as it is."""
    folder = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "keep_compilations", lambda: None)
        assert command.main(arguments(folder, target)) == 0
    return folder


@pytest.fixture
def copy(made, tmp_path):
    """A copy of it."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    return tmp_path


def test_stages_apart_are_stages_together(made, target, tmp_path):
    for stage in ("text", "head", "export"):
        assert command.main(arguments(tmp_path, target, stage)) == 0
    assert files(tmp_path) == files(made)
    assert [row["step"] for row in files(made)[0]] == [2, 4, 6]
    # All is there: nothing is made again, and the same head is exported.
    before = everything(tmp_path)
    stamps = {path: path.stat().st_mtime_ns for path in (tmp_path / "library").rglob("*.*")}
    assert command.main(arguments(tmp_path, target)) == 0
    assert everything(tmp_path) == before
    assert {path: path.stat().st_mtime_ns for path in stamps} == stamps


def test_a_run_that_is_stopped_between_two_checkpoints(made, target, tmp_path, monkeypatch):
    shutil.copytree(made / "library", tmp_path / "library")
    save = Trainer._save

    def stopped(self, manager, step):
        if manager is self._last:
            raise KeyboardInterrupt
        save(self, manager, step)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_save", stopped)
        assert command.main(arguments(tmp_path, target)) == 130
    assert os.listdir(tmp_path / "run" / "best") == ["2"]
    assert os.listdir(tmp_path / "run" / "last") == []
    assert command.main(arguments(tmp_path, target)) == 0
    assert files(tmp_path) == files(made)


def test_a_trained_head_is_decoded_with(made, target, tmp_path, capsys):
    argv = ["--target", str(target), "--method", "jetspec", "--head", str(made / "run" / "head")]
    small = ["--budget", "3", "--max-new-tokens", "8", "--prompt", "HELLO", "A"]
    assert run.main([*argv, *small, "--json", str(tmp_path / "out.json")]) == 0
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["summary"]["identical_to_ar"] == "2/2"
    assert report["summary"]["draft_passes"] > 0
    assert "identical to ar" in capsys.readouterr().out


def test_the_card_says_what_the_run_was(made, target):
    card = (made / "run" / "head" / "README.md").read_text()
    loaded = jspec.load(target)
    head = jspec.load_head(made / "run" / "head", loaded)
    size = sum(x.size for x in jax.tree.leaves(head.params))
    rows = read_log(made / "run")
    best = max(rows, key=lambda row: row["tree"])  # the first of the best ones
    for part in (
        "# A JetSpec head for",
        loaded.fingerprint,
        f"{size:,} in bfloat16",
        "64 of the target's 64 tokens",
        "`<s>`, id 61",
        "layers 0, 1 of the target's 2",
        "| turns | 12 |",
        "| temperatures | 0.0, 0.9 |",
        f"these are the weights of step {best['step']} |",
        "kind ce, gamma 0.0",
        "learning_rate 0.003",
        f"- {best['tree']:.3f} with the best trees of 4 nodes",
        f"- {best['chain']:.3f} with chains of 3 nodes",
        "tokens of answers, written by the target:",
    ):
        assert part in card
    shards = [np.load(path) for path in (made / "library" / "text").glob("*.npz")]
    texts = sum(len(shard["lengths"]) for shard in shards)
    said = int(card.split(" texts with ")[0].rsplit("\n", 1)[1])
    assert 0 < said <= texts - CONFIG["optim"]["held_out"]


def test_a_head_that_goes_on_from_another(made, target, tmp_path, capsys):
    first = made / "run" / "head"
    shutil.copytree(made / "library", tmp_path / "library")
    # At this rate the weights stay where they began.
    argv = ["--init", str(first), "--optim.learning_rate", "1e-9", "head", "export"]
    other_block = ["--head.block_size", "4", "--head.causal", "false"]
    assert command.main(arguments(tmp_path, target, *argv, *other_block)) == 0
    rows = (tmp_path / "run" / "log.jsonl").read_text().splitlines()
    assert json.loads(rows[0])["step"] == 0  # the head as it was
    before, after = (load_file(x / "model.safetensors") for x in (first, tmp_path / "run" / "head"))
    assert before.keys() == after.keys()
    for name in before:
        np.testing.assert_allclose(after[name], before[name], atol=1e-6)
    assert json.loads((tmp_path / "run" / "config.json").read_text())["init"] != str(first)
    assert "goes on from" in (tmp_path / "run" / "head" / "README.md").read_text()
    capsys.readouterr()
    # Another head in its place is another config, whatever its folder is called.
    shutil.rmtree(tmp_path / "run" / "head")
    shutil.copytree(first, tmp_path / "first")
    weights = load_file(first / "model.safetensors")
    save_file(
        {name: x * 2 for name, x in weights.items()}, tmp_path / "first" / "model.safetensors"
    )
    argv[1] = str(tmp_path / "first")
    says = "run holds a run of another config (init differ)"
    assert_refused(capsys, arguments(tmp_path, target, *argv, *other_block), says)


@pytest.mark.slow
def test_a_correction_added_to_a_head(made, target, tmp_path, capsys):
    """It goes on from one that has none, and changes nothing yet; what comes of it is decoded with."""
    first, argv = made / "run" / "head", ["--head.correction_rank", "4", "--head.gru_size", "8"]
    shutil.copytree(made / "library", tmp_path / "library")
    still = ["--init", str(first), "--optim.learning_rate", "1e-9", "head", "export"]
    assert command.main(arguments(tmp_path, target, *argv, *still)) == 0
    head = tmp_path / "run" / "head"
    before, after = (load_file(x / "model.safetensors") for x in (first, head))
    assert set(after) - set(before) == {
        "prefix_gru.weight_ih_l0",
        "prefix_gru.weight_hh_l0",
        "embed_proj.0.weight",
        "embed_proj.2.weight",
    }
    for name in before:
        np.testing.assert_allclose(after[name], before[name], atol=1e-6)
    np.testing.assert_allclose(after["embed_proj.2.weight"], 0, atol=1e-6)
    rows = read_log(tmp_path / "run")
    assert rows[1]["hits"] == rows[1]["base_hits"]
    assert "a GRU of width 8 and a projection of rank 4" in (head / "README.md").read_text()
    capsys.readouterr()
    small = ["--budget", "5", "--max-new-tokens", "8", "--prompt", "HELLO"]
    argv = ["--target", str(target), "--head", str(head), *small]
    assert run.main([*argv, "--json", str(tmp_path / "out.json")]) == 0
    report = json.loads((tmp_path / "out.json").read_text())
    assert (report["method"], report["summary"]["identical_to_ar"]) == ("dartree", "1/1")


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--init", "nowhere"], "no head 'nowhere'"),
        (["--head.num_layers", "2"], "has head.num_layers 1, not 2"),
        (["--head.taps", "[1]"], "has head.taps (0, 1), not (1,)"),
        (["--head.draft_vocab_size", "9"], "has head.draft_vocab_size None, not 9"),
        (["--head.shift_labels", "true"], "has head.shift_labels False, not True"),
        (["--init", "smollm2-135m-jetspec"], "made for a target of hidden_size 576"),
    ],
)
def test_a_head_that_cannot_be_gone_on_from(made, target, tmp_path, capsys, argv, says):
    shutil.copytree(made / "library", tmp_path / "library")
    init = ["--init", str(made / "run" / "head")]
    for stage in ("head", "text"):
        assert_refused(capsys, arguments(tmp_path, target, *init, *argv, stage), says)
    assert not (tmp_path / "run").exists()


def test_what_is_refused_can_be_corrected(made, target, tmp_path, capsys):
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": "HELLO"}))
    text = ["--text.turns", "0", "--text.prompts", str(tmp_path / "p.jsonl"), "text"]
    short = ["--text.max_prompt_tokens", "1"]
    assert_refused(capsys, arguments(tmp_path, target, *short, *text), "there is nothing to answer")
    assert command.main(arguments(tmp_path, target, "--text.max_prompt_tokens", "40", *text)) == 0
    shutil.rmtree(tmp_path / "library")
    shutil.copytree(made / "library", tmp_path / "library")
    capsys.readouterr()
    says = "held_out must be below"
    many = ["--optim.held_out", "999", "head"]
    assert_refused(capsys, arguments(tmp_path, target, *many), says)
    assert command.main(arguments(tmp_path, target, "head")) == 0


def test_a_kl_loss_without_its_teacher_is_refused_before_text_is_written(target, tmp_path, capsys):
    argv = arguments(tmp_path, target, "--loss.kind", "fkl", "--teacher", "false")
    assert_refused(capsys, argv, "teacher must be true for a fkl loss")
    assert os.listdir(tmp_path) == ["config.yaml"]


def test_prompts_that_no_context_holds_are_left_out(target, tmp_path):
    rows = [{"prompt": "A" * 9999}, {"prompt": "HELLO"}]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, rows)))
    argv = ["--text.turns", "0", "--text.prompts", str(tmp_path / "p.jsonl"), "text"]
    assert command.main(arguments(tmp_path, target, "--text.max_prompt_tokens", "40", *argv)) == 0
    with np.load(tmp_path / "library" / "text" / "00000.npz") as shard:
        assert len(shard["starts"]) == 1


def test_prompts_as_long_as_a_batch_are_not_trained_on(copy, target, capsys):
    argv = arguments(copy, target, "--run", str(copy / "new"), "--batch.lengths", "[3]", "head")
    assert_refused(capsys, argv, "batch.lengths ends at 3: every prompt is as long, or longer")


def test_states_that_are_no_numbers_are_blamed_on_the_library(copy, target, capsys):
    for path in (copy / "library" / "taps").glob("*.npy"):
        np.save(path, np.full_like(np.load(path), np.nan))
    argv = arguments(copy, target, "--run", str(copy / "new"), "head")
    assert command.main(argv) == 2
    assert "the library's taps are damaged" in capsys.readouterr().err


def test_a_loss_that_is_no_number_ends_a_run(copy, target, capsys):
    argv = ["--run", str(copy / "new"), "--optim.learning_rate", "1e30", "head"]
    assert command.main(arguments(copy, target, *argv)) == 2
    assert "try a lower optim.learning_rate" in capsys.readouterr().err
    assert "NaN" not in (copy / "new" / "log.jsonl").read_text()


def test_an_export_writes_no_more_than_a_head(copy, target, capsys):
    with (copy / "run" / "log.jsonl").open("a") as log:  # what a run under way is about to keep
        log.write('{"step": 999, "tree": 1.0, "chain": 1.0}\n')
    log = (copy / "run" / "log.jsonl").read_text()
    assert command.main(arguments(copy, target, "export")) == 0
    assert (copy / "run" / "log.jsonl").read_text() == log
    capsys.readouterr()
    argv = arguments(copy, target, "--run", str(copy / "typo"), "export")
    assert_refused(capsys, argv, "typo has no checkpoint yet")
    assert not (copy / "typo").exists()


def test_a_run_in_use_is_refused(copy, target, capsys):
    with only_one(copy / "run"):
        assert command.main(arguments(copy, target, "head")) == 2
    assert "run is being written by another process" in capsys.readouterr().err
    with only_one(copy / "library"):
        assert_refused(capsys, arguments(copy, target, "text"), "library is being written by")


def test_a_path_that_orbax_takes_for_a_pattern(made, target, tmp_path, capsys):
    argv = arguments(tmp_path, target, "--run", str(tmp_path / "run[1]"))
    assert_refused(capsys, argv, "has a '[' in its path")
    assert os.listdir(tmp_path) == ["config.yaml"]


def test_a_worse_head_is_not_exported(made, target, tmp_path, monkeypatch, capsys):
    def worse(self):
        none = {"chain": 1.0, "tree_by_depth": [0.0], "chain_by_depth": [0.0]}
        return {"tree": 2 - int(self.state.step) / 10} | none

    monkeypatch.setattr(Trainer, "evaluate", worse)
    shutil.copytree(made / "library", tmp_path / "library")
    first = made / "run" / "head"
    wild = ["--init", str(first), "--optim.learning_rate", "9.0", "head", "export"]
    assert command.main(arguments(tmp_path, target, *wild)) == 0
    assert "No step was better than the head it goes on from" in capsys.readouterr().out
    before, after = (load_file(x / "model.safetensors") for x in (first, tmp_path / "run" / "head"))
    assert all((before[name] == after[name]).all() for name in before)


def test_prompts_from_a_file_are_answered(target, tmp_path):
    lines = [{"prompt": f"WHAT IS {i}?"} for i in range(5)]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, lines)))
    argv = ["--text.turns", "0", "--text.prompts", str(tmp_path / "p.jsonl"), "text"]
    assert command.main(arguments(tmp_path, target, *argv)) == 0
    assert not list((tmp_path / "library").glob("turns*"))
    shards = [np.load(path) for path in (tmp_path / "library" / "text").glob("*.npz")]
    assert sorted(np.concatenate([shard["prompts"] for shard in shards])) == [*range(5)]


# What is refused.


def assert_refused(capsys, argv, *says):
    assert command.main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("jspec: error: ") and err.count("\n") == 1 and err.endswith("\n")
    for part in says:
        assert part in err


OPTIONS = {
    "an unknown key": ({"bugdet": 3}, "bugdet"),
    "an unknown key of a group": (
        {"optim": {"stepz": 3}},
        "'optim' does not accept option 'stepz'",
    ),
    "a word for a number": (
        {"optim": {"steps": "many"}},
        "--optim.steps: expected a whole number, got many",
    ),
    "a number for a list": ({"head": {"taps": 3}}, "--head.taps: expected a list, got 3"),
    "a number for a text": ({"text": {"prompts": 3}}, "--text.prompts: expected text, got 3"),
    "a number for a switch": ({"keep_taps": 3}, "--keep_taps: expected on or off, got 3"),
    "a number for a group": ({"optim": 3}, "--optim must be a mapping of options, got 3"),
    "nothing for a number": ({"text": {"seed": None}}, "--text.seed must not be null"),
    "nothing for a name": ({"target": None}, "--target must not be null"),
    "an unknown loss": ({"loss": {"kind": "mse"}}, "--loss.kind: expected one of ce, fkl, rkl"),
    "an endless rate": ({"optim": {"learning_rate": float("inf")}}, "learning_rate must be finite"),
    "a tree of one node": (
        {"optim": {"eval_budget": 1}},
        "--optim.eval_budget must be 2 or above, got 1",
    ),
    "a seed below 0": ({"batch": {"seed": -1}}, "--batch.seed must be in 0.."),
    "a large seed": ({"text": {"seed": 1 << 40}}, "--text.seed must be in 0.."),
    "a run without a name": ({"run": ""}, "run must not be empty"),
    "a correction of rank 0": (
        {"head": {"correction_rank": 0}},
        "the correction's rank must be in 1..",
    ),
    "a decay beyond the run": ({"loss": {"base_decay": 2.0}}, "base_decay must be in [0, 1]"),
    "a correction with D-PACE": (
        {"head": {"correction_rank": 4}, "loss": {"dpace": 0.5}},
        "loss.dpace must be off (null) for a head with a correction",
    ),
    "a list": ([1], "config"),
    "a stage": ({"stages": ["text"]}, "'stages' is not accepted"),
    "a stage by its name": ({"STAGE": ["text"]}, "STAGE belongs on the command line"),
}


@pytest.mark.parametrize(("config", "says"), OPTIONS.values(), ids=OPTIONS)
def test_a_wrong_config_file_is_one_line(tmp_path, monkeypatch, capsys, config, says):
    monkeypatch.chdir(tmp_path)
    Path("c.yaml").write_text(yaml.safe_dump(config))
    assert_refused(capsys, ["--config", "c.yaml"], says)
    assert os.listdir() == ["c.yaml"]


NO_HEAD = {
    "a tap too high": (["--head.taps", "[0, 2]"], "taps must be target layers 0..1, got 2"),
    "a tap below 0": (["--head.taps", "[-1]"], "taps must be target layers 0..1, got -1"),
    "an unknown mask token": (
        ["--head.mask_token", "<mask>"],
        "head.mask_token: the target's tokenizer has no token '<mask>'",
    ),
    "too large a draft vocabulary": (
        ["--head.draft_vocab_size", "65"],
        "draft_vocab_size must be in 1..64, got 65",
    ),
    "no further text": (["--also=[no/such]"], "also: no/such is no library of text"),
    "no target": (["--target", "nowhere"], "no target 'nowhere'"),
    "no stage": (["heads"], "no stage 'heads': there are text, head, export"),
    "no prompts": (["--text.prompts", "config.yaml/x"], "cannot read prompts from config.yaml/x"),
}


@pytest.mark.parametrize(("argv", "says"), NO_HEAD.values(), ids=NO_HEAD)
def test_what_cannot_be_is_refused_before_text_is_written(target, tmp_path, capsys, argv, says):
    assert_refused(capsys, arguments(tmp_path, target, *argv), says)
    assert os.listdir(tmp_path) == ["config.yaml"]


@pytest.mark.parametrize("place", ["library", "run"])
def test_a_file_in_a_folder_s_place(target, tmp_path, capsys, place):
    (tmp_path / place).write_text("mine")
    assert_refused(capsys, arguments(tmp_path, target), f"{place} must be a folder, ", "is a file")
    assert (tmp_path / place).read_text() == "mine"
    assert sorted(os.listdir(tmp_path)) == sorted(["config.yaml", place])


def test_an_empty_file_of_prompts(target, tmp_path, capsys):
    (tmp_path / "p.jsonl").write_text("\n")
    argv = ["--text.turns", "0", "--text.prompts", str(tmp_path / "p.jsonl")]
    assert_refused(capsys, arguments(tmp_path, target, *argv), "p.jsonl has no prompts")
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": "A" * 99}))
    assert_refused(capsys, arguments(tmp_path, target, *argv), "there is nothing to answer", "(12)")


def test_a_library_with_nothing_to_learn(copy, target, capsys):
    for path in (copy / "library" / "text").glob("*"):
        with np.load(path) as shard:
            arrays = dict(shard)
        # Answers of one token: the texts end right after it.
        arrays["starts"] = arrays["lengths"] - 1
        np.savez(path, **arrays)
    says = "has no text of two tokens or more to train on"
    assert_refused(capsys, arguments(copy, target, "head"), says)
    shutil.rmtree(copy / "library" / "text")
    assert_refused(capsys, arguments(copy, target, "head"), says)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["text", "--text.seed", "1"], "library holds text of another config (seed differ)"),
        (["head", "--optim.steps", "8"], "run holds a run of another config (optim.steps differ)"),
        (
            ["export", "--head.causal", "false"],
            "run holds a run of another config (head.causal differ)",
        ),
    ],
)
def test_another_config_is_not_gone_on_with(copy, target, capsys, argv, says):
    before = everything(copy)
    assert_refused(capsys, arguments(copy, target, *argv), says)
    assert everything(copy) == before


def test_a_run_in_another_process_keeps_its_record(copy, target, capsys):
    """Before its first checkpoint the record alone says whose run it is."""
    shutil.rmtree(copy / "run" / "last")
    shutil.rmtree(copy / "run" / "best")
    before = everything(copy)
    with only_one(copy / "run"):
        argv = arguments(copy, target, "head", "--optim.learning_rate", "0.5")
        assert_refused(capsys, argv, "run is being written by another process")
    assert everything(copy) == before


def test_a_run_without_its_record(copy, target, capsys):
    (copy / "run" / "config.json").unlink()
    before = everything(copy)
    for stage in ("head", "export"):
        argv = arguments(copy, target, stage, "--optim.learning_rate", "0.5")
        assert_refused(capsys, argv, "run has checkpoints, but has lost its config.json")
    assert everything(copy) == before


@pytest.mark.parametrize("name", ["last", "best"])
def test_checkpoints_that_cannot_be_put_into_their_folder(copy, target, capsys, name):
    run = copy / "new"
    run.mkdir()
    (run / name).touch()
    argv = arguments(copy, target, "--run", str(run), "head")
    assert_refused(capsys, argv, f"{name} is no folder that can be written")


def test_a_full_disk_is_told_before_a_checkpoint_is_begun(copy, target, capsys, monkeypatch):
    usage = shutil.disk_usage(copy)._replace(free=2 << 10)
    monkeypatch.setattr(files_module.shutil, "disk_usage", lambda path: usage)
    run = copy / "new"
    assert command.main(arguments(copy, target, "--run", str(run), "head")) == 2
    assert " KB, and its disk has 2 left" in capsys.readouterr().err
    monkeypatch.undo()
    monkeypatch.setattr(command, "keep_compilations", lambda: None)
    assert command.main(arguments(copy, target, "--run", str(run), "head", "export")) == 0
    ours, theirs = (path / "head" / "model.safetensors" for path in (run, copy / "run"))
    assert ours.read_bytes() == theirs.read_bytes()


def test_what_a_kill_left_beside_the_best_checkpoint_goes(copy, target):
    best = copy / "run" / "best"
    (step,) = best.iterdir()
    shutil.copytree(step, best / "1")
    shutil.rmtree(copy / "run" / "last" / "6")
    assert command.main(arguments(copy, target, "head")) == 0
    assert "1" not in [path.name for path in best.iterdir()]


def test_an_export_reads_the_best_checkpoint_alone(copy, target):
    """A run under way may be replacing the last one."""
    (last,) = (copy / "run" / "last").iterdir()
    for path in last.rglob("*"):
        if path.is_file():
            path.write_bytes(b"")
    assert command.main(arguments(copy, target, "export")) == 0


def test_a_mask_that_stands_in_the_text_is_told(copy, target, capsys):
    """The tiny target says everything, its mask token too."""
    tokens = [np.load(path)["tokens"] for path in (copy / "library" / "text").glob("*.npz")]
    mask = json.loads((copy / "run" / "head" / "config.json").read_text())["dflash_config"]
    times = sum((one == mask["mask_token_id"]).sum() for one in tokens)
    assert command.main(arguments(copy, target, "export")) == 0
    told = "head.mask_token: '<s>' stands in the text" in capsys.readouterr().err
    assert told == bool(times)


def test_turns_that_did_not_come_to_an_end_are_counted(copy, target, capsys):
    turns = [json.loads(path.read_text()) for path in (copy / "library").glob("turns-*.json")]
    count = len({text for some in turns for text in some})
    assert command.main(arguments(copy, target, "text")) == 0
    assert f"{count} of 12 user turns came to an end" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["5", "[1, 2]", '{"a": 1}', '"abc"', "[[]]"])
def test_turns_that_are_no_texts(copy, target, capsys, content):
    (copy / "library" / "turns-00000.json").write_text(content)
    argv = arguments(copy, target, "text")
    assert_refused(capsys, argv, "turns-00000.json does not hold a list of texts")


def test_a_library_without_its_record(copy, target, capsys):
    (copy / "library" / "text.json").unlink()
    before = everything(copy)
    assert_refused(capsys, arguments(copy, target, "text"), "library has lost its text.json")
    assert everything(copy) == before


def test_another_target_is_not_gone_on_with(copy, tiny_model, tmp_path_factory, capsys):
    folder = tmp_path_factory.mktemp("other")
    other = write_target(folder, tiny_model, num_layers=2, seed=1)
    before = everything(copy)
    assert_refused(capsys, arguments(copy, other, "text"), "(target differ)")
    assert_refused(capsys, arguments(copy, other, "head"), "target")
    assert {path: data for path, data in everything(copy).items() if path in before} == before


@pytest.mark.parametrize(
    ("stage", "pattern"),
    [
        ("text", "library/text.json"),
        ("text", "library/turns-00001.json"),
        ("head", "library/text/00001.npz"),
        ("head", "library/taps/00001.npy"),
        ("head", "run/config.json"),
        ("head", "run/last/*/default/manifest.ocdbt"),
        ("export", "run/best/*/default/_METADATA"),
    ],
)
@pytest.mark.parametrize("part", [0, 0.5])
def test_a_damaged_file_is_named(copy, target, capsys, stage, pattern, part):
    (path,) = copy.glob(pattern)
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * part)])
    before = everything(copy)
    name = path.parent if "default" in pattern else path
    while name.name == "default":
        name = name.parent
    assert_refused(capsys, arguments(copy, target, stage), f"{name} cannot be read: ")
    after = everything(copy)
    assert {path: after[path] for path in before} == before


def test_a_log_cut_short_is_no_error(copy, made, target):
    path = copy / "run" / "log.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:2]) + lines[2][:20])
    shutil.rmtree(copy / "run" / "head")
    assert command.main(arguments(copy, target, "head", "export")) == 0
    assert path.read_text() == "".join(lines[:2])
    assert files(copy)[1] == files(made)[1]


# From outside.

# Kills itself at the n-th change of a file below a folder.
FRAGILE = """
import os, signal, sys
folder, left = sys.argv.pop(1), int(sys.argv.pop(1))
def hook(event, args):
    global left
    writes = event == "open" and isinstance(args[1], str) and set(args[1]) & set("wa+x")
    if writes or event in ("os.rename", "os.mkdir", "os.rmdir", "shutil.rmtree"):
        if str(args[0]).startswith(folder):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(hook)
from jspec.train.__main__ import main
sys.exit(main())
"""


def start(cache, *run):
    env = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")}
    return subprocess.Popen(
        [sys.executable, *run],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=env | {"JSPEC_CACHE": str(cache)},
    )


@pytest.mark.slow
def test_a_run_that_is_killed_again_and_again_ends_the_same(target, tmp_path):
    cache, whole = tmp_path / "cache", tmp_path / "whole"
    whole.mkdir()
    longer = CONFIG | {"optim": CONFIG["optim"] | {"steps": 12}}
    process = start(cache, "-m", "jspec.train", *arguments(whole, target, config=longer))
    _, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    rng = random.Random(0)
    for after in ("changes", "changes", "seconds"):
        folder = tmp_path / f"{after}-{rng.random()}"
        folder.mkdir()
        argv = arguments(folder, target, config=longer)
        killed = 0
        while True:
            # At first in the text, whose changes are fewer; towards the end hardly ever.
            left = rng.randrange(3, 40) if after == "changes" else 0
            process = start(cache, "-c", FRAGILE, str(folder), str(left), *argv)
            if after == "seconds" and killed < 6:
                time.sleep(rng.uniform(3, 12))
                process.send_signal(signal.SIGKILL)
            _, err = process.communicate(timeout=600)
            if process.returncode == 0:
                break
            assert process.returncode == -signal.SIGKILL, err
            killed += 1
        assert killed
        assert files(folder) == files(whole)


def test_the_module_is_a_command(tmp_path):
    process = start(tmp_path, "-m", "jspec.train", "--optim.steps", "0")
    _, err = process.communicate(timeout=120)
    assert process.returncode == 2
    assert err == "jspec: error: --optim.steps must be 1 or above, got 0\n"


def test_what_print_config_prints_is_a_config(tmp_path, capsys):
    given = ["--optim.steps=7", "--text.max-new-tokens", "9"]
    with pytest.raises(SystemExit):
        parse([*given, "--print_config"])
    path = tmp_path / "all.yaml"
    path.write_text(capsys.readouterr().out)
    assert parse(["--config", str(path), "head"]) == (parse(given)[0], ("head",))


@pytest.mark.parametrize("path", sorted(Path("configs/train").glob("*.yaml")), ids=lambda p: p.stem)
def test_committed_configs(path):
    options, stages = parse(["--config", str(path)])
    assert options != TrainOptions() and len(stages) == 3
