import dataclasses

import pytest

from jspec.heads.config import Correction, HeadError, check_pair, config_for, spread_taps
from tests.heads.samples import config


@pytest.mark.parametrize(
    ("layers", "count", "taps"),
    [
        (36, 5, (1, 9, 17, 25, 33)),
        (28, 5, (1, 7, 13, 19, 25)),
        (24, 5, (1, 6, 11, 16, 21)),
        (40, 5, (1, 10, 19, 28, 37)),
        (48, 5, (1, 12, 23, 34, 45)),
        (30, 1, (15,)),
        (6, 3, (1, 2, 3)),
    ],
)
def test_taps_are_spread_as_published(layers, count, taps):
    assert spread_taps(layers, count) == taps


@pytest.mark.parametrize("count", [0, 4, -1])
def test_no_more_taps_than_layers_between(count):
    with pytest.raises(HeadError, match=rf"taps must be in 1\.\.3 for 6 layers, got {count}"):
        spread_taps(6, count)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ffn_size": 0}, "ffn_size must be in 1..1073741824, got 0"),
        ({"num_kv_heads": 3}, "4 query heads cannot share 3"),
        ({"head_dim": 7}, "head_dim must be even"),
        ({"norm_eps": 0.0}, "must be positive"),
        ({"block_size": 1}, "block_size must be in 2..512, got 1"),
        ({"mask_token_id": 61}, r"mask id must be in the vocabulary 0\.\.60, got 61"),
        ({"mask_token_id": -1}, r"mask id must be in the vocabulary 0\.\.60, got -1"),
        ({"taps": ()}, "at least one tapped"),
        ({"taps": (0, 3)}, r"taps must be target layers 0\.\.2, got 3"),
        ({"taps": (-1,)}, r"taps must be target layers 0\.\.2, got -1"),
        ({"windows": (4,)}, "2 layers need as many windows"),
        ({"windows": (4, 5)}, "windows must be of one size"),
        ({"windows": (0, None)}, "windows must be of one size, in 1.."),
        ({"windows": (1 << 31, None)}, "windows must be of one size, in 1.."),
        ({"block_size": 10**30}, "block_size must be in 2..512"),
        ({"draft_vocab_size": 0}, r"draft_vocab_size must be in 1\.\.61, got 0"),
        ({"draft_vocab_size": 62}, r"draft_vocab_size must be in 1\.\.61, got 62"),
    ],
)
def test_heads_that_cannot_be(changes, message):
    with pytest.raises(HeadError, match=message):
        config(**changes)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((0, 4), "the correction's gru_size must be in 1..1073741824, got 0"),
        ((4, 0), "the correction's rank must be in 1..1073741824, got 0"),
        ((4, 4, -1), "the correction's prefix must be in 0..1073741824, got -1"),
    ],
)
def test_corrections_that_cannot_be(sizes, message):
    with pytest.raises(HeadError, match=message):
        Correction(*sizes)


def test_how_far_a_head_drafts():
    assert (config().depth, config(shift_labels=True).depth) == (4, 5)


def test_a_new_head_takes_after_its_target(tiny_model):
    target, _ = tiny_model("llama", num_layers=3)
    head = config_for(target, mask_token_id=60, taps=(0, 2), causal=False, num_layers=2)
    assert head.depth == 7 and not head.causal and head.windows == (None, None)
    assert head.stack.head_dim == target.head_dim and head.rope_theta == target.rope_theta
    assert hash(head) == hash(dataclasses.replace(head))
    check_pair(head, target, "0123")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 64}, "target of hidden_size 64, this target's is 32"),
        ({"vocab_size": 128}, "target of vocab_size 128, this target's is 61"),
        ({"target_layers": 4}, "target of layer count 4, this target's is 3"),
        ({"target_fingerprint": "abc"}, "trained on target abc, this one is 0123"),
    ],
)
def test_a_head_of_another_target(tiny_model, changes, message):
    target, _ = tiny_model(num_layers=3)
    with pytest.raises(HeadError, match=message):
        check_pair(config(**changes), target, "0123")
    check_pair(config(target_fingerprint="0123"), target, "0123")
    check_pair(config(target_fingerprint="abc"), target)
