"""``python -m jspec.thresholds`` and ``--graft on`` on a tiny target."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest
from tiny_target import write_target

import jspec
from jspec import run
from jspec.driver import decode_all
from jspec.methods import dflash, graft, jetspec
from jspec.models.transformer import fuse
from jspec.sampling import Sampling
from jspec.state import Plan
from jspec.thresholds import __main__ as command
from jspec.thresholds import store
from jspec.thresholds.measure import measure_rounds
from jspec.thresholds.search import forced
from jspec.thresholds.store import (
    Thresholds,
    Use,
    read_thresholds,
    ready_graft,
    use_of,
    write_thresholds,
)
from tests.drafters import by_level

PROMPTS = ["one two one two", "THREE", "1,2,1,2,1"]


@pytest.fixture(scope="module")
def folder(tiny_model, tmp_path_factory):
    return write_target(tmp_path_factory.mktemp("tiny"), tiny_model)


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """Where thresholds are kept."""
    monkeypatch.setattr(store, "cache_dir", lambda: tmp_path / "cache")
    for module in (run, command):
        monkeypatch.setattr(module, "keep_compilations", lambda: None)
    return tmp_path / "cache" / "graft"


@pytest.fixture
def asked(folder, tmp_path):
    """A command line that is quickly done."""
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in PROMPTS))
    argv = ["--target", str(folder), "--prompts", str(path), "--batch", "2", "--budget", "3"]
    return [*argv, "--method", "prompt_lookup", "--max-new-tokens", "12"]


def test_it_calibrates_keeps_and_decoding_uses_it(asked, kept, capsys, tmp_path):
    assert command.main(asked) == 0
    said = capsys.readouterr()
    assert said.err == ""
    [path] = kept.iterdir()
    assert str(path) in said.out and "tokens a round:" in said.out and "3 prompts" in said.out
    data = json.loads(path.read_text())
    assert data["use"]["method"] == "prompt_lookup" and data["use"]["place"] == "root"
    assert data["checkpoints"] == [0, 1, 5] and data["rounds"] > 5
    assert data["tokens"] >= data["unpruned"] >= 1
    found = read_thresholds(path, Use(**data["use"]))
    assert list(found.values) == data["values"]

    out = tmp_path / "out.json"
    reports = []
    for graft_too in ("on", "text", "off"):
        assert run.main([*asked, "--graft", graft_too, "--json", str(out)]) == 0
        assert f"graft {graft_too}" in capsys.readouterr().out
        reports.append(json.loads(out.read_text()))
    assert [report["graft"] for report in reports] == ["on", "text", "off"]
    assert {report["summary"]["identical_to_ar"] for report in reports} == {"3/3"}
    texts = [[one["tokens"] for one in report["results"]] for report in reports]
    assert texts[0] == texts[1] == texts[2]

    path.write_text(path.read_text().replace('"values"', '"valves"'))
    assert run.main([*asked, "--graft", "on"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "is damaged: it has 'valves': calibrate anew" in err


USE = Use("abc", None, "jetspec", "root", "table", 16, "depth 5, width 8", True)


def some(use):
    return Thresholds(use, (0, 1, 5), (0.4, 0.2, 0.0), 200, 4000, 2.5, 2.25)


def test_thresholds_are_written_whole_and_read_back(tmp_path):
    use, path = USE, tmp_path / "new" / "a.json"
    write_thresholds(path, some(use))
    assert read_thresholds(path, use) == some(use)
    assert [p.name for p in path.parent.iterdir()] == ["a.json"]
    with pytest.raises(ValueError, match="it is for another target, head, method or temperature"):
        read_thresholds(path, dataclasses.replace(use, head="0f"))
    with pytest.raises(ValueError, match="cannot read"):
        read_thresholds(tmp_path / "no.json", use)


WRONG = {
    r"thresholds must be in \[0, 1\], got 1.5": {"values": (0.4, 1.5, 0.0)},
    r"thresholds must be numbers in \[0, 1\], got None": {"values": (0.4, None, 0.0)},
    "thresholds must be 3, got 1": {"values": (0.4,)},
    "checkpoints must ascend from 0 or above": {"checkpoints": (0, 0, 5)},
    "checkpoints must be a whole number": {"checkpoints": (0, 1, 5.5)},
}


@pytest.mark.parametrize("says", WRONG)
def test_damaged_thresholds_are_one_line(tmp_path, says):
    use, path = USE, tmp_path / "a.json"
    write_thresholds(path, some(use))
    path.write_text(json.dumps(json.loads(path.read_text()) | WRONG[says]))
    with pytest.raises(ValueError, match=f"a.json is damaged: {says}.*: calibrate anew"):
        read_thresholds(path, use)


@pytest.mark.parametrize("text", ["", "[1]", "{", '{"format": 1}', "[" * 5000, "x" * (1 << 21)])
def test_what_is_no_file_of_thresholds(tmp_path, text):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ValueError, match=r"a.json is damaged: .*: calibrate anew") as error:
        read_thresholds(tmp_path / "a.json", USE)
    assert "\n" not in str(error.value)


def test_graft_with_what_was_calibrated(kept, folder):
    target = jspec.load(folder)
    config = jspec.config_for(target.config, mask_token_id=63, taps=(0,), block_size=6, causal=True)
    method = jetspec(config, 16)
    assert ready_graft(method, "abc", "0f") is graft(method)
    use = use_of(method, "abc", "0f", True)
    write_thresholds(store.thresholds_path(use), some(use))
    assert ready_graft(method, "abc", "0f") is graft(method, thresholds=(0.4, 0.2, 0.0))
    assert ready_graft(method, "abc", "0e") is graft(method)
    assert ready_graft(method, "abc", "0f", greedy=False) is graft(method)
    assert ready_graft(method, "abc", "0f", retrieve="text") is graft(method, retrieve="text")
    for other in (jetspec(config, 8), jetspec(config, 16, depth=3), jetspec(config, 16, width=2)):
        assert ready_graft(other, "abc", "0f") is graft(other)
    chain = dflash(config, 16)
    assert ready_graft(chain, "abc") is graft(chain, place="tail", leaves=1)


BAD = {
    "--max-new-tokens must be 1 or above": ["--max-new-tokens", "0"],
    "--method ar with a budget of 1 has no room": ["--method", "ar"],
    "cannot read prompts from no.jsonl": ["--prompts", "no.jsonl"],
    "exclude each other": ["--bench", "math"],
    "answers are too short to calibrate with": ["--max-new-tokens", "2"],
    "no method 'best'": ["--method", "best"],
}


@pytest.mark.parametrize("says", BAD)
def test_a_user_s_error_is_one_line(asked, kept, says, capsys):
    argv = [x for x in asked if x not in ("--budget", "3")] if "ar" in BAD[says] else asked
    assert command.main([*argv, *BAD[says]]) == 2
    err = capsys.readouterr().err
    assert err.startswith("jspec: error: ") and says in err and err.count("\n") == 1
    assert not kept.exists()


def test_rounds_are_what_forced_drafts_yield(tiny_model):
    """Of a level-by-level drafter: passes by where it stops, and a first round's tokens as decoding counts them."""
    config, params = tiny_model(vocab_size=9)
    params = {"target": fuse(config, params), "text": jnp.arange(300) % 9}
    drafter = by_level(6, 2, 0.6, 9)
    plan = Plan(config, graft(drafter, k=3), Sampling(0.7), buckets=())
    prompt, options = [1, 2, 3], {"max_new_tokens": 40, "seed": 5}
    limits = forced(3, 3)
    rounds = measure_rounds(plan, params, drafter, (0, 1, 5), limits, [prompt] * 2, **options)
    assert rounds.passes.tolist() == [1, 2, 6, 6]
    np.testing.assert_allclose(rounds.sure[0], 0.6 ** np.array([1, 2, 6]), rtol=1e-5)
    for stage, limit in enumerate(limits):
        forcing = params | {"graft": jnp.asarray(limit)}
        [one], _ = decode_all(plan, forcing, [prompt], **options)
        assert one.trace[0] == rounds.tokens[0, stage]
