import dataclasses
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file
from tiny_target import write_target

from jspec import checkpoint
from jspec.checkpoint import (
    export_head,
    head_fingerprint,
    load_head,
    read_config,
    read_head,
    save_head,
    shipped_head,
)
from jspec.heads.config import Correction, HeadError
from jspec.heads.parallel import draft_table, empty_cache
from jspec.models.config import TargetError
from jspec.models.load import load_target
from tests.heads.samples import config, head_and_target

FULL = config(vocab_size=64, target_layers=3)
NARROW = dataclasses.replace(FULL, draft_vocab_size=23)
DOMINO = dataclasses.replace(NARROW, shift_labels=True, correction=Correction(7, 5))


def own(head):
    return {name: x for name, x in head.items() if name != "lm_head"}


def assert_same(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected)):
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(ours, theirs)


def halved(head):
    return jax.tree.map(lambda x: x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x, head)


def as_native(folder, config, head, dtype=jnp.float32):
    save_head(folder, config, halved(head) if dtype == jnp.bfloat16 else head)


WRITERS = pytest.mark.parametrize("write", [as_native, export_head])


@pytest.fixture(scope="module")
def target(tmp_path_factory, tiny_model):
    return load_target(write_target(tmp_path_factory.mktemp("target"), tiny_model, num_layers=3))


@WRITERS
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("kind", [FULL, NARROW, DOMINO])
def test_heads_come_back_exactly(tmp_path, write, dtype, kind):
    head, _ = head_and_target(kind)
    expected = halved(own(head)) if dtype == jnp.bfloat16 else own(head)
    write(tmp_path / "new" / "head", kind, head, dtype)
    found = read_head(tmp_path / "new" / "head")
    assert found[0] == kind
    assert_same(found[1], expected)
    assert head_fingerprint(*found) == head_fingerprint(kind, expected)
    assert os.listdir(tmp_path / "new") == ["head"]


def test_the_two_formats_are_one_head(tmp_path, target):
    head, _ = head_and_target(NARROW)
    save_head(tmp_path / "a", NARROW, head)
    export_head(tmp_path / "b", NARROW, head, jnp.float32)
    export_head(tmp_path / "c", NARROW, head)
    native, published, half = (load_head(tmp_path / name, target) for name in "abc")
    assert native.config == published.config == NARROW
    assert native.fingerprint == published.fingerprint != half.fingerprint
    assert len(native.fingerprint) == 16 and native.name == str(tmp_path / "a")
    assert_same(native.params, published.params)
    assert {x.dtype for x in jax.tree.leaves(half.params)} == {
        jnp.dtype("float32"),
        jnp.dtype("int32"),
    }


def test_a_fingerprint_outlives_a_change_of_dtype(tmp_path, target):
    head, _ = head_and_target(NARROW)
    export_head(tmp_path / "a", NARROW, head)
    first = load_head(tmp_path / "a", target)  # in fp32, as the target
    save_head(tmp_path / "b", NARROW, first.params)
    assert load_head(tmp_path / "b", target).fingerprint == first.fingerprint


def test_a_head_comes_from_the_hub(tmp_path, target, monkeypatch):
    head, _ = head_and_target(NARROW)
    export_head(tmp_path / "a", NARROW, head)
    monkeypatch.setattr(checkpoint, "from_hub", lambda name: tmp_path / name.split("/")[1])
    assert load_head("org/a", target).fingerprint == load_head(tmp_path / "a", target).fingerprint

    def offline(name):
        raise TargetError(f"cannot get {name} from the model hub")

    monkeypatch.setattr(checkpoint, "from_hub", offline)
    with pytest.raises(HeadError, match="cannot get org/b from the model hub"):
        load_head("org/b", target)


def test_the_fingerprint_tells_heads_apart():
    head, _ = head_and_target(FULL)
    prints = [
        head_fingerprint(FULL, head),
        head_fingerprint(dataclasses.replace(FULL, causal=False), head),
        head_fingerprint(FULL, head | {"fc": head["fc"] * 1.001}),
        head_fingerprint(dataclasses.replace(FULL, shift_labels=True), head),
    ]
    assert len(set(prints)) == 4


def test_heads_keep_the_fingerprint_that_they_had_before_there_were_corrections():
    head, _ = head_and_target(FULL)
    assert head_fingerprint(FULL, jax.tree.map(jnp.zeros_like, head)) == "cf584ea794a3c268"


def test_a_shipped_head_is_one_for_its_methods(tmp_path, target, monkeypatch):
    monkeypatch.setattr(checkpoint, "SHIPPED", tmp_path)
    fingerprint = {"target_fingerprint": target.fingerprint}
    assert shipped_head(target, causal=True, corrected=True) is None
    for name, kind in {"a": DOMINO, "b": NARROW}.items():
        kind = dataclasses.replace(kind, **fingerprint)
        export_head(tmp_path / name, kind, head_and_target(kind)[0])
    assert shipped_head(target, causal=True) == "b"
    assert shipped_head(target, causal=False, corrected=True) == "a"
    assert [read_config(name).correction is not None for name in "ab"] == [True, False]
    with pytest.raises(HeadError, match="no head 'elsewhere'"):
        read_config("elsewhere")


def test_a_loaded_head_drafts_with_the_target_s_rows(tmp_path, target):
    head, _ = head_and_target(NARROW)
    export_head(tmp_path / "head", NARROW, head, jnp.float32)
    params = load_head(tmp_path / "head", target).params
    np.testing.assert_array_equal(params["lm_head"], target.params["lm_head"][params["draft_ids"]])
    cache = empty_cache(NARROW, 1, 8)
    found = draft_table(NARROW, params, target.params, cache, jnp.asarray([3]), 2, 4)
    assert np.isin(found.tokens, head["draft_ids"]).all()


@WRITERS
def test_a_head_is_replaced_by_another_but_nothing_else_is(tmp_path, write):
    first, _ = head_and_target(FULL, seed=0)
    second, _ = head_and_target(FULL, seed=1)
    write(tmp_path / "head", FULL, first, jnp.float32)
    write(tmp_path / "head", FULL, second, jnp.float32)
    assert_same(read_head(tmp_path / "head")[1], second)
    other = tmp_path / "work"
    other.mkdir()
    (other / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(HeadError, match="holds something that is no head"):
        write(other, FULL, first, jnp.float32)
    assert sorted(os.listdir(tmp_path)) == ["head", "work"]
    assert os.listdir(other) == ["config.json"]


def test_what_is_no_head_is_not_written(tmp_path):
    head, _ = head_and_target(NARROW)
    with pytest.raises(ValueError, match="dtype must be a floating one, got int8"):
        export_head(tmp_path / "head", NARROW, head, jnp.int8)
    for write in (save_head, export_head):
        with pytest.raises(HeadError, match="draft_ids must ascend"):
            write(tmp_path / "head", NARROW, head | {"draft_ids": head["draft_ids"][::-1]})
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_write_left_behind_goes(tmp_path):
    head, _ = head_and_target(NARROW)
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        gone.wait()
    for name in (f".head.{gone.pid}.partial", ".head.1.partial", ".other.1.partial"):
        (tmp_path / name).mkdir()
    export_head(tmp_path / "head", NARROW, head)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == [".head.1.partial", ".other.1.partial", "head"]  # process 1 lives


@pytest.mark.parametrize(
    ("write", "error"),
    [
        (as_native, OSError("No space left on device")),
        (as_native, ValueError("RESOURCE_EXHAUSTED: No space left\nand more")),
        (export_head, OSError("No space left on device")),
        (export_head, SafetensorError("I/O error: No space left on device")),
    ],
)
def test_a_failed_write_leaves_what_was_there(tmp_path, write, monkeypatch, error):
    first, _ = head_and_target(FULL, seed=0)
    second, _ = head_and_target(FULL, seed=1)
    write(tmp_path / "head", FULL, first, jnp.float32)

    def full(*_):
        raise error

    monkeypatch.setattr(checkpoint.ocp.StandardCheckpointer, "save", full)
    monkeypatch.setattr(checkpoint, "save_file", full)
    for name in ("head", "new"):
        with pytest.raises(HeadError, match=r"cannot be written: .*No space left"):
            write(tmp_path / name, FULL, second, jnp.float32)
    assert os.listdir(tmp_path) == ["head"]
    assert_same(read_head(tmp_path / "head")[1], first)


@WRITERS
def test_arrays_of_another_head_are_not_written(tmp_path, write):
    head, _ = head_and_target(FULL)
    with pytest.raises(HeadError, match=r"fc is \(32, 64\), the config asks for \(32, 32\)"):
        write(tmp_path / "head", dataclasses.replace(FULL, taps=(1,)), head, jnp.float32)
    assert not os.listdir(tmp_path)


class TestRefusals:
    """Each one HeadError of one line."""

    @pytest.fixture
    def published(self, tmp_path):
        head, _ = head_and_target(NARROW)
        export_head(tmp_path / "published", NARROW, head)
        return tmp_path / "published"

    @pytest.fixture
    def native(self, tmp_path):
        head, _ = head_and_target(NARROW)
        save_head(tmp_path / "native", NARROW, head)
        return tmp_path / "native"

    def refuse(self, target, name, message):
        with pytest.raises(HeadError, match=message) as caught:
            load_head(name, target)
        assert "\n" not in str(caught.value)

    def edit(self, folder, **changes):
        data = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(data | changes))

    def change(self, folder, remove=(), **tensors):
        found = load_file(folder / "model.safetensors") | tensors
        for name in remove:
            del found[name]
        save_file(found, folder / "model.safetensors")

    def test_no_head(self, target, tmp_path, published, monkeypatch):
        self.refuse(target, "x" * 300, "no head 'x")
        self.refuse(target, "nothing", "no head 'nothing': give .*smollm2-135m-jetspec, a folder")
        monkeypatch.setattr(checkpoint, "SHIPPED", tmp_path / "none")
        self.refuse(target, "nothing", "no head 'nothing': give a folder")
        monkeypatch.setattr(checkpoint, "SHIPPED", tmp_path)
        self.refuse(target, "nothing", "give published, a folder")
        assert load_head("published", target).name == "published"

    def test_no_weights(self, target, published):
        (published / "model.safetensors").unlink()
        self.refuse(target, published, "has no weights: model.safetensors is missing")

    @pytest.mark.parametrize("kept", [0, 5, 1000, -1])
    def test_truncated_safetensors(self, target, published, kept):
        path = published / "model.safetensors"
        path.write_bytes(path.read_bytes()[:kept])
        self.refuse(target, published, "cannot be read")

    def test_a_tensor_is_missing(self, target, published):
        self.change(published, remove=["layers.1.self_attn.k_norm.weight"])
        self.refuse(target, published, r"lack layers\.1\.self_attn\.k_norm\.weight")

    def test_a_tensor_too_many(self, target, published):
        self.change(published, **{"markov_head.weight": np.ones(3, np.float32)})
        self.refuse(target, published, r"have markov_head\.weight, unknown to draft heads")

    def test_a_layout_of_domino_without_its_projector(self, target, tmp_path):
        export_head(tmp_path / "h", DOMINO, head_and_target(DOMINO)[0])
        whole = load_file(tmp_path / "h" / "model.safetensors")
        for name in ("prefix_gru.weight_hh_l0", "embed_proj.2.weight"):
            self.change(tmp_path / "h", remove=[name])
            self.refuse(target, tmp_path / "h", f"lack {name}: a prefix_gru and an embed_proj go")
            save_file(whole, tmp_path / "h" / "model.safetensors")
        plain = json.loads((tmp_path / "h" / "config.json").read_text())["dflash_config"]
        del plain["projector_type"]
        self.edit(tmp_path / "h", dflash_config=plain)
        self.refuse(target, tmp_path / "h", r"have embed_proj\.0\.weight, .* projector_type domino")

    def test_native_weights_without_a_projector(self, target, tmp_path):
        save_head(tmp_path / "h", DOMINO, head_and_target(DOMINO)[0])
        plain = json.loads((tmp_path / "h" / "config.json").read_text())["dflash_config"]
        self.edit(tmp_path / "h", dflash_config=plain | {"emb_dim": 6})
        self.refuse(target, tmp_path / "h", r"correction\.down is \(5, 39\), .* \(6, 39\)")

    def test_a_wrong_shape(self, target, published):
        self.change(published, **{"fc.weight": np.ones((32, 32), np.float32)})
        self.refuse(target, published, r"fc\.weight .* has shape \(32, 32\), .* \(32, 64\)")

    @pytest.mark.parametrize("first", [-1, 64, 30])
    def test_draft_ids_that_are_none(self, target, published, first):
        ids = load_file(published / "model.safetensors")["draft_ids"].copy()
        ids[-1 if first == 64 else 0] = first
        self.change(published, draft_ids=ids)
        self.refuse(target, published, r"draft_ids must ascend within the vocabulary 0\.\.63")

    def test_no_draft_ids(self, target, published):
        self.change(published, remove=["draft_ids"])
        self.refuse(target, published, "lack draft_ids")

    def test_draft_ids_that_the_config_does_not_know(self, target, published):
        self.edit(published, draft_vocab_size=None)
        self.refuse(target, published, "have draft_ids, unknown to draft heads")

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"block_size": 1}, "block_size must be in 2..512"),
            ({"mask_token_id": 64, "dflash_config": None}, "target_layer_ids"),
            ({"num_target_layers": 2}, r"taps must be target layers 0\.\.1, got 2"),
            ({"num_target_layers": 5}, "target of layer count 5, this target's is 3"),
            ({"vocab_size": 65}, "target of vocab_size 65, this target's is 64"),
            ({"target_fingerprint": "0f"}, "trained on target 0f"),
        ],
    )
    def test_a_config_that_does_not_fit(self, target, published, changes, message):
        self.edit(published, **changes)
        self.refuse(target, published, message)

    def test_a_mask_outside_the_vocabulary(self, target, published):
        self.edit(published, dflash_config={"mask_token_id": 64, "target_layer_ids": [0, 2]})
        self.refuse(target, published, r"mask id must be in the vocabulary 0\.\.63, got 64")

    def test_a_head_of_another_width(self, target, tmp_path):
        wide = dataclasses.replace(FULL, hidden_size=40)
        export_head(tmp_path / "wide", wide, head_and_target(wide)[0])
        self.refuse(target, tmp_path / "wide", "target of hidden_size 40, this target's is 32")

    def test_an_unreadable_config(self, target, published):
        (published / "config.json").write_text("{")
        self.refuse(target, published, "config.json cannot be read")
        (published / "config.json").unlink()
        self.refuse(target, published, "has no config.json")

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"intermediate_size": 40}, r"layers\.0\.down is \(32, 48\), .* asks for \(32, 40\)"),
            ({"draft_vocab_size": None}, r"draft_ids is \(23,\), the config asks for no array"),
            (
                {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3},
                r"layers\.2\.down is no array, the config asks for \(32, 48\)",
            ),
        ],
    )
    def test_native_weights_of_another_config(self, target, native, changes, message):
        self.edit(native, **changes)
        self.refuse(target, native, message)

    def test_wide_draft_ids_are_not_wrapped(self, target, published):
        ids = load_file(published / "model.safetensors")["draft_ids"].astype(np.int64)
        ids[-1] += 1 << 32
        self.change(published, draft_ids=ids)
        self.refuse(target, published, "draft_ids must ascend within the vocabulary")

    def test_a_run_is_no_head(self, target, tmp_path):
        (tmp_path / "log.jsonl").touch()
        self.refuse(target, tmp_path, "is a run of jspec.train: a head is .*head, once exported")

    @pytest.mark.parametrize("name", ["_METADATA", "manifest.ocdbt", "d/*"])
    def test_damaged_native_weights(self, target, native, name):
        path = next((native / "params").glob(name))
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        self.refuse(target, native, "params cannot be read: ")


class TestWriting:
    """What a folder may be, and what is left of it whatever happens."""

    def test_a_path_that_orbax_takes_for_a_pattern(self, tmp_path):
        head, _ = head_and_target(NARROW)
        for name in ("[1]", "a\\b", "a*"):
            with pytest.raises(HeadError, match="in its path: checkpoints there could not be read"):
                save_head(tmp_path / name, NARROW, head)
            export_head(tmp_path / name, NARROW, head)  # no orbax
            assert read_head(tmp_path / name)[0] == NARROW

    def test_what_else_is_in_the_folder_is_not_lost(self, tmp_path):
        head, _ = head_and_target(NARROW)
        export_head(tmp_path / "h", NARROW, head)
        (tmp_path / "h" / "notes.txt").write_text("mine")
        with pytest.raises(HeadError, match=r"holds more than a head \(notes.txt\)"):
            export_head(tmp_path / "h", NARROW, head)
        assert (tmp_path / "h" / "notes.txt").read_text() == "mine"

    def test_a_link_goes_on_pointing(self, tmp_path):
        head, _ = head_and_target(NARROW)
        export_head(tmp_path / "h", NARROW, head)
        (tmp_path / "link").symlink_to(tmp_path / "h")
        for _ in range(2):
            export_head(tmp_path / "link", NARROW, head, card="new")
        assert (tmp_path / "link").is_symlink()
        assert (tmp_path / "h" / "README.md").read_text().startswith("new")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["h", "link"]

    @pytest.mark.parametrize("killed", [False, True])
    def test_the_old_head_stays_when_the_new_one_cannot_be_put_there(
        self, tmp_path, monkeypatch, killed
    ):
        head, _ = head_and_target(NARROW)
        export_head(tmp_path / "h", NARROW, head, card="old")
        real = os.replace

        def replace(source, to):
            if str(source).endswith(".partial"):
                raise KeyboardInterrupt if killed else OSError("no")
            real(source, to)

        monkeypatch.setattr(os, "replace", replace)
        with pytest.raises(KeyboardInterrupt if killed else HeadError):
            export_head(tmp_path / "h", NARROW, head, card="new")
        if killed:  # between the two renames; then the next write fails too
            with pytest.raises(KeyboardInterrupt):
                export_head(tmp_path / "h", NARROW, head, card="new")
            monkeypatch.undo()
            export_head(tmp_path / "h", NARROW, head, card="newer")
            assert (tmp_path / "h" / "README.md").read_text().startswith("newer")
        else:
            assert (tmp_path / "h" / "README.md").read_text().startswith("old")
        assert [path.name for path in tmp_path.iterdir()] == ["h"]
