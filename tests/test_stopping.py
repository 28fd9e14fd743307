"""The automaton against a search in the decoded bytes."""

import numpy as np
import pytest

from jspec.stopping import cut_at, stop_table


def stops_at(table, tokens):
    """How many tokens are read until the automaton says stop; None: never."""
    state = 0
    for i, token in enumerate(tokens):
        state = int(table[state, token])
        if state == len(table):
            return i + 1
    return None


def expected(stop_ids, strings, token_bytes, tokens):
    text = b""
    for i, token in enumerate(tokens):
        text += token_bytes[token]
        if token in stop_ids or any(s.encode() in text for s in strings):
            return i + 1
    return None


def pieces(alphabet, rng, count):
    """Random tokens over an alphabet of byte strings, an empty one among them."""
    return [b""] + [b"".join(rng.choice(alphabet, rng.integers(1, 5))) for _ in range(count - 1)]


BYTES = np.array([b"a", b"b"])
EURO = np.array([bytes([x]) for x in "€é".encode()])  # tokens that end inside a character


@pytest.mark.parametrize(
    "alphabet, strings",
    [
        (BYTES, ("aab",)),
        (BYTES, ("abaab", "baba", "bb")),
        (BYTES, ("aabaa", "aba")),  # the second is complete inside the first
        (BYTES, ("a", "ab")),
        (BYTES, ("bbbbbbbbb", "abababababab")),
        (EURO, ("€", "é€")),
        (EURO, ("€é€",)),
        (BYTES, ()),
    ],
)
def test_equals_a_search_in_the_text(alphabet, strings):
    rng = np.random.default_rng(len(alphabet) * 100 + len("".join(strings)))
    vocab = 12
    outcomes = set()
    for _ in range(60):
        token_bytes = pieces(alphabet, rng, vocab - 2)
        stop_ids = rng.choice(vocab, rng.integers(0, 2), replace=False).tolist()
        table = stop_table(vocab, stop_ids, strings, token_bytes)
        assert table.dtype == np.int32 and table.min() >= 0 and table.max() <= len(table)
        token_bytes += [b"", b""]
        tokens = rng.integers(0, vocab, rng.integers(0, 14)).tolist()
        want = expected(stop_ids, strings, token_bytes, tokens)
        assert stops_at(table, tokens) == want
        outcomes.add(want is None)
    assert outcomes == {True, False}


def test_overlaps_and_spans():
    letters = [bytes([c]) for c in range(256)]
    table = stop_table(260, (), ("aab",), letters)
    assert table.shape == (3, 260)
    assert stops_at(table, b"aaab") == 4
    assert stops_at(table, b"aacaab") == 6
    assert stops_at(table, [97, 97, 259, 98]) == 4  # a token without bytes is passed over
    one = stop_table(2, (), ("aab",), [b"xaaaby", b"b"])
    assert stops_at(one, [0]) == 1


def test_stop_ids_alone():
    np.testing.assert_array_equal(stop_table(4, (1, 3)), [[0, 1, 0, 1]])
    np.testing.assert_array_equal(stop_table(3, ()), [[0, 0, 0]])


def test_large_vocabulary():
    rng = np.random.default_rng(0)
    vocab = 150_000
    joined = rng.integers(97, 123, vocab * 6).astype(np.uint8).tobytes()
    token_bytes = [joined[6 * i : 6 * i + 1 + i % 9] for i in range(vocab)]
    strings = ("\n\nQuestion: the next", "abcdefghijklmnopqrst")
    table = stop_table(vocab, (2,), strings, token_bytes)
    ends = [i for i, b in enumerate(token_bytes) if b.endswith(b"ab")]
    starts = [i for i, b in enumerate(token_bytes) if b.startswith(b"cdefg")]
    assert table.shape == (20 + 19, vocab) and ends
    assert {int(table[0, i]) for i in ends} == {int(table[0, ends[0]])} != {0}
    assert all(table[table[0, ends[0]], i] > 0 for i in starts)


def test_cut_at():
    assert cut_at("one two three", ["three", "two"]) == "one "
    assert cut_at("one", ["two"]) == "one"
    assert cut_at("one", []) == "one"
    assert cut_at("aaab", ["aab"]) == "a"


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((4, (4,)), r"stop_ids must be in 0\.\.3, got 4"),
        ((4, (-1,)), r"stop_ids must be in 0\.\.3, got -1"),
        ((4, (), ("a", ""), [b"a"]), "strings must not"),
        ((4, (), ("a",)), "token_bytes must be given"),
        ((1, (), ("a",), [b"a", b"b"]), "token_bytes must be at most 1, got 2"),
    ],
)
def test_refuses_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        stop_table(*arguments)
