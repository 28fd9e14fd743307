import dataclasses

import numpy as np
import pytest
from tiny_target import EOS, write_target

import jspec
from jspec.recording import text_taps
from jspec.state import Plan
from jspec.train.text import (
    PERIOD,
    REPEATED,
    TextConfig,
    keeper,
    loop_start,
    turn_opening,
    write_text,
)

TAPS = (0, 2)  # of a target with one layer, 1 is the final state
CONFIG = TextConfig(
    turns=5,
    systems=("", "BE BRIEF"),
    turn_tokens=12,
    temperatures=(0.0, 0.9),
    max_new_tokens=20,
    max_prompt_tokens=40,
    batch=2,
    shard=3,
)
GIVEN = [jspec.user_turn(str(i), text) for i, text in enumerate(["HELLO", "1+1?", "A" * 99])]


@pytest.fixture(scope="module")
def target(tiny_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    ends = (EOS, *range(20, 28))  # many, so that short user turns come to an end
    return jspec.load(write_target(folder, tiny_model, num_layers=2, eos_ids=ends))


def slow_loop_start(tokens):
    starts = [len(tokens)]
    for period in range(1, PERIOD + 1):
        starts += [
            at
            for at in range(period, len(tokens) - REPEATED + 1)
            if all(tokens[i] == tokens[i - period] for i in range(at, at + REPEATED))
        ]
    return min(starts)


@pytest.mark.parametrize("seed", range(40))
def test_loops_are_found(seed):
    rng = np.random.default_rng(seed)
    text = list(rng.integers(0, 3, rng.integers(0, 60)))
    unit = list(rng.integers(0, 50, rng.integers(1, PERIOD + 4)))
    text += unit * int(rng.integers(0, 40))
    text = np.asarray(text, np.int32)
    assert loop_start(text) == slow_loop_start(text)


def read(folder):
    files = sorted(folder.glob("t*/*"))
    assert not [f for f in files if f.suffix == ".part"]
    return {f.name: dict(np.load(f)) if f.suffix == ".npz" else np.load(f) for f in files}


def same(a, b):
    assert a.keys() == b.keys()
    for name, arrays in a.items():
        if name.endswith(".npy"):  # shapes of another batch round otherwise
            np.testing.assert_allclose(arrays, b[name], rtol=4e-3, atol=1e-3)
        else:
            np.testing.assert_equal(arrays, b[name])


def test_the_target_writes_its_text_and_keeps_its_states(target, tmp_path):
    folder = tmp_path / "whole"
    write_text(target, CONFIG, folder, TAPS, GIVEN)
    found = read(folder)
    plan = Plan(target.config, keeper(TAPS))
    texts = 0
    for name in sorted(n for n in found if n.endswith(".npz")):
        shard, taps = found[name], found[name.replace("npz", "npy")]
        assert len(taps) == (shard["lengths"] - 1).sum()
        tokens = np.split(shard["tokens"], np.cumsum(shard["lengths"])[:-1])
        states = np.split(taps, np.cumsum(shard["lengths"] - 1)[:-1])
        for text, kept, start in zip(tokens, states, shard["starts"], strict=True):
            assert start < len(text) <= start + CONFIG.max_new_tokens
            ours = text_taps(plan, {"target": target.params}, text.astype(np.int32), TAPS)
            np.testing.assert_allclose(kept, ours, rtol=2e-3, atol=2e-3)
            texts += 1
    assert texts > 2  # the two given prompts that are short enough, and turns of its own
    # Killed after any file, it goes on to the same end; in other batches it writes the same.
    for missing in ("text/00000.npz", "turns-00001.json"):
        other = tmp_path / missing.replace("/", "-")
        write_text(target, CONFIG, other, TAPS, GIVEN)
        (other / missing).unlink()
        config = dataclasses.replace(CONFIG, batch=3)
        write_text(target, config, other, TAPS, GIVEN)
        same(found, read(other))
    with pytest.raises(ValueError, match=r"another config \(seed differ\)"):
        write_text(target, dataclasses.replace(CONFIG, seed=4), folder, TAPS, GIVEN)


def test_the_opening_of_a_user_turn(target):
    for system, text in (("BE BRIEF", "<system>BE BRIEF<user>"), ("", "<user>")):
        ids = target.tokenizer.encode(text, add_special_tokens=False)
        assert turn_opening(target, system) == ids


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"turns": 0}, "turns"),
        ({"batch": 0}, "batch"),
        ({"systems": ()}, "systems"),
        ({"temperatures": (-1.0,)}, "temperature"),
    ],
)
def test_a_wrong_config_is_refused(wrong, says):
    with pytest.raises(ValueError, match=says):
        TextConfig(**wrong)
