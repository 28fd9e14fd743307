import json

import numpy as np
import pytest

from jspec.train.data import (
    BatchConfig,
    Batches,
    Text,
    draft_vocabulary,
    read_libraries,
    read_texts,
    split,
)
from jspec.train.text import Library, Written


def texts(count=13, seed=0, depth=4):
    """Texts whose tokens and taps tell where they stand: token = 100 * text + place."""
    rng = np.random.default_rng(seed)
    out = []
    for number in range(count):
        length = int(rng.integers(5, 40))
        tokens = np.arange(length, dtype=np.int32) + 100 * number
        taps = np.broadcast_to(tokens[:-1, None, None], (length - 1, 2, 3)).astype(np.float16)
        out.append(Text(tokens, int(rng.integers(1, length - 1)), taps))
    return out


CONFIG = BatchConfig(texts=2, anchors=3, lengths=(16, 32), seed=5)


@pytest.mark.parametrize("seed", range(5))
def test_anchors_and_labels(seed):
    given = texts(seed=seed)
    batches = Batches(given, CONFIG, depth=4)
    for step in range(2 * batches.per_epoch):
        batch = batches[step]
        width = batch.tokens.shape[1]
        assert width in CONFIG.lengths
        for row in range(2):
            text = given[batch.tokens[row, 0] // 100]
            end = min(len(text.tokens), width)
            np.testing.assert_equal(batch.tokens[row, :end], text.tokens[:end])
            np.testing.assert_equal(batch.taps[row, : end - 1], text.taps[: end - 1])
            assert not batch.taps[row, end - 1 :].any()
            used = batch.anchors[row][batch.anchors[row] >= 0]
            assert (np.diff(used) > 0).all()
            assert ((used >= text.start - 1) & (used < end - 1)).all()
            assert len(used) == max(0, min(3, end - text.start))
            for anchor, labels in zip(batch.anchors[row], batch.labels[row], strict=True):
                known = text.tokens[anchor + 1 : min(anchor + 5, end)] if anchor >= 0 else []
                np.testing.assert_equal(labels[: len(known)], known)
                assert (labels[len(known) :] == -1).all()


def test_every_text_has_its_turn_and_any_step_can_be_had_alone():
    given = texts(12)
    batches = Batches(given, CONFIG, depth=4)
    steps = range(batches.per_epoch)
    seen = [int(t) // 100 for n in steps for t in batches[n].tokens[:, 0]]
    assert sorted(seen) == sorted(set(seen)) and len(seen) >= 10
    again = Batches(given, CONFIG, depth=4)
    for step in (2 * batches.per_epoch + 1, 3, 0):
        for a, b in zip(batches[step], again[step], strict=True):
            np.testing.assert_equal(a, b)
    assert (batches[0].anchors != batches[batches.per_epoch].anchors).any()


def test_few_texts_make_steps_too():
    batches = Batches(texts(1), CONFIG, depth=4)
    assert batches.per_epoch == 1
    assert batches[3].tokens.shape[0] == 2


def save(folder, *shards, target="ff", taps=(0, 1)):
    (folder / "text").mkdir(parents=True)
    (folder / "taps").mkdir()
    (folder / "text.json").write_text(json.dumps({"target": target, "taps": taps}))
    for shard, members in enumerate(shards):
        written = [Written(i, t.tokens, t.start, t.taps) for i, t in enumerate(members)]
        Library(folder).save(shard, written[::-1], wide=bool(shard))
    return folder


def same(found, given):
    assert [t.start for t in found] == [t.start for t in given]
    for a, b in zip(found, given, strict=True):
        np.testing.assert_equal(a.tokens, b.tokens)
        np.testing.assert_equal(a.taps, b.taps)


def test_a_library_gives_back_what_was_written(tmp_path):
    given = texts(7)
    save(tmp_path, given[:4], given[4:])
    same(read_texts(tmp_path), given)
    with (tmp_path / "text" / "00001.npz").open("r+b") as file:
        file.truncate(100)
    with pytest.raises(ValueError, match=r"00001\.npz cannot be read"):
        read_texts(tmp_path)


DAMAGES = {
    "two axes": (lambda a: a | {"lengths": a["lengths"][:, None]}, "lengths must be a row of who"),
    "text": (lambda a: a | {"tokens": a["tokens"].astype(str)}, "tokens must be a row of whole"),
    "fractions": (lambda a: a | {"tokens": a["tokens"] + 0.5}, "tokens must be a row of whole"),
    "negative": (lambda a: a | {"lengths": a["lengths"] + [-999, 999]}, "lengths do not add up"),
    "too few starts": (lambda a: a | {"starts": a["starts"][:1]}, "lengths do not add up"),
    "too few tokens": (lambda a: a | {"tokens": a["tokens"][:-1]}, "lengths do not add up"),
}


@pytest.mark.parametrize(("change", "says"), DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_shard_is_named(tmp_path, change, says):
    folder = save(tmp_path, texts(2))
    path = folder / "text" / "00000.npz"
    with np.load(path) as file:
        arrays = dict(file)
    np.savez(path, **change(arrays))
    with pytest.raises(ValueError, match=rf"00000\.npz is damaged: its {says}"):
        read_texts(folder)


@pytest.mark.parametrize(("shape", "says"), [((9,), "does not hold the states"), ((1, 1, 3), "")])
def test_damaged_states_are_named(tmp_path, shape, says):
    folder = save(tmp_path, texts(2))
    path = folder / "taps" / "00000.npy"
    rows = np.load(path)
    np.save(path, np.zeros(shape) if says else rows[:, :1])
    with pytest.raises(ValueError, match=says or "lacks the taps of some of the texts"):
        read_libraries([folder], "ff")


@pytest.mark.parametrize("taps", [[[0], 1], "ab", 3, None, [0.5]])
def test_a_record_with_no_taps_is_refused(tmp_path, taps):
    folder = save(tmp_path, texts(2))
    (folder / "text.json").write_text(json.dumps({"target": "ff", "taps": taps}))
    with pytest.raises(ValueError, match="is no library of text"):
        read_libraries([folder], "ff")


def test_libraries_are_read_one_after_the_other(tmp_path):
    given = texts(7)
    folders = [save(tmp_path / "b", given[:4]), save(tmp_path / "a", given[4:])]
    found, taps = read_libraries(folders, "ff")
    assert taps == (0, 1)
    same(found, given)
    with pytest.raises(ValueError, match="given twice"):
        read_libraries([*folders, tmp_path / "a" / ".." / "b"], "ff")
    with pytest.raises(ValueError, match="was written by target ff, this one is fe"):
        read_libraries(folders, "fe")
    other = save(tmp_path / "c", given, target="fe")
    with pytest.raises(ValueError, match="c was written by target fe, this one is ff"):
        read_libraries([*folders, other], "ff")
    other = save(tmp_path / "d", given, taps=(0, 2))
    with pytest.raises(ValueError, match=r"d keeps taps \(0, 2\), .*b keeps \(0, 1\)"):
        read_libraries([*folders, other], "ff")
    with pytest.raises(ValueError, match="e is no library of text"):
        read_libraries([*folders, tmp_path / "e"], "ff")


def test_texts_without_anything_to_draft_are_left_out(tmp_path):
    (tmp_path / "text").mkdir()
    none = np.zeros((0, 0, 0))
    Library(tmp_path).save(0, [Written(0, np.arange(4), 3, none)], wide=False)
    with pytest.raises(ValueError, match="no text of two tokens"):
        read_texts(tmp_path)


def test_held_out_texts_are_not_trained_on():
    given = texts(10)
    train, held = split(given, 3)
    firsts = [t.tokens[0] for t in train + held]
    assert len(held) == 3 and sorted(firsts) == [100 * i for i in range(10)]
    assert firsts[:7] == sorted(firsts[:7])
    with pytest.raises(ValueError, match=r"optim.held_out must be below"):
        split(given, 10)


def test_what_answers_a_held_out_prompt_is_not_trained_on():
    """Two libraries may have prompts in common: written by the same command, they are equal."""
    given = [text._replace(start=max(2, text.start)) for text in texts(10)]
    again = [text._replace(tokens=np.append(text.tokens, np.int32(3))) for text in given]
    _, held = split(given + again, 4)
    train, _ = split(given + again, 4)
    asked = {text.tokens[: text.start].tobytes() for text in held}
    assert train and not asked & {text.tokens[: text.start].tobytes() for text in train}
    assert len(train) == 20 - 2 * len(asked)
    with pytest.raises(ValueError, match=r"optim.held_out: every other text"):
        split(given[:1] + again[:1], 1)
    bare = [Text(np.array([1, i, i], np.int32), 1, None) for i in range(5)]
    assert len(split(bare, 2)[0]) == 3  # no prompt but a first token: the texts are compared


def test_the_draft_vocabulary_is_the_most_frequent():
    text = Text(np.array([9, 9, 9, 5, 5, 2, 7, 7, 1], np.int32), 3, None)
    np.testing.assert_equal(draft_vocabulary([text], 3, 12), [1, 5, 7])
    np.testing.assert_equal(draft_vocabulary([text], 6, 12), [0, 1, 2, 3, 5, 7])
    with pytest.raises(ValueError, match="draft vocabulary"):
        draft_vocabulary([text], 13, 12)
