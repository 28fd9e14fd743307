import dataclasses
import json

import pytest

from jspec.benches import BENCHES, BUILT_IN, Prompt, load_bench, read_prompts, user_turn


@pytest.mark.parametrize(
    ("name", "size", "first_id", "begins", "contains"),
    [
        ("humaneval", 164, "HumanEval/0", "Complete this", "```python\nfrom typing import List\n"),
        ("gsm8k", 100, "gsm8k-test-0013", "Melanie is a", "\n\nWork it out step by step"),
        ("mtbench", 80, "mtbench/81", "Compose an engaging", "must-see attractions."),
        ("math", 311, None, "", "\\boxed{}"),
    ],
)
def test_benches_are_whole(name, size, first_id, begins, contains):
    prompts = load_bench(name)
    assert len(prompts) == len({prompt.id for prompt in prompts}) == size
    assert first_id in (None, prompts[0].id)
    for prompt in prompts:
        (message,) = prompt.messages
        assert message["role"] == "user" and message["content"].strip() == message["content"]
        assert prompt.text is None
    first = prompts[0].messages[0]["content"]
    assert first.startswith(begins) and contains in first
    assert load_bench(name, limit=3) == prompts[:3]


def test_prompts_fit_the_default_target(smollm2):
    for prompt in [*BUILT_IN, *(load_bench(name, 2)[1] for name in BENCHES)]:
        ids = prompt.encode(smollm2.tokenizer)
        text = smollm2.tokenizer.decode(ids, skip_special=False)
        assert prompt.messages[0]["content"] in text
        assert text.endswith("<|im_start|>assistant\n")


def test_raw_text_has_no_template(smollm2):
    assert (
        smollm2.tokenizer.decode(Prompt("a", text="def f(").encode(smollm2.tokenizer)) == "def f("
    )
    assert Prompt("empty", text="").encode(smollm2.tokenizer) == []


def test_built_in_prompts_are_few_and_distinct():
    assert 3 <= len(BUILT_IN) <= 6
    assert len({prompt.id for prompt in BUILT_IN}) == len(BUILT_IN)


def test_an_unknown_bench_or_limit():
    with pytest.raises(ValueError, match="no bench 'mmlu': there are humaneval, gsm8k"):
        load_bench("mmlu")
    with pytest.raises(ValueError, match="limit must be at least 1, got 0"):
        load_bench("math", 0)


def test_a_file_of_prompts(tmp_path):
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    rows = [
        {"id": "a", "prompt": "Hi \u2028 there"},
        {"id": 7, "messages": messages},
        {"text": "raw", "note": "further keys are ignored", "answer": 42},
        {"id": "empty", "prompt": "", "answer": "Nothing."},
    ]
    path = tmp_path / "prompts.jsonl"
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    path.write_text("\n\n".join(lines) + "\n\n", encoding="utf-8")
    assert (
        read_prompts(path)
        == read_prompts(str(path))
        == [
            user_turn("a", "Hi \u2028 there"),
            Prompt("7", messages=tuple(messages)),
            Prompt("5", text="raw"),
            dataclasses.replace(user_turn("empty", ""), answer="Nothing."),
        ]
    )


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "not json",
        "[]",
        "3",
        "null",
        '{"id": "x"}',
        '{"prompt": 3}',
        '{"prompt": "a", "text": "b"}',
        '{"text": null}',
        '{"messages": []}',
        '{"messages": "hi"}',
        '{"messages": [{"role": "user"}]}',
        '{"messages": [{"role": "user", "content": 3}]}',
        '{"id": "\\ud800", "prompt": "HI"}',
        '{"prompt": "\\ud800"}',
        "[" * 100_000,
    ],
)
def test_a_malformed_line_is_named(tmp_path, line):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "fine"}\n\n' + line + "\n")
    with pytest.raises(ValueError, match=r"prompts\.jsonl, line 3: ") as caught:
        read_prompts(path)
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read(tmp_path):
    with pytest.raises(ValueError, match=r"cannot read prompts from .*none"):
        read_prompts(tmp_path / "none")
    (tmp_path / "blank").write_text("\n\n")
    with pytest.raises(ValueError, match="has no prompts"):
        read_prompts(tmp_path / "blank")
    (tmp_path / "latin").write_bytes(b'{"prompt": "a"}\n{"prompt": "\xff"}')
    with pytest.raises(ValueError, match=r"latin, line 2: .*utf-8"):
        read_prompts(tmp_path / "latin")


def test_marks_and_line_ends_of_other_systems(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n{"id": null, "prompt": "b"}\r\n')
    assert [prompt.id for prompt in read_prompts(path)] == ["1", "2"]
