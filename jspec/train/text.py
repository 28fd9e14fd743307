"""Training text: the target answers prompts itself, and its states are kept while it does.

A draft head learns to foresee its target, so what it is trained on must be the target's own writing (JetSpec, arXiv
2606.18394, section 4: answers from elsewhere cost more than half of the speed-up). Where prompts come from matters
less; without any, an instruct target writes those too.
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jspec.benches import Prompt, user_turn
from jspec.driver import Stream
from jspec.files import put
from jspec.method import Method, MethodState, Needs, check_range
from jspec.methods import ar
from jspec.models.config import read_json
from jspec.models.load import Target
from jspec.sampling import Sampling
from jspec.state import Plan
from jspec.text import encode_prompt, target_stops

PERIOD, REPEATED = (
    24,
    28,
)  # a text is cut where a period of at most PERIOD has gone on for REPEATED tokens
Progress = Callable[[str, int, int | None], None]
"""``progress(what, total, tokens)``: one more of ``total`` texts, and its new tokens; None: an old one; 0: none yet."""
MOST = 1 << 20  # of tokens, prompts or turns
MARK = "\ufdd0"  # stands for somebody's words while a chat template is taken apart: no text has this character


@dataclasses.dataclass(frozen=True)
class TextConfig:
    """What is written.

    Attributes:
      turns: user turns that the target writes itself.
      systems: system prompts that steer those, in turns; "" is the template's own opening.
      turn_temperature: of those turns.
      turn_tokens: longer ones are left out.
      prompts: a file of further prompts, as of ``python -m jspec.run --prompts``.
      about: what these are and where they come from, for the model card of a head.
      answers: written by the target, or those given in the file of prompts ("answer"): a corpus, to compare with. Then
        what is said here of turns, temperatures and batch does not matter.
      temperatures: of the answers: one a shard, in turns.
      max_new_tokens: of an answer.
      max_prompt_tokens: longer prompts are left out.
      count: prompts answered, at most.
      batch: rows decoded at a time.
      shard: prompts a file; what a kill can lose.
      seed: of the draws and of the prompts' order.

    Raises:
      ValueError: a number out of range.
    """

    turns: int = 2000
    systems: tuple[str, ...] = ("",)
    turn_temperature: float = 0.9
    turn_tokens: int = 128
    prompts: str | None = None
    about: str | None = None
    answers: Literal["written", "given"] = "written"
    temperatures: tuple[float, ...] = (0.0, 0.7)
    max_new_tokens: int = 192
    max_prompt_tokens: int = 256
    count: int = 100_000
    batch: int = 64
    shard: int = 512
    seed: int = 0

    def __post_init__(self):
        least = {"turns": 0, "turn_tokens": 1, "max_new_tokens": 2, "max_prompt_tokens": 1}
        for name, low in (least | {"count": 1, "batch": 1, "shard": 1}).items():
            for most in (None, MOST):
                check_range(name, getattr(self, name), low, most)
        check_range("seed", self.seed, 0, 1 << 31)
        for name in ("systems", "temperatures"):
            if not getattr(self, name):
                raise ValueError(f"{name} must not be empty")
        if not self.turns and self.prompts is None:
            raise ValueError("turns must be above 0 where there is no file of prompts")
        if self.answers == "given" and self.prompts is None:
            raise ValueError("answers: given needs a file of prompts that has them")
        for temperature in (self.turn_temperature, *self.temperatures):
            Sampling(temperature)


def half(states: Float[Array | np.ndarray, "..."]) -> Float[Array | np.ndarray, "..."]:
    """States as they are kept: float16, the few that are beyond its range cut."""
    most = float(np.finfo(np.float16).max)
    return states.clip(-most, most).astype(np.float16)


class Kept(NamedTuple):
    """States of each row's known tokens; those at or beyond ``length`` are garbage."""

    taps: Float[Array, "B C T H"]
    length: Int[Array, " B"]


def keeper(taps: tuple[int, ...]) -> Method:
    """Autoregressive decoding that keeps the listed taps of all known tokens, as float16."""

    def init(params, batch, capacity, memory):
        hidden = params["target"]["embed"].shape[1]
        empty = jnp.zeros((batch, capacity, len(taps), hidden), jnp.float16)
        return MethodState(rows=Kept(empty, jnp.zeros((batch,), jnp.int32)))

    def absorb(params, state, tokens, taps, counts):
        kept, length = state.rows
        column = jnp.arange(tokens.shape[1])
        at = jnp.where(column < counts[:, None], length[:, None] + column, kept.shape[1])
        kept = kept.at[jnp.arange(kept.shape[0])[:, None], at].set(half(taps), mode="drop")
        return MethodState(rows=Kept(kept, length + counts))

    return ar()._replace(name="keeper", needs=Needs(taps=taps), init=init, absorb=absorb)


class Written(NamedTuple):
    """One finished text.

    ``index`` of its prompt, its ``tokens``, prompt included, where its answer starts, and the taps of its tokens but
    the last, f16[n - 1, T, H].
    """

    index: int
    tokens: Int[np.ndarray, " n"]
    start: int
    taps: Float[np.ndarray, "m T H"]


def write(
    target: Target,
    method: Method,
    prompts: Sequence[Sequence[int]],
    first: int,
    sampling: Sampling,
    *,
    capacity: int,
    max_new_tokens: int,
    batch: int,
    seed: int,
) -> Iterator[Written]:
    """Decodes prompts, giving each text when it is finished.

    The texts depend on the seed and the prompts' indices (``first`` and on), not on batch or order.
    """
    plan = Plan(target.config, method, sampling, mesh=target.mesh)
    enough = -(-max(len(prompts), 1) // plan.shards) * plan.shards
    run = Stream(
        plan,
        {"target": target.params},
        prompts,
        max_new_tokens=max_new_tokens,
        batch=min(batch, enough),
        seed=seed,
        stops=target_stops(target),
        capacity=capacity,
        rounds=1 << 30,
        first_index=first,
    )
    for event in run:
        if event.finished is None:
            continue
        prompt = prompts[event.index - first]
        tokens = np.asarray([*prompt, *event.finished.tokens], np.int32)
        rows = run.state.rows.prompt
        slot = int(np.flatnonzero(np.asarray(rows) == event.index)[0])
        kept = run.state.method.rows
        # One shape for all texts: a slice of each length would be a program of its own.
        taps = (
            np.asarray(kept.taps[slot])[: len(tokens) - 1].copy() if kept else np.zeros((0, 0, 0))
        )
        yield Written(event.index, tokens, len(prompt), taps)


def loop_start(tokens: Int[np.ndarray, " n"]) -> int:
    """How many tokens stand before a text begins to repeat itself (see ``PERIOD``); all of them where it does not."""
    best = len(tokens)
    for period in range(1, PERIOD + 1):
        same = tokens[period:] == tokens[:-period]
        # The run's length at each place: a cumulative count that starts anew at every difference.
        count = np.arange(1, len(same) + 1)
        run = count - np.maximum.accumulate(np.where(same, 0, count))
        if (found := np.flatnonzero(run >= REPEATED)).size:
            best = min(best, int(found[0]) + 1 - REPEATED + period)
    return best


def turn_opening(target: Target, system: str) -> list[int]:
    """The ids that stand before a user's words in the target's chat template.

    Raises:
      ValueError: no chat template, or one that changes a user's words.
    """
    before = [{"role": "system", "content": system}] if system else []
    text = target.tokenizer.chat([*before, {"role": "user", "content": MARK}])
    if text.count(MARK) != 1:
        raise ValueError("the target's chat template does not say a user's words once, as they are")
    return target.tokenizer.encode(text[: text.index(MARK)], add_special_tokens=False)


def write_turns(
    target: Target, config: TextConfig, first: int, last: int, progress: Progress
) -> list[str]:
    """User turns ``first`` to ``last`` - 1 that the target writes itself; those without an end are left out."""
    openings = [turn_opening(target, system) for system in config.systems]
    prompts = [openings[i % len(openings)] for i in range(first, last)]
    found = {}
    progress("user turns", config.turns, 0)  # the first takes a while
    for one in write(
        target,
        ar(),
        prompts,
        first,
        Sampling(config.turn_temperature),
        capacity=_capacity(target, config),
        max_new_tokens=config.turn_tokens,
        batch=config.batch,
        seed=config.seed,
    ):
        progress("user turns", config.turns, len(one.tokens) - one.start)
        if one.tokens[-1] in target.config.eos_ids:
            found[one.index] = target.tokenizer.decode(one.tokens[one.start : -1]).strip()
    return [text for _, text in sorted(found.items()) if len(text) > 1]


def _capacity(target: Target, config: TextConfig) -> int:
    """One for all that is written, so that a program is compiled once a temperature."""
    need = config.max_prompt_tokens + config.max_new_tokens + 1
    need = min(need, target.config.max_positions)
    return -(-need // 128) * 128


class Library:
    """A folder of written text: ``text/NNNNN.npz`` (tokens, offsets, starts) and ``taps/NNNNN.npy``, by shard.

    A shard's text is written last, under another name first, so it is there whole or not at all.
    """

    def __init__(self, folder: Path):
        self.folder = folder

    def open(self, target: Target, config: TextConfig, taps: tuple[int, ...]) -> None:
        """Makes the folder, or makes sure that it is this config's.

        Raises:
          ValueError: the folder holds text of another config or target.
        """
        # batch does not change what is written
        wanted = dataclasses.asdict(dataclasses.replace(config, batch=1))
        if config.prompts is not None:
            content = Path(config.prompts).read_bytes()
            wanted["prompts"] = hashlib.sha256(content).hexdigest()[:16]
        wanted |= {"target": target.fingerprint, "dtype": target.params["embed"].dtype.name}
        wanted = json.loads(json.dumps(wanted | {"taps": taps}))
        path = self.folder / "text.json"
        begun = any(any(self.folder.glob(name)) for name in ("turns-*.json", "text/*.npz"))
        if begun and not path.exists():
            raise ValueError(
                f"{self.folder} has lost its text.json: whose text it holds is unknown"
            )
        if begun:
            there = read_json(path)
            if changed := sorted(k for k in wanted if k != "about" and there.get(k) != wanted[k]):
                raise ValueError(
                    f"{self.folder} holds text of another config ({', '.join(changed)} differ): "
                    "use another folder or the old config"
                )
            return
        (self.folder / "text").mkdir(parents=True, exist_ok=True)
        (self.folder / "taps").mkdir(exist_ok=True)
        put(path, lambda f: f.write(json.dumps(wanted, indent=1).encode()))

    def has(self, shard: int) -> bool:
        """Whether a shard is written."""
        return self._text(shard).exists()

    def save(self, shard: int, texts: Sequence[Written], wide: bool) -> None:
        """Writes a shard."""
        texts = sorted(texts)
        if texts and texts[0].taps.size:
            taps = np.concatenate([one.taps for one in texts])
            put(self.folder / "taps" / f"{shard:05}.npy", lambda f: np.save(f, taps))
        arrays = {
            "tokens": np.concatenate([one.tokens for one in texts]).astype(
                np.int32 if wide else np.uint16
            ),
            "lengths": np.asarray([len(one.tokens) for one in texts], np.int32),
            "starts": np.asarray([one.start for one in texts], np.int32),
            "prompts": np.asarray([one.index for one in texts], np.int32),
        }
        put(self._text(shard), lambda f: np.savez_compressed(f, **arrays))

    def _text(self, shard: int) -> Path:
        return self.folder / "text" / f"{shard:05}.npz"


def gather_prompts(
    target: Target,
    config: TextConfig,
    library: Library,
    given: Sequence[Prompt],
    progress: Progress,
) -> list[list[int]]:
    """All prompts to be answered, as ids, in a seeded order: given ones, and turns that the target writes itself."""
    for path, first, last in _turn_files(library, config):
        if not path.exists():
            texts = write_turns(target, config, first, last, progress)
            put(path, lambda f, texts=texts: f.write(json.dumps(texts).encode()))
        else:
            for _ in range(first, last):
                progress("user turns", config.turns, None)
    turns = enumerate(read_turns(library, config))
    prompts = [user_turn(f"turn/{i}", text) for i, text in turns] + list(given)
    return [ids for _, ids in in_order(target, config, prompts)]


def read_turns(library: Library, config: TextConfig) -> list[str]:
    """The user turns of a library that came to an end, each once.

    Raises:
      ValueError: a file that cannot be read.
    """
    turns = []
    for path, _, _ in _turn_files(library, config):
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise ValueError(f"{path} cannot be read: {error}") from None
        if not isinstance(found, list) or not all(isinstance(text, str) for text in found):
            raise ValueError(f"{path} does not hold a list of texts")
        turns += found
    return list(dict.fromkeys(turns))


def _turn_files(library, config):
    for number, first in enumerate(range(0, config.turns, config.shard)):
        path = library.folder / f"turns-{number:05}.json"
        yield path, first, min(first + config.shard, config.turns)


def in_order(
    target: Target, config: TextConfig, prompts: Sequence[Prompt]
) -> list[tuple[Prompt, list[int]]]:
    """The prompts that are short enough, and their ids, in a seeded order; at most ``config.count``."""
    encoded = ((prompt, encode_prompt(target, prompt, any_length=True)) for prompt in prompts)
    most = min(config.max_prompt_tokens, target.config.max_positions - 1)
    short = [one for one in encoded if len(one[1]) <= most]
    if not short:
        raise ValueError(
            "there is nothing to answer: no user turn came to an end within turn_tokens "
            f"({config.turn_tokens}), no given prompt has up to {most} tokens"
        )
    order = np.random.default_rng(config.seed).permutation(len(short))[: config.count]
    return [short[i] for i in order]


def write_text(
    target: Target,
    config: TextConfig,
    folder: Path,
    taps: tuple[int, ...] = (),
    given: Sequence[Prompt] = (),
    progress: Progress = lambda what, total, tokens: None,
) -> None:
    """Writes what is still missing of a library of text.

    Args:
      target: writes.
      config: says what.
      folder: of the library.
      taps: kept with the text; () leaves them to be made again in training.
      given: the prompts of ``config.prompts``.
      progress: is called when writing begins, and for every text that is finished.
    """
    library = Library(folder)
    library.open(target, config, taps)
    prompts = gather_prompts(target, config, library, given, progress)
    method = keeper(taps) if taps else ar()
    for shard, first in enumerate(range(0, len(prompts), config.shard)):
        if library.has(shard):
            for _ in prompts[first : first + config.shard]:
                progress("answers", len(prompts), None)
            continue
        texts = []
        progress("answers", len(prompts), 0)
        for one in write(
            target,
            method,
            prompts[first : first + config.shard],
            first,
            Sampling(config.temperatures[shard % len(config.temperatures)]),
            capacity=_capacity(target, config),
            max_new_tokens=config.max_new_tokens,
            batch=config.batch,
            seed=config.seed + 1,
        ):
            progress("answers", len(prompts), len(one.tokens) - one.start)
            end = one.start + loop_start(one.tokens[one.start :])
            texts.append(one._replace(tokens=one.tokens[:end], taps=one.taps[: end - 1]))
        library.save(shard, texts, wide=target.config.vocab_size > 1 << 16)
