"""Training examples out of a library of text: which texts, which anchors, in which order.

Everything about a step follows from the seed and the step's number, so that a run that is resumed goes on as if it had
never been stopped.
"""

import contextlib
import dataclasses
import operator
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from jspec.method import check_range
from jspec.models.config import read_json


class Text(NamedTuple):
    """A prompt and its answer, from ``start`` on; taps of the tokens but the last, if the library has them."""

    tokens: Int[np.ndarray, " n"]
    start: int
    taps: Float[np.ndarray, "m T H"] | None


def read_texts(folder: Path) -> list[Text]:
    """The texts of a library that an anchor can stand in, in order; their taps stay on the disk until they are used.

    Raises:
      ValueError: no text, or a file that is damaged.
    """
    out = []
    for path in sorted((folder / "text").glob("*.npz")):
        states = folder / "taps" / f"{path.stem}.npy"
        with _readable(path), path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
            tokens, lengths, starts = (file[k] for k in ("tokens", "lengths", "starts"))
        with _readable(states):
            taps = np.load(states, mmap_mode="r", allow_pickle=False) if states.exists() else None
        for name, of in {"tokens": tokens, "lengths": lengths, "starts": starts}.items():
            if of.ndim != 1 or not np.issubdtype(of.dtype, np.integer):
                raise ValueError(f"{path} is damaged: its {name} must be a row of whole numbers")
        if len(starts) != len(lengths) or (lengths < 1).any() or lengths.sum() != len(tokens):
            raise ValueError(f"{path} is damaged: its lengths do not add up")
        if taps is not None and (taps.ndim != 3 or len(taps) != (lengths - 1).sum()):
            raise ValueError(f"{states} is damaged: it does not hold the states of {path.name}")
        ends = np.cumsum(lengths)
        for number, (end, length, start) in enumerate(zip(ends, lengths, starts, strict=True)):
            if length - start < 2 or start < 1:
                continue  # an answer of one token has nothing to draft
            rows = None if taps is None else taps[end - length - number :][: length - 1]
            out.append(Text(tokens[end - length : end].astype(np.int32), int(start), rows))
    if not out:
        raise ValueError(f"{folder} has no text of two tokens or more to train on")
    return out


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:  # of zipfile, zlib, tokenize, ...: of what reads a damaged file
        raise ValueError(f"{path} cannot be read: {error}") from None


def read_libraries(folders: Sequence[Path], target: str) -> tuple[list[Text], tuple[int, ...]]:
    """The texts of libraries, one after the other, and the taps that all of them keep.

    Args:
      folders: of the libraries.
      target: fingerprint of the target that wrote them.

    Raises:
      ValueError: no library, the same one twice, one of another target or with other taps than the first; and as
        ``read_texts``.
    """
    texts, kept = [], ()
    for number, folder in enumerate(folders):
        if folder.resolve() in [other.resolve() for other in folders[:number]]:
            raise ValueError(f"{folder} is given twice: its held-out texts would be trained on")
        try:
            said = read_json(folder / "text.json")
            taps = tuple(map(operator.index, said["taps"]))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{folder} is no library of text: {error}") from None
        if said.get("target") != target:
            raise ValueError(
                f"{folder} was written by target {said.get('target')}, this one is {target}"
            )
        if number and taps != kept:
            raise ValueError(
                f"{folder} keeps taps {taps}, {folders[0]} keeps {kept}: they must be the same"
            )
        kept = taps
        found = read_texts(folder)
        if taps and any(text.taps is None or text.taps.shape[1] != len(taps) for text in found):
            raise ValueError(f"{folder / 'taps'} lacks the taps of some of the texts")
        texts += found
    return texts, kept


def split(texts: Sequence[Text], held_out: int) -> tuple[list[Text], list[Text]]:
    """Texts for training, in order, and ``held_out`` others: the same ones for every run on these texts.

    A text that answers a held-out one's prompt is neither (libraries may have prompts in common).

    Raises:
      ValueError: not enough texts.
    """
    if held_out >= len(texts):
        raise ValueError(
            f"optim.held_out must be below the {len(texts)} texts there are, got {held_out}"
        )
    order = np.random.default_rng(0).permutation(len(texts))
    apart = [texts[i] for i in order[:held_out]]
    chosen, asked = set(order[:held_out].tolist()), set(map(_asked, apart))
    train = [text for i, text in enumerate(texts) if i not in chosen and _asked(text) not in asked]
    if not train:
        raise ValueError(
            f"optim.held_out: every other text answers the prompt of one of these {held_out}"
        )
    return train, apart


def _asked(text):
    """The prompt of a text; the whole of one that has only a first token before it."""
    return (text.tokens if text.start == 1 else text.tokens[: text.start]).tobytes()


@dataclasses.dataclass(frozen=True)
class BatchConfig:
    """The shape of a step.

    Attributes:
      texts: a step.
      anchors: a text, at most.
      lengths: texts are padded to one of these, and cut at the last.
      seed: of the order and the anchors.

    Raises:
      ValueError: a number out of range.
    """

    texts: int = 2
    anchors: int = 16
    lengths: tuple[int, ...] = (128, 256, 448)
    seed: int = 0

    def __post_init__(self):
        for name in ("texts", "anchors"):
            for most in (None, 1 << 16):
                check_range(name, getattr(self, name), 1, most)
        check_range("seed", self.seed, 0, 1 << 31)
        if (
            not self.lengths
            or sorted(set(self.lengths)) != list(self.lengths)
            or self.lengths[0] < 3
            or self.lengths[-1] > 1 << 20
        ):
            raise ValueError(f"lengths must ascend from 3 or above to 2^20, got {self.lengths}")


class Batch(NamedTuple):
    """R texts padded to S tokens, A anchors each, D slots an anchor. Padding: anchor -1, label -1.

    The taps' last axes are those of the library (0 and 0 where it keeps none), one row a token; those of a text's last
    token, which are nobody's context, are zeros.
    """

    tokens: Int[np.ndarray, "R S"]
    taps: Float[np.ndarray, "R S T H"]
    anchors: Int[np.ndarray, "R A"]
    labels: Int[np.ndarray, "R A D"]  # target ids


def epoch_of(texts: Sequence[Text], config: BatchConfig, epoch: int) -> list[np.ndarray]:
    """Which texts stand together in an epoch's steps: of one padded length, in a seeded order."""
    rng = np.random.default_rng((config.seed, epoch))
    sizes = np.searchsorted(config.lengths, [min(len(t.tokens), config.lengths[-1]) for t in texts])
    steps = []
    for size in range(len(config.lengths)):
        members = rng.permutation(np.flatnonzero(sizes == size))
        # What is left over of a length joins the next longer one, or else waits for another epoch.
        whole = len(members) // config.texts * config.texts
        steps += list(members[:whole].reshape(-1, config.texts))
        if size + 1 < len(config.lengths):
            sizes[members[whole:]] = size + 1
    if not steps:
        steps = [rng.integers(0, len(texts), config.texts)]  # fewer texts than a step takes
    return [steps[i] for i in rng.permutation(len(steps))]


def choose_anchors(
    text: Text, config: BatchConfig, depth: int, rng: np.random.Generator
) -> tuple[Int[np.ndarray, " A"], Int[np.ndarray, "A D"]]:
    """Random anchors in a text's answer (or the token before it), ascending, and the tokens after each."""
    end = min(len(text.tokens), config.lengths[-1])
    places = np.arange(text.start - 1, end - 1)
    count = min(config.anchors, len(places))
    anchors = np.full(config.anchors, -1, np.int32)
    labels = np.full((config.anchors, depth), -1, np.int32)
    if count:
        anchors[:count] = np.sort(rng.choice(places, count, replace=False))
        at = anchors[:count, None] + 1 + np.arange(depth)
        labels[:count] = np.where(at < end, text.tokens[np.minimum(at, end - 1)], -1)
    return anchors, labels


class Batches:
    """The steps' batches by their number: ``batches[n]`` is the n-th, for any n."""

    def __init__(self, texts: Sequence[Text], config: BatchConfig, depth: int):
        self._texts, self._config, self._depth = texts, config, depth
        self._epoch, self._steps = -1, []
        self.per_epoch = len(epoch_of(texts, config, 0))  # the same in every epoch

    def __getitem__(self, step: int) -> Batch:
        epoch, number = divmod(step, self.per_epoch)
        if epoch != self._epoch:
            self._epoch, self._steps = epoch, epoch_of(self._texts, self._config, epoch)
        texts = [self._texts[i] for i in self._steps[number]]
        longest = max(len(text.tokens) for text in texts)
        lengths = self._config.lengths
        width = next((size for size in lengths if size >= longest), lengths[-1])
        rng = np.random.default_rng((self._config.seed, epoch, number))
        tokens = np.zeros((len(texts), width), np.int32)
        kept = texts[0].taps
        shape, kind = ((0, 0), np.float16) if kept is None else (kept.shape[1:], kept.dtype)
        taps = np.zeros((len(texts), width, *shape), kind)
        anchors, labels = [], []
        for row, text in enumerate(texts):
            ids = text.tokens[:width]
            tokens[row, : len(ids)] = ids
            if text.taps is not None:
                taps[row, : len(ids) - 1] = text.taps[: len(ids) - 1]
            chosen = choose_anchors(text, self._config, self._depth, rng)
            anchors.append(chosen[0])
            labels.append(chosen[1])
        return Batch(tokens, taps, np.stack(anchors), np.stack(labels))


def draft_vocabulary(texts: Sequence[Text], size: int, vocab: int) -> Int[np.ndarray, " size"]:
    """The ``size`` tokens that are most frequent in answers, ascending; of equal counts the lower id.

    Raises:
      ValueError: more than the target's vocabulary.
    """
    if not 1 <= size <= vocab:
        raise ValueError(f"the draft vocabulary must have 1..{vocab} tokens, got {size}")
    counts = np.zeros(vocab, np.int64)
    for text in texts:
        counts += np.bincount(text.tokens[text.start :], minlength=vocab)
    return np.sort(np.argsort(-counts, kind="stable")[:size]).astype(np.int32)
