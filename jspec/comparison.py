"""A method and autoregressive decoding on the same prompts, in turns, so that both meet the same machine."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence

from jspec.driver import Event, Finished, Stream
from jspec.exactness import Difference, first_difference
from jspec.method import Params, check_range
from jspec.methods import ar
from jspec.state import Plan, capacity_for


@dataclasses.dataclass
class Lane:
    """One method's part: its stream, made when its first turn comes, and what it has finished."""

    make: Callable[[], Stream]
    stream: Stream | None = None
    outcomes: list[Finished] = dataclasses.field(default_factory=list)
    _events: Iterator[Event] | None = None

    def turn(self, prompts: int) -> Iterator[Event]:
        """Decodes on, until so many more prompts have finished."""
        if self.stream is None:
            self.stream = self.make()
            self._events = iter(self.stream)
        enough = len(self.outcomes) + prompts
        for event in self._events:
            if event.finished:
                self.outcomes.append(event.finished)
            yield event
            if len(self.outcomes) == enough:
                return


class Comparison:
    """A method's run over prompts and, unless left out, autoregressive decoding's.

    Attributes:
      ours: the method's lane; after the run its outcomes are in the prompts' order.
      reference: autoregressive decoding's lane, or None.
      differences: after the run, for each prompt, where the texts part; None where they are equal.
    """

    def __init__(
        self,
        plan: Plan,
        params: Params,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        baseline: bool = True,
        batch: int = 1,
        seed: int = 0,
        **options,
    ):
        """Runs nothing yet.

        Args:
          plan: the method's.
          params: ``{"target": ..., ...}``.
          prompts: token ids, each at least one.
          max_new_tokens: of each prompt.
          baseline: decode autoregressively too.
          batch: slots.
          seed: of the draws.
          **options: of both streams: ``stops``, ``capacity``, ``rounds``, ``profile`` (see ``Stream``); and of the
            method's alone, ``memory``.
        """
        check_range("batch", batch, 1)
        memory = options.pop("memory", None)
        longest = max(map(len, prompts), default=1)
        options.setdefault("capacity", capacity_for(plan, longest + max_new_tokens))
        options |= {"max_new_tokens": max_new_tokens, "batch": batch, "seed": seed, "warm_up": True}

        self._plan, self._params, self._prompts = plan, params, prompts
        self._batch, self._seed = batch, seed
        self.ours = Lane(lambda: Stream(plan, params, prompts, memory=memory, **options))
        self.reference = None
        if baseline:
            plain = dataclasses.replace(plan, method=ar())
            self.reference = Lane(lambda: Stream(plain, params, prompts, **options))
        self.differences: list[Difference | None] | None = None

    def __iter__(self) -> Iterator[Event]:
        """The events of the method, while it and the baseline take turns of ``batch`` prompts."""
        for _ in range(0, len(self._prompts), self._batch):
            yield from self.ours.turn(self._batch)
            if self.reference:
                for _ in self.reference.turn(self._batch):
                    pass
        for lane in filter(None, (self.ours, self.reference)):
            lane.outcomes.sort(key=lambda one: one.index)
        if self.reference:
            self.differences = [
                first_difference(
                    self._plan,
                    self._params,
                    self._prompts[mine.index],
                    mine.tokens,
                    plain.tokens,
                    index=mine.index,
                    seed=self._seed,
                )
                for mine, plain in zip(self.ours.outcomes, self.reference.outcomes)
            ]

    def run(self) -> "Comparison":
        """Runs to the end."""
        for _ in self:
            pass
        return self
