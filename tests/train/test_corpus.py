import dataclasses
import json

import numpy as np
import pytest
from tiny_target import EOS, TEMPLATE, write_target

import jspec
from jspec.recording import text_taps
from jspec.state import Plan
from jspec.train import text
from jspec.train.corpus import store_answers, turn_end
from jspec.train.data import read_libraries
from jspec.train.text import TextConfig, keeper

TAPS = (0, 2)
MOST = 12  # new tokens
ANSWERS = {"A": "HELLO", "BB": "Q", "C" * 99: "TOO LONG A PROMPT", "DDD": "A" * 50, "EE": "17"}


@pytest.fixture(scope="module")
def target(tiny_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    return jspec.load(write_target(folder, tiny_model, num_layers=2, eos_ids=(20, EOS)))


def prompts_file(folder, rows):
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_given_answers_are_stored_as_written_ones_are(target, tmp_path):
    rows = [{"prompt": prompt, "answer": answer} for prompt, answer in ANSWERS.items()]
    file = prompts_file(tmp_path, rows)
    config = TextConfig(
        turns=0,
        prompts=file,
        answers="given",
        max_new_tokens=MOST,
        max_prompt_tokens=40,
        shard=3,
    )
    given, said = jspec.read_prompts(file), []
    store_answers(target, config, tmp_path / "a", TAPS, given, lambda *x: said.append(x))
    assert [x[:2] for x in said] == [("answers", 4)] * 4
    texts, taps = read_libraries([tmp_path / "a"], target.fingerprint)
    assert taps == TAPS
    found = {}
    plan = Plan(target.config, keeper(TAPS))
    for one in texts:
        answer = one.tokens[one.start :]
        found[tuple(one.tokens[: one.start].tolist())] = answer.tolist()
        slow = text_taps(plan, {"target": target.params}, one.tokens, TAPS)
        np.testing.assert_allclose(one.taps, slow, rtol=2e-3, atol=2e-3)
        assert one.taps.dtype == np.float16
    expected = {}
    for prompt in given:
        if len(ids := jspec.encode_prompt(target, prompt)) <= config.max_prompt_tokens:
            answer = target.tokenizer.encode(prompt.answer, add_special_tokens=False)
            expected[tuple(ids)] = [*answer, 20][:MOST]
    assert found == expected
    # The order is that of written text: a seeded one of all prompts that are short enough.
    ordered = text.in_order(target, config, given)
    assert [t.tokens[: t.start].tolist() for t in texts] == [ids for _, ids in ordered]

    # What a kill took is made again; another choice of answers is another library.
    whole = {path: path.read_bytes() for path in (tmp_path / "a").glob("t*/*")}
    (tmp_path / "a" / "text" / "00001.npz").unlink()
    store_answers(target, config, tmp_path / "a", TAPS, given)
    assert whole == {path: path.read_bytes() for path in (tmp_path / "a").glob("t*/*")}
    written = dataclasses.replace(config, answers="written")
    with pytest.raises(ValueError, match=r"another config \(answers differ\)"):
        text.write_text(target, written, tmp_path / "a", TAPS, given)
    said.clear()
    store_answers(target, config, tmp_path / "bare", (), given, lambda *x: said.append(x))
    bare, taps = read_libraries([tmp_path / "bare"], target.fingerprint)
    assert taps == () and len(said) == 4 and bare[0].taps is None
    for a, b in zip(bare, texts, strict=True):
        np.testing.assert_equal(a.tokens, b.tokens)


def test_answers_that_are_missing_are_asked_for(target, tmp_path):
    rows = [{"id": "x", "prompt": "A", "answer": "B"}, {"id": "y", "prompt": "C", "answer": 7}]
    file = prompts_file(tmp_path, rows)
    config = TextConfig(turns=0, prompts=file, answers="given")
    with pytest.raises(
        ValueError, match=r"prompt 'y' \(.*line 2\) has no \"answer\" that is a text"
    ):
        store_answers(target, config, tmp_path / "a", (), jspec.read_prompts(file))
    assert not (tmp_path / "a").exists()
    with pytest.raises(ValueError, match="needs a file of prompts"):
        TextConfig(answers="given")


@pytest.mark.parametrize(
    ("after", "ends", "end"),
    [("", (20, EOS), 20), ("</s>", (20, EOS), EOS), ("</s>", (99, 20), 20)],
)
def test_the_end_of_a_turn_is_the_templates(tiny_model, tmp_path, after, ends, end):
    template = TEMPLATE.replace("{% endfor %}", after + "{% endfor %}")
    target = jspec.load(write_target(tmp_path, tiny_model, template, eos_ids=ends))
    assert turn_end(target) == end


def test_a_target_without_an_end_is_refused(tiny_model, tmp_path):
    target = jspec.load(write_target(tmp_path, tiny_model))
    endless = dataclasses.replace(target, config=dataclasses.replace(target.config, eos_ids=()))
    with pytest.raises(ValueError, match="no end token"):
        turn_end(endless)
