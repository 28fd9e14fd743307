"""Which texts a run is trained and judged on."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from tiny_target import write_target

import jspec
from jspec.train.data import BatchConfig
from jspec.train.optim import OptimConfig
from jspec.train.options import HeadOptions, TrainOptions, parse
from jspec.train.stages import open_run
from jspec.train.text import Library, Written

LENGTH, START, TEXTS, HELD_OUT = 16, 4, 8, 3
HEAD = HeadOptions(num_layers=1, block_size=3, taps=(0, 1), mask_token="<s>", draft_vocab_size=9)
OPTIM = OptimConfig(
    steps=1, eval_every=1, eval_texts=2, eval_tokens=4, eval_budget=4, held_out=HELD_OUT
)


@pytest.fixture(scope="module")
def target(tiny_model, tmp_path_factory):
    return jspec.load(write_target(tmp_path_factory.mktemp("tiny"), tiny_model, num_layers=2))


def library(folder, target, first):
    """Texts that each say one token of their own, ``first`` and on, over and over."""
    (folder / "text").mkdir(parents=True)
    said = {"target": target.fingerprint, "taps": []}
    (folder / "text.json").write_text(json.dumps(said))
    none = np.zeros((0, 0, 0))
    tokens = [np.full(LENGTH, first + i, np.int32) for i in range(TEXTS)]
    written = [Written(i, text, START, none) for i, text in enumerate(tokens)]
    Library(folder).save(0, written, wide=False)
    return str(folder)


def own(run):
    """The tokens of the texts that a run is trained on, its draft vocabulary, and its held-out texts."""
    steps = range(run.batches.per_epoch)
    trained = {int(run.batches[step].tokens[0, 0]) for step in steps}
    drafts = np.flatnonzero(np.asarray(run.frozen.draft_of) >= 0).tolist()
    return trained, drafts, [int(one.tokens[0]) for one in run.recordings]


def test_what_is_trained_on_and_what_is_held_out(target, tmp_path):
    first = library(tmp_path / "first", target, 10)
    options = TrainOptions(
        library=first,
        run=str(tmp_path / "all"),
        head=HEAD,
        batch=BatchConfig(texts=1, anchors=2, lengths=(LENGTH,)),
        optim=OPTIM,
    )
    trained, drafts, held_out = own(open_run(options, target))
    ours = set(range(10, 10 + TEXTS))
    assert trained <= ours and len(trained) == TEXTS - HELD_OUT
    assert len(held_out) == 2 and set(held_out) < ours - trained
    assert set(drafts) >= trained and not set(drafts) & set(held_out)  # the rest are ties: 0, 1, ..

    few = dataclasses.replace(options, run=str(tmp_path / "few"), max_texts=2)
    trained_on_few, drafts_of_few, same = own(open_run(few, target))
    assert trained_on_few == set(sorted(trained)[:2])
    assert trained_on_few == {token for token in drafts_of_few if token >= 10}
    assert same == held_out
    many = dataclasses.replace(few, run=str(tmp_path / "many"), max_texts=99)
    assert own(open_run(many, target))[0] == trained

    second = library(tmp_path / "second", target, 30)
    both = dataclasses.replace(options, run=str(tmp_path / "both"), also=(second,))
    assert len(own(open_run(both, target))[0]) == 2 * TEXTS - HELD_OUT
    for run in (options.run, few.run):
        (Path(run) / "last" / "1").mkdir()  # without a checkpoint a folder is anybody's
    with pytest.raises(ValueError, match=r"holds a run of another config \(texts differ\)"):
        open_run(dataclasses.replace(both, run=options.run), target)
    with pytest.raises(ValueError, match=r"holds a run of another config \(max_texts differ\)"):
        open_run(dataclasses.replace(few, max_texts=3), target)


def test_the_options_of_the_texts():
    options, stages = parse(["--also", "[a, b]", "--max_texts", "3", "head"])
    assert (options.also, options.max_texts, stages) == (("a", "b"), 3, ("head",))
    assert parse([])[0].max_texts is None
    with pytest.raises(ValueError, match="max_texts must be 1 or above, got 0"):
        parse(["--max_texts", "0"])
