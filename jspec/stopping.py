"""Stop tokens and stop strings as one automaton over tokens, so that the device can tell where a text ends."""

from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np
from jaxtyping import Int32


def stop_table(
    vocab: int,
    stop_ids: Iterable[int],
    strings: Sequence[str] = (),
    token_bytes: Sequence[bytes] | None = None,
) -> Int32[np.ndarray, "S V"]:
    """The next state by state and token; row 0 is the start, and the value S means stop.

    A text stops with the token that is one of ``stop_ids``, or that completes a stop string, be it in the token's
    middle. The automaton is Aho and Corasick's (1975) over UTF-8 bytes, followed along the bytes of each token.

    Args:
      vocab: V, the target's.
      stop_ids: tokens that stop.
      strings: strings that stop.
      token_bytes: what each token adds to the text; ids beyond its end add nothing. Needed for strings only.

    Raises:
      ValueError: a stop id outside the vocabulary, an empty string, strings without ``token_bytes`` or more
        ``token_bytes`` than V.
    """
    ids = np.array(list(stop_ids), np.int64)
    if wrong := [int(i) for i in ids if not 0 <= i < vocab]:
        raise ValueError(f"stop_ids must be in 0..{vocab - 1}, got {wrong[0]}")
    if "" in strings:
        raise ValueError("strings must not have an empty one: it would stop every text at once")
    if strings and token_bytes is None:
        raise ValueError("token_bytes must be given where there are stop strings")
    if strings and len(token_bytes) > vocab:
        raise ValueError(f"token_bytes must be at most {vocab}, got {len(token_bytes)}")
    by_byte = _automaton([s.encode() for s in strings])
    states = len(by_byte) - 1
    table = np.repeat(np.arange(states, dtype=np.int32)[:, None], vocab, axis=1)
    if strings:
        lengths = np.array([len(x) for x in token_bytes])
        order = np.argsort(
            -lengths, kind="stable"
        )  # longest first: those with an i-th byte come first
        starts = (np.cumsum(lengths) - lengths)[order]
        text = np.frombuffer(b"".join(token_bytes), np.uint8)
        at = np.repeat(np.arange(states, dtype=np.int32)[:, None], len(lengths), axis=1)
        for i in range(lengths.max(initial=0)):
            more = np.count_nonzero(lengths > i)
            at[:, :more] = by_byte[at[:, :more], text[starts[:more] + i]]
        table[:, order] = at
    table[:, ids] = states
    return table


def _automaton(strings):
    """Next state by state and byte, int32[S + 1, 256]; S, where a string is complete, is never left."""
    children, stops = [{}], [False]
    for string in strings:
        state = 0
        for byte in string:
            if byte not in children[state]:
                children[state][byte] = len(children)
                children.append({})
                stops.append(False)
            state = children[state][byte]
        stops[state] = True
    table = np.zeros((len(children), 256), np.int32)
    suffix = [0] * len(children)  # the state of the longest proper suffix that is one
    queue = deque([0])
    while queue:
        state = queue.popleft()
        if state:
            table[state] = table[suffix[state]]
            stops[state] |= stops[suffix[state]]
        for byte, child in children[state].items():
            suffix[child] = int(table[state, byte]) if state else 0
            table[state, byte] = child
            queue.append(child)
    going = np.flatnonzero(~np.array(stops))
    number = np.full(len(children), len(going), np.int32)
    number[going] = np.arange(len(going))
    return np.concatenate([number[table[going]], np.full((1, 256), len(going), np.int32)])


def cut_at(text: str, strings: Iterable[str]) -> str:
    """The text up to the first place where one of the stop strings begins; all of it where there is none."""
    return text[: min((i for s in strings if (i := text.find(s)) >= 0), default=len(text))]
