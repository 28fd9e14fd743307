from jspec.heads.config import Correction
from jspec.train.card import model_card
from jspec.train.options import HeadOptions, TrainOptions
from tests.heads.samples import config, head_and_target

ROWS = [
    {"step": 500, "tree": 1.5, "chain": 1.25, "seconds": 30.0},
    {"step": 1000, "tree": 1.75, "chain": 1.5, "seconds": 60.0},
]


def card(log=ROWS, best=1000, libraries=({"turns": 7, "prompts": None, "taps": [3]},), **changes):
    kind = config(target_fingerprint="0f", **changes)
    head, _ = head_and_target(kind)
    options = TrainOptions(head=HeadOptions(mask_token="<|mask|>"))
    return model_card(options, kind, head, "bfloat16", "float32", libraries, 5, 1234, log, best)


def test_what_a_card_says():
    text = card()
    assert text.startswith("# A JetSpec head for smollm2-135m\n")
    assert "smollm2-135m, fingerprint 0f" in text and "smollm2-135m --head DIR" in text
    assert "a causal block of 5 slots" in text
    assert "5 texts with 1,234 tokens of answers, written by the target:" in text
    assert "| turns | 7 |" in text and "None" not in text and "| taps |" not in text
    assert "these are the weights of step 1,000" in text
    assert "1.5 minutes for the steps" in text
    assert "- 1.750 with the best trees" in text and "- 1.500 with chains of 5 nodes" in text
    assert r"`<\|mask\|>`, id 60" in text  # as it must be written in a table
    assert "float32 in products" in text and "Licence" not in text  # that is for its maker to say
    assert text == card()


def test_cards_of_other_heads():
    text = card(causal=False, draft_vocab_size=23)
    assert text.startswith("# A DFlash head") and "--head DIR" in text
    assert "a bidirectional block" in text and "23 of the target's 61 tokens" in text
    given = card(libraries=({"turns": 7}, {"answers": "given"}))
    assert "tokens of answers, whose answers were given" in given


def test_a_card_of_domino():
    text = card(causal=False, shift_labels=True, correction=Correction(12, 5))
    assert text.startswith("# A Domino head") and "--head DIR" in text
    assert "a GRU of width 12 and a projection of rank 5, from draft 2 on" in text
    assert "drafts the token after its own place" in text and "falls from 1 to 0 in 1 of" in text
    assert "(`dartree`)" in text and "chains of 6 nodes (`domino`)" in text
    assert "correction" not in card()


def test_figures_that_a_log_lacks_are_left_out():
    text = card(log=ROWS[:1])
    assert "Held-out" not in text and "0.5 minutes" in text
    assert "minutes" not in card(log=[])
