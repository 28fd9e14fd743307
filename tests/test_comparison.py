import pytest
from tiny_target import write_target

import jspec
from jspec import comparison
from jspec.comparison import Comparison, Lane
from jspec.driver import Event


def fake_events(finishing):
    """One event a prompt and a last one, for prompts in the order in which they finish."""
    for index in finishing:
        yield Event(index, [1], None)
        yield Event(index, [2], jspec.Finished(index, 1, [1, 2], 1, 2, 1, [], [], [], [2]))


def test_a_lane_goes_on_where_its_last_turn_ended():
    made = []

    def make():
        made.append(True)
        return fake_events([1, 0, 2])

    lane = Lane(make)
    assert not made
    assert [e.index for e in lane.turn(2)] == [1, 1, 0, 0]
    assert [one.index for one in lane.outcomes] == [1, 0]
    assert [e.index for e in lane.turn(2)] == [2, 2]
    assert list(lane.turn(2)) == [] and made == [True]


@pytest.fixture(scope="module")
def tiny(tiny_model, tmp_path_factory):
    target = jspec.load(write_target(tmp_path_factory.mktemp("tiny"), tiny_model))
    ids = [target.tokenizer.encode(text) for text in ("ABAB", "C", "HELLO", "1,2,1,2,1")]
    return target, ids


def compare(target, ids, plan=None, **options):
    plan = plan or jspec.Plan(target.config, jspec.prompt_lookup(2))
    return Comparison(plan, {"target": target.params}, ids, max_new_tokens=12, **options)


@pytest.mark.parametrize("batch", [1, 3])
def test_both_decode_everything_in_turns(tiny, monkeypatch, batch):
    target, ids = tiny
    order = []
    turn = Lane.turn

    def watched(lane, prompts):
        order.append((lane, prompts))
        return turn(lane, prompts)

    monkeypatch.setattr(Lane, "turn", watched)
    run = compare(target, ids, batch=batch)
    events = list(run)
    rounds = -(-len(ids) // batch)
    assert order == [(run.ours, batch), (run.reference, batch)] * rounds
    assert [one.index for one in run.ours.outcomes] == [0, 1, 2, 3]
    assert [one.index for one in run.reference.outcomes] == [0, 1, 2, 3]
    for mine, plain in zip(run.ours.outcomes, run.reference.outcomes):
        assert mine.tokens == plain.tokens
        assert mine.tokens == [t for e in events if e.index == mine.index for t in e.tokens]
        assert plain.rounds == len(plain.tokens)
    assert run.differences == [None] * 4
    assert run.ours.stream.decode_seconds > 0 < run.reference.stream.decode_seconds


def test_without_a_baseline(tiny):
    run = compare(*tiny, baseline=False).run()
    assert run.reference is None and run.differences is None
    assert len(run.ours.outcomes) == 4


def test_a_difference_is_found_and_located(tiny, monkeypatch):
    target, ids = tiny
    stream = comparison.Stream

    def other(plan, params, *args, **options):
        """The baseline has a target of its own, as if the method had changed the text."""
        if plan.method is jspec.ar():
            norm = -params["target"]["norm"]
            params = {"target": {**params["target"], "norm": norm}}
        return stream(plan, params, *args, **options)

    monkeypatch.setattr(comparison, "Stream", other)
    run = compare(target, ids[:2]).run()
    for mine, plain, difference in zip(
        run.ours.outcomes, run.reference.outcomes, run.differences, strict=True
    ):
        at = difference.position
        assert mine.tokens[:at] == plain.tokens[:at] and mine.tokens[at] != plain.tokens[at]
        assert difference.gap > 0
