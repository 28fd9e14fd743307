"""More than one device. What needs eight runs in a process of its own, which the last test starts."""

import dataclasses
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from tiny_target import write_target

import jspec
from jspec import run
from jspec.checkpoint import load_head, save_head
from jspec.decode import advance, generate
from jspec.driver import decode_all, outcome, run_verify
from jspec.heads.config import config_for
from jspec.heads.eagle import init_head as init_eagle
from jspec.heads.eagle import with_draft_ids as with_eagle_ids
from jspec.heads.eagle_config import eagle_config_for
from jspec.heads.parallel import init_head, with_draft_ids
from jspec.mesh import MODEL, make_mesh, mesh_under, param_shardings, parse_mesh, shard_params
from jspec.methods import ar, ddtree, eagle3, graft, jetspec, prompt_lookup, token_recycling
from jspec.prefill import admit_each
from jspec.recording import record, replay
from jspec.report import bucket_histogram
from jspec.sampling import Sampling, top_k
from jspec.state import Plan, new_state
from jspec.train import __main__ as command
from jspec.train.data import BatchConfig, Text, draft_vocabulary, split
from jspec.train.log import read_log
from jspec.train.loop import Trainer, train_step
from jspec.train.losses import LossConfig
from jspec.train.optim import OptimConfig
from jspec.train.options import parse
from jspec.tree import root_only
from tests import test_equality as equality
from tests.train import test_command as training

DEVICES = 8
eight = pytest.mark.skipif(jax.device_count() < DEVICES, reason="runs in a process of its own")

LENGTHS = (9, 1, 33, 2, 30, 23, 5, 12, 31, 3)  # of prompts: more than slots
NEW = 16
BUCKETS = (4,)  # and one that holds everything
SAMPLINGS = {"greedy": Sampling(), "top-p": Sampling(temperature=0.8, top_p=0.95)}
MESHES = {(8, 1): 8, (2, 4): 6, (1, 3): 3}  # and a batch


@pytest.fixture(scope="module")
def tiny(tiny_model):
    """``tiny(kv_heads) -> (config, params)``: a target that divides by so many, and a head."""

    def make(kv_heads):
        config, params = tiny_model(
            num_heads=2 * kv_heads, num_kv_heads=kv_heads, vocab_size=64, eos_ids=(7,)
        )
        return config, equality.with_head(config, params)

    return make


def make(factory, config):
    return ar() if factory is ar else equality.make(factory, config, 12)


def prompts(vocab=64, lengths=LENGTHS):
    rng = np.random.default_rng(0)
    return [rng.integers(0, vocab, n).tolist() for n in lengths]


def texts(plan, params, batch, **options):
    options = {"max_new_tokens": NEW, "capacity": 128, "seed": 3} | options
    done, run = decode_all(plan, params, prompts(), batch=batch, **options)
    return [one.tokens for one in done], run


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("data=2,model=4", (2, 4)),
        ("model=3", (1, 3)),
        (" data = 8 ", (8, 1)),
        ("model=2,data=1", (1, 2)),
    ],
)
def test_a_mesh_is_parsed(text, sizes):
    assert parse_mesh(text) == sizes


@pytest.mark.parametrize(
    "text", ["", "2x4", "data=0", "data=2,data=2", "data=2,heads=4", "data=-1", "data=2;"]
)
def test_what_is_no_mesh_is_refused(text):
    with pytest.raises(ValueError, match="mesh must be like data=2,model=4"):
        parse_mesh(text)


def test_more_devices_than_there_are():
    with pytest.raises(ValueError, match=r"mesh data=64,model=2 takes 128 devices, JAX finds \d"):
        make_mesh(64, 2)


METHODS = (ar, prompt_lookup, token_recycling, *equality.CAUSAL)
QUICK = {(prompt_lookup, (8, 1)), (jetspec, (2, 4)), (ddtree, (1, 3))}


@eight
@pytest.mark.parametrize(
    ("factory", "sizes"),
    [
        pytest.param(
            f,
            m,
            marks=[] if (f, m) in QUICK else [pytest.mark.slow],
            id=f"{f.__name__}-{m[0]}x{m[1]}",
        )
        for f in METHODS
        for m in MESHES
    ],
)
def test_same_tokens_as_on_one_device(tiny, factory, sizes):
    config, params = tiny(sizes[1] if sizes[1] > 1 else 2)
    sampling = SAMPLINGS["greedy" if factory in (jetspec, prompt_lookup) else "top-p"]
    plan = Plan(config, make(factory, config), sampling, BUCKETS)
    want, _ = texts(dataclasses.replace(plan, method=ar()), params, 4)
    mesh = make_mesh(*sizes)
    ours, run = texts(
        dataclasses.replace(plan, mesh=mesh), shard_params(mesh, params), MESHES[sizes]
    )
    assert ours == want
    keys = run.state.cache.keys[0]
    assert keys.addressable_shards[0].data.shape[:2] == (
        MESHES[sizes] // sizes[0],
        config.num_kv_heads // sizes[1],
    )


@eight
@pytest.mark.slow
@pytest.mark.parametrize("sizes", MESHES)
@pytest.mark.parametrize("grafted", [False, True])
def test_a_head_that_drafts_level_by_level(tiny, sizes, grafted):
    config, params = tiny(sizes[1] if sizes[1] > 1 else 2)
    head = eagle_config_for(config, taps=(0, 1, 2), draft_vocab_size=50)
    weights = with_eagle_ids(init_eagle(head, jax.random.key(1)), {}, np.arange(3, 53))
    params = params | {"head": weights}
    method = eagle3(head, 12, depth=4)
    method = graft(method, thresholds=(0.3, 0.2, 0.1)) if grafted else method
    plan = Plan(config, method, SAMPLINGS["top-p"], BUCKETS)
    want, _ = texts(dataclasses.replace(plan, method=ar()), params, 4)
    mesh = make_mesh(*sizes)
    plan = dataclasses.replace(plan, mesh=mesh)
    ours, _ = texts(plan, shard_params(mesh, params), MESHES[sizes])
    assert ours == want


@eight
def test_data_shards_do_not_wait_for_each_other(tiny):
    """They go into different branches, where a collective of the whole mesh would never come to an end."""
    mesh = make_mesh(2, 2)
    config, params = tiny(2)
    plan = Plan(config, token_recycling(6), SAMPLINGS["top-p"], BUCKETS, mesh=mesh)
    params = shard_params(mesh, params)
    state = new_state(plan, params, 4, 128, jax.random.key(0))
    for step in (
        advance.lower(plan, params, state, 1),
        run_verify.lower(plan, params, state, root_only(state.rows.prompt, 6)),
    ):
        text = step.compile().as_text()
        assert "all-gather" in text or "all-reduce" in text
        assert "collective-permute" not in text and "all-to-all" not in text


@eight
def test_weights_lie_where_they_should(tiny):
    _, params = tiny(4)
    mesh = make_mesh(2, 4)
    params = shard_params(mesh, params)
    layer, heads = params["target"]["layers"][0], params["head"]
    parts = {
        "qkv": (1, 4, 8, 32), "o": (32, 16), "gate_up": (2, 12, 32), "down": (32, 12), "input_norm": (32,),
    }  # fmt: skip
    for name, shape in parts.items():
        for weights in (layer, heads["layers"][0]):
            assert weights[name].addressable_shards[0].data.shape == shape, name
    assert params["target"]["embed"].addressable_shards[0].data.shape == (16, 32)
    assert heads["fc"].addressable_shards[0].data.shape == (32, 16)
    assert mesh_under(params) == mesh
    again = shard_params(mesh, params)
    assert again["target"]["embed"] is params["target"]["embed"]
    odd = param_shardings(mesh, {"embed": np.zeros((61, 32)), "other": np.zeros((8, 8))})
    assert [x.spec for x in odd.values()] == [P(), P()]


@eight
def test_what_does_not_divide_is_one_line(tiny):
    config, params = tiny(4)
    method = ar()
    with pytest.raises(
        ValueError, match=r"^mesh: model=3 does not divide the target's 4 key/value heads$"
    ):
        Plan(config, method, mesh=make_mesh(1, 3))
    uneven = dataclasses.replace(config, ffn_size=49)
    with pytest.raises(
        ValueError, match=r"^mesh: model=4 does not divide the target's 49 feed-forward features$"
    ):
        Plan(uneven, method, mesh=make_mesh(2, 4))
    plan = Plan(config, method, mesh=make_mesh(2, 4))
    with pytest.raises(ValueError, match=r"^mesh: data=2 does not divide batch 3$"):
        new_state(plan, params, 3, 128, jax.random.key(0))


@eight
@pytest.mark.parametrize("vocab", [2048, 1000])
def test_the_best_of_a_split_vocabulary(vocab):
    rng = np.random.default_rng(0)
    logits = rng.integers(0, 900, (vocab, 5)).astype(np.float32)  # with ties
    where = NamedSharding(make_mesh(2, 4), P(MODEL))
    ours = jax.jit(top_k, static_argnums=1)(jax.device_put(logits, where), 6)
    order = np.argsort(-logits, axis=0, kind="stable")[:6].T
    np.testing.assert_array_equal(ours[1], order)
    np.testing.assert_array_equal(ours[0], np.take_along_axis(logits.T, order, axis=1))


@eight
@pytest.mark.slow
def test_steps_one_by_one_and_memory(tiny):
    """``profile`` runs the steps as programs of their own; a table that is kept is one of a data shard."""
    config, params = tiny(2)
    plan = Plan(config, token_recycling(12, scope="kept"), buckets=BUCKETS)
    want, _ = texts(dataclasses.replace(plan, method=ar()), params, 4)
    mesh = make_mesh(2, 2)
    ours, run = texts(
        dataclasses.replace(plan, mesh=mesh), shard_params(mesh, params), 4, profile=True
    )
    assert ours == want
    table = run.memory()
    assert table.shape == (config.vocab_size, 8)
    assert (np.asarray(table) >= 0).any()
    counts = bucket_histogram(run)
    assert list(counts) == ["4", "24"]
    assert sum(counts.values()) >= sum(map(len, ours)) / 13


@eight
@pytest.mark.slow
def test_one_program_takes_a_batch_to_its_end(tiny):
    config, params = tiny(4)
    plan = Plan(config, make(ddtree, config), SAMPLINGS["top-p"], BUCKETS)
    want, _ = texts(dataclasses.replace(plan, method=ar()), params, 4)
    plan = dataclasses.replace(plan, mesh=make_mesh(2, 4))
    params = shard_params(plan.mesh, params)
    state = new_state(plan, params, 4, 128, jax.random.key(3))
    for slots in ({0: 0, 2: 1}, {1: 2}, {3: 3}):
        asked = {slot: (prompts()[i], i) for slot, i in slots.items()}
        state = admit_each(plan, params, state, asked, NEW)
    with pytest.raises(ValueError, match="different data shards, got"):
        admit_each(plan, params, state, {0: ([1], 0), 1: ([1], 1)}, NEW)
    state = generate(plan, params, state)
    found = [outcome(state, slot) for slot in (0, 2, 1, 3)]
    assert [one.tokens for one in found] == want[:4]
    assert [one.index for one in found] == [0, 1, 2, 3]


@eight
@pytest.mark.slow
def test_a_replay_counts_what_decoding_does(tiny):
    config, params = tiny(4)
    mesh = make_mesh(2, 4)
    plan = Plan(config, make(jetspec, config), SAMPLINGS["top-p"], BUCKETS, mesh=mesh)
    params = shard_params(mesh, params)
    queue = prompts()[:4]
    done, _ = decode_all(plan, params, queue, max_new_tokens=NEW, batch=4, seed=3, capacity=128)
    kept = record(plan, params, queue, max_new_tokens=NEW, batch=2, seed=3)
    again = replay(plan, params, kept, max_new_tokens=NEW)
    for one, other in zip(done, again, strict=True):
        assert (one.tokens, one.trace) == (other.tokens, other.trace)


@pytest.fixture(scope="module")
def folder(tiny_model, tmp_path_factory):
    path = tmp_path_factory.mktemp("target")
    return write_target(path, tiny_model, num_layers=2, num_kv_heads=4, eos_ids=())


@pytest.fixture(scope="module")
def written():
    """Texts of another hand: what a head learns of them does not matter here."""
    rng = np.random.default_rng(0)
    return [Text(rng.integers(0, 48, n).astype(np.int32), 4, None) for n in [30, 25, 32, 28] * 4]


OPTIM = OptimConfig(
    steps=50, learning_rate=3e-3, eval_every=2, eval_texts=1, eval_tokens=8, held_out=3
)


CE = LossConfig(gamma=4.0, dpace=0.5)


def trainer(folder, written, path, mesh=None, texts=4, loss=CE):
    target = jspec.load(folder, jnp.float32, mesh)
    config = config_for(
        target.config, mask_token_id=7, taps=(0, 1), block_size=4, draft_vocab_size=48
    )
    ids = draft_vocabulary(written, 48, 64)
    train, held_out = split(written, OPTIM.held_out)
    return Trainer(
        target,
        config,
        train,
        held_out,
        (),
        {"tree": Plan(target.config, ddtree(config, 4), mesh=mesh)},
        path,
        batch=BatchConfig(texts=texts, anchors=4, lengths=(32,)),
        loss=loss,
        optim=OPTIM,
        draft_ids=ids,
        as_params=lambda head: with_draft_ids(head, target.params, ids),
    )


def losses(run, steps):
    out = []
    for number in range(int(run.state.step), steps):
        arguments = run.target, run.config, run.loss, run.optim, run.taps
        run.state, said = train_step(
            *arguments, run.state, run.frozen, run.batches[number], run.mesh
        )
        out.append(float(said["loss"]))
    return np.asarray(out)


@eight
@pytest.mark.parametrize("steps", [6, pytest.param(50, marks=pytest.mark.slow)])
def test_training_loses_the_same(folder, written, tmp_path, steps):
    kl = LossConfig(kind="fkl", chunk=8)
    for loss in (CE, kl)[: 1 if steps == 6 else 2]:
        want = losses(trainer(folder, written, tmp_path / "one", loss=loss), steps)
        there = trainer(folder, written, tmp_path / "mesh", make_mesh(2, 4), loss=loss)
        np.testing.assert_allclose(losses(there, steps), want, rtol=0, atol=1e-4)
        moment = there.state.optimizer[1][0].mu["layers"][0]["qkv"]
        assert moment.addressable_shards[0].data.shape[0] == 1  # of 4 heads


@eight
@pytest.mark.slow
def test_checkpoints_go_from_mesh_to_mesh(folder, written, tmp_path):
    there = trainer(folder, written, tmp_path, make_mesh(4, 2))
    there.run(until=2)
    kept = jax.tree.map(np.array, there.state)  # copies: the next step takes the buffers
    ahead = losses(there, 4)
    for mesh in (make_mesh(2, 4), None):
        other = trainer(folder, written, tmp_path, mesh)
        assert int(other.state.step) == 2
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(other.state), kept)
        np.testing.assert_allclose(losses(other, 4), ahead, rtol=0, atol=1e-4)
        best = jax.device_get(other.best_head())
        jax.tree.map(np.testing.assert_array_equal, best, kept.head)


@eight
def test_heads_go_from_mesh_to_mesh(folder, tmp_path):
    target = jspec.load(folder, jnp.float32)
    config = config_for(target.config, mask_token_id=7, taps=(0, 1), block_size=4)
    head = init_head(config, jax.random.key(0))
    save_head(tmp_path / "a", config, shard_params(make_mesh(1, 4), head))
    want = load_head(tmp_path / "a", target)
    there = load_head(tmp_path / "a", jspec.load(folder, jnp.float32, make_mesh(4, 2)))
    assert there.fingerprint == want.fingerprint
    assert mesh_under(there.params).shape == {"data": 4, "model": 2}
    jax.tree.map(np.testing.assert_array_equal, there.params, want.params)


@eight
def test_training_refuses_what_does_not_divide(folder, written, tmp_path):
    with pytest.raises(ValueError, match=r"^mesh: data=2 does not divide batch.texts 3$"):
        trainer(folder, written, tmp_path, make_mesh(2, 4), texts=3)
    with pytest.raises(
        ValueError, match=r"^mesh: model=3 does not divide the target's 4 key/value"
    ):
        jspec.load(folder, jnp.float32, make_mesh(1, 3))
    with pytest.raises(ValueError, match=r"^mesh: data=4 does not divide batch.texts 2$"):
        parse(["--mesh", "data=4"])


def arguments(folder, path, *more):
    """Arguments of ``python -m jspec.run`` that decode two prompts and report to a path."""
    words = ["--target", str(folder), "--method", "prompt_lookup", "--max-new-tokens", "12"]
    words += ["--prompt", "ABCABC", "HELLO HELLO", "--batch", "2", "--accel", "cpu"]
    return [*words, "--temperature", "0.7", "--json", str(path), *more]


def tokens_of(path):
    report = json.loads(path.read_text())
    assert report["summary"]["identical_to_ar"] == "2/2"
    return [one["tokens"] for one in report["results"]]


@pytest.fixture(autouse=True)
def no_cache_of_compilations(monkeypatch):
    monkeypatch.setattr(run, "keep_compilations", lambda: None)
    monkeypatch.setattr(command, "keep_compilations", lambda: None)


@eight
@pytest.mark.slow
def test_the_command_line(folder, tmp_path, capsys):
    assert run.main(arguments(folder, tmp_path / "one.json")) == 0
    assert run.main(arguments(folder, tmp_path / "mesh.json", "--mesh", "data=2,model=4")) == 0
    assert tokens_of(tmp_path / "mesh.json") == tokens_of(tmp_path / "one.json")
    capsys.readouterr()
    assert run.main(arguments(folder, tmp_path / "no.json", "--mesh", "data=2,model=3")) == 2
    says = "jspec: error: mesh: model=3 does not divide the target's 4 key/value heads\n"
    assert capsys.readouterr().err == says


@eight
@pytest.mark.slow
def test_the_training_command(tiny_model, tmp_path):
    """The text too, and a head that is exported; a run goes on on another mesh."""
    ends = (training.EOS, *range(20, 28))
    (tmp_path / "target").mkdir()
    target = write_target(tmp_path / "target", tiny_model, num_layers=2, eos_ids=ends)
    for name, *meshes in (("one", "data=1"), ("mesh", "data=2,model=2", "data=1,model=2")):
        (tmp_path / name).mkdir()
        for mesh, stages in zip(meshes, (["text", "head"], ["export"])):
            argv = training.arguments(tmp_path / name, target, "--mesh", mesh, *stages)
            assert command.main(argv) == 0
    logs = [read_log(tmp_path / name / "run") for name in ("one", "mesh")]
    for mine, other in zip(*logs, strict=True):
        assert mine["loss"] == pytest.approx(other["loss"], abs=1e-3)  # of states kept in float16
    shards = sorted((tmp_path / "one" / "library" / "text").glob("*.npz"))
    for path in shards:
        there = tmp_path / "mesh" / "library" / "text" / path.name
        with np.load(path) as mine, np.load(there) as other:
            for key in mine:
                np.testing.assert_array_equal(mine[key], other[key])
    assert shards and (tmp_path / "mesh" / "run" / "head" / "config.json").is_file()


def start(devices, argv, **environment):
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"} | environment
    return subprocess.Popen(
        [sys.executable, *argv],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.slow
def test_two_processes_decode_as_one(folder, tmp_path):
    assert run.main(arguments(folder, tmp_path / "one.json")) == 0
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    several = ["--distributed", "--mesh", "data=2,model=2"]
    argv = ["-m", "jspec.run", *arguments(folder, tmp_path / "two.json", *several)]
    who = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": "2"}
    who |= {"JSPEC_CACHE": str(tmp_path)}  # not the user's own
    both = [start(2, argv, JAX_PROCESS_ID=str(number), **who) for number in range(2)]
    said = [one.communicate(timeout=1800)[0] for one in both]
    assert [one.returncode for one in both] == [0, 0], said
    assert "acceptance" in said[0] and "acceptance" not in said[1]
    assert tokens_of(tmp_path / "two.json") == tokens_of(tmp_path / "one.json")


def test_processes_that_are_not_found(folder, tmp_path):
    argv = ["-m", "jspec.run", *arguments(folder, tmp_path / "two.json", "--distributed")]
    who = {"JAX_COORDINATOR_ADDRESS": "localhost:1", "JAX_NUM_PROCESSES": "x"}
    process = start(1, argv, JAX_PROCESS_ID="0", **who)
    said = process.communicate()[0]
    assert process.returncode == 2
    assert (
        said.startswith("jspec: error: the other processes are not found") and said.count("\n") == 1
    )


@pytest.mark.skipif(jax.device_count() >= DEVICES, reason="this is that process")
@pytest.mark.parametrize(
    "marks", ["not slow and not parity", pytest.param("slow", marks=pytest.mark.slow)]
)
def test_on_eight_devices(marks):
    argv = ["-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", str(Path(__file__))]
    process = start(DEVICES, [*argv, "-m", marks, "-k", "not processes and not eight"])
    said = process.communicate()[0]
    assert process.returncode == 0, said
    assert re.search(r"\d+ passed", said) and "skipped" not in said
