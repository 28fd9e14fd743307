import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from drafters import echo
from tiny_target import BOS, EOS, write_target

import jspec
from jspec.text import Typist, encode_prompt, target_stops

PROMPTS = ["HELLO THERE", "A", "1,2,1,2,1,2,1", "WHO ARE YOU? WHO ARE YOU?"]


@pytest.fixture(scope="module")
def target(tiny_model, tmp_path_factory):
    return jspec.load(write_target(tmp_path_factory.mktemp("tiny"), tiny_model))


def texts(answers):
    return [one.text for one in answers]


@pytest.mark.parametrize(
    ("method", "batch", "temperature"),
    [(None, 2, 0.0), (jspec.token_recycling(4), 1, 0.9)],
)
def test_every_method_gives_the_targets_own_text(target, method, batch, temperature):
    def answers(method, batch):
        return jspec.generate_text(
            target, PROMPTS, method, temperature=temperature, seed=5, batch=batch
        )

    plain, ours = answers(jspec.ar(), 1), answers(method, batch)
    assert texts(ours) == texts(plain)
    assert [one.id for one in ours] == ["1", "2", "3", "4"]
    assert all(1 <= len(one.finished.tokens) <= 128 for one in ours)


def test_a_head_drafts_where_one_is_given(target):
    config = jspec.config_for(target.config, mask_token_id=63, taps=(0,), block_size=3)
    params = jspec.init_head(config, jax.random.key(0))
    head = jspec.Head(config, params, "new", "0f")
    assert jspec.default_method(head).name == "ddtree"
    more = dataclasses.replace(head.config, correction=jspec.Correction(4, 2))
    corrected = dataclasses.replace(head, config=more)
    assert jspec.default_method(corrected, 6) is jspec.dartree(more, 6)
    plain, ours = (
        jspec.generate_text(target, PROMPTS[:2], method, head=head, max_new_tokens=16)
        for method in (jspec.ar(), jspec.dflash(config, 3))
    )
    assert texts(ours) == texts(plain)
    assert all(x.finished.verified == 3 * x.finished.rounds for x in ours)  # all were drafted
    with pytest.raises(ValueError, match='weights of the head that jetspec has, as "head"'):
        jspec.generate_text(target, PROMPTS, jspec.jetspec(config, 3))


def test_the_seed_and_the_filters_reach_the_draws(target, monkeypatch):
    def one(**options):
        method = jspec.token_recycling(4)
        return texts(jspec.generate_text(target, PROMPTS[0], method, **options))

    assert one(seed=1, temperature=0.9) != one(seed=2, temperature=0.9)
    assert one(seed=1, temperature=0.9) == one(seed=1, temperature=0.9)
    seen = []
    monkeypatch.setattr(
        "jspec.text.decode_all", lambda plan, *args, **options: (seen.append(plan), ([], None))[1]
    )
    one(temperature=0.5, top_p=0.9, top_k=7, min_p=0.1)
    assert seen[0].sampling == jspec.Sampling(temperature=0.5, top_p=0.9, top_k=7, min_p=0.1)


def test_prompts_of_every_kind(target):
    turn = {"role": "user", "content": "HI"}
    same = [
        "HI",
        [turn],
        jspec.user_turn("x", "HI"),
        jspec.Prompt("y", text="<user>HI<A>"),
    ]
    answers = jspec.generate_text(target, same)
    assert len(set(texts(answers))) == 1
    assert [one.id for one in answers] == ["1", "2", "x", "y"]
    for single in same:
        assert texts(jspec.generate_text(target, single)) == texts(answers)[:1]
    assert jspec.generate_text(target, []) == []


def test_an_empty_prompt_is_the_begin_token(target):
    empty, bos, one = jspec.generate_text(
        target, [jspec.Prompt("a", text=t) for t in ("", "<s>", "A")], max_new_tokens=5
    )
    assert empty.text == bos.text
    assert [x.finished.prompt_tokens for x in (empty, bos, one)] == [1, 1, 1]
    assert jspec.encode_prompt(target, jspec.Prompt("a", text="")) == [BOS]
    target.tokenizer.bos_id, bos_id = None, target.tokenizer.bos_id
    assert jspec.encode_prompt(target, jspec.Prompt("a", text="")) == [EOS]
    target.tokenizer.bos_id = bos_id


def test_without_a_chat_template_a_lone_user_turn_is_raw_text(tiny_model, tmp_path):
    target = jspec.load(write_target(tmp_path / "raw", tiny_model, template=None))
    raw = jspec.encode_prompt(target, jspec.Prompt("a", text="HI"))
    assert jspec.encode_prompt(target, jspec.user_turn("a", "HI")) == raw
    system = jspec.Prompt("a", messages=({"role": "system", "content": "HI"},))
    with pytest.raises(ValueError, match="prompt 'a': the target has no chat template"):
        jspec.encode_prompt(target, system)


@pytest.fixture(scope="module")
def knowing(target):
    """A method that drafts the target's own text, so that rounds emit 4 tokens; and that text's tokens."""
    ids = jspec.encode_prompt(target, jspec.user_turn("1", "ABC"))
    plan, never = jspec.Plan(target.config, jspec.ar()), jspec.stop_table(64, [])
    (answer,), _ = jspec.decode_all(
        plan, {"target": target.params}, [ids], max_new_tokens=100, stops=never
    )
    tokens, inner = answer.tokens, echo(4, 3)
    text = jnp.asarray([*ids, *tokens])
    method = inner._replace(
        propose=lambda params, *rest: inner.propose({**params, "text": text}, *rest)
    )
    return method, tokens


def test_an_end_token_inside_an_accepted_path(target, knowing):
    method, tokens = knowing
    fresh = [i for i, token in enumerate(tokens) if i and token not in tokens[:i]]
    cuts = {i % 4: i for i in fresh}
    assert set(cuts) == {0, 1, 2, 3}  # at each place of a path; at the last one it is the bonus
    plan = jspec.Plan(target.config, method)
    ids = jspec.encode_prompt(target, jspec.user_turn("1", "ABC"))
    for cut in cuts.values():
        stops = jspec.stop_table(64, [tokens[cut]])
        (ours,), _ = jspec.decode_all(
            plan, {"target": target.params}, [ids], max_new_tokens=100, stops=stops
        )
        assert ours.tokens == tokens[: cut + 1]
        assert ours.trace == [4] * (cut // 4 + 1)
    config = dataclasses.replace(target.config, eos_ids=(tokens[cut],))
    ending = dataclasses.replace(target, config=config)
    assert (jspec.target_stops(ending) == stops).all()
    shown = jspec.shown_text(ending, ours.tokens)
    assert shown == target.tokenizer.decode(tokens[:cut]) != target.tokenizer.decode(ours.tokens)


@pytest.mark.parametrize("at", [17, 18, 19, 20])
def test_a_stop_string_inside_an_accepted_path(target, knowing, at):
    method, tokens = knowing
    decode = target.tokenizer.decode
    stop = decode(tokens[at : at + 3])
    begin = decode(tokens).index(stop)  # it may stand earlier; a token is a character here
    (ours,) = jspec.generate_text(target, "ABC", method, stop=stop)
    assert ours.text == decode(tokens[:begin])
    assert ours.finished.tokens == tokens[: begin + 3]


@pytest.mark.parametrize("most", [1, 2, 3, 4, 5, 8, 13])
def test_the_limit_is_kept_inside_an_accepted_path(target, knowing, most):
    method, tokens = knowing
    (ours,) = jspec.generate_text(target, "ABC", method, max_new_tokens=most)
    assert ours.finished.tokens == tokens[:most]
    assert ours.finished.rounds == -(-most // 4)


def test_a_tokenizer_with_more_tokens_than_the_model(target):
    config = dataclasses.replace(target.config, vocab_size=20, eos_ids=(-1, 19, 61))
    small = dataclasses.replace(target, config=config)
    with pytest.raises(ValueError, match=r"^prompt 'x' has the token \d+, .* ends at 19$"):
        encode_prompt(small, jspec.Prompt("x", text="HI"))
    assert encode_prompt(small, jspec.Prompt("x", text="")) == [0]  # the begin token is beyond
    table = target_stops(small, ["1"])
    assert table.shape == (1, 20) and [i for i in range(20) if table[0, i]] == [16, 19]


def test_the_context_ends_an_answer(target):
    long = "CD" * 90
    prompt = jspec.encode_prompt(target, jspec.Prompt("1", text=long))
    for method in (jspec.ar(), None):
        (one,) = jspec.generate_text(target, jspec.Prompt("1", text=long), method)
        assert len(one.finished.tokens) == 200 - len(prompt)


def test_wrong_arguments(target):
    def refused(match, prompt="A", **options):
        with pytest.raises(ValueError, match=match):
            jspec.generate_text(target, prompt, **options)

    refused("temperature must be 0 or at least", temperature=-1.0)
    refused(r"top_p must be in \(0, 1\]", top_p=0.0)
    refused("max_new_tokens must be 1 or above", max_new_tokens=0)
    refused("batch must be 1 or above", batch=0)
    refused("strings must not have an empty one", stop="")
    refused("prompt '2' has 200 tokens, .* at most 199", prompt=["A", "A" * 195])
    refused("prompt 'b' .* has 300 tokens", jspec.Prompt("b", text="A" * 300, where="f, line 2"))
    refused("seed must be in 0", seed=-1)
    refused("seed must be in 0", seed=1 << 32)
    refused("prompts: .* is no text", prompt=["A", {"role": "user"}])
    refused("prompts: .* is no text", prompt=["\ud800"])
    jspec.generate_text(target, ["A" * 190], max_new_tokens=1)


def test_messages_alone_and_in_company(target):
    turn = {"role": "user", "content": "HI"}
    same = jspec.generate_text(target, "HI", max_new_tokens=4)[0].text
    for prompts in ([turn], [[turn]], ["HI"], ("HI",)):
        (one,) = jspec.generate_text(target, prompts, max_new_tokens=4)
        assert one.text == same
    both = jspec.generate_text(target, ["HI", turn], max_new_tokens=4)
    assert [one.text for one in both] == [same, same]


def test_a_typist_gives_out_settled_text_once(target):
    tokens = target.tokenizer.encode("ONE-STOPTWO-STOP!-NEVER")
    typist = Typist(target, ["STOP!", "P?"])
    pieces = [typist.add([token]) for token in tokens]
    pieces.append(typist.add([], last=True))
    assert "".join(pieces) == typist.text == "ONE-STOPTWO-"
    assert pieces[:4] == ["O", "N", "E", "-"]
    assert pieces[4:9] == ["", "", "", "", "STOPT"]  # the stop string is given up at the T
    typist = Typist(target, ["STOP!"])
    assert typist.add(tokens[:8]) + typist.add([EOS], last=True) == "ONE-STOP"


def test_a_typist_waits_for_whole_characters(smollm2):
    text = "héllo 🦙 世界"
    typist = Typist(smollm2)
    pieces = [typist.add([token]) for token in smollm2.tokenizer.encode(text)]
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)
    assert "" in pieces  # half a llama
    broken = smollm2.tokenizer.encode("🦙")[:1]
    assert Typist(smollm2).add(broken, last=True) == smollm2.tokenizer.decode(broken)


def test_public_names_are_there_and_no_function_hides_a_module():
    for name in jspec.__all__:
        assert hasattr(jspec, name)
    assert jspec.tree.Tree is jspec.Tree
    modules = {path.stem for path in Path(jspec.__file__).parent.glob("*.py")}
    assert not modules & set(jspec.__all__)
