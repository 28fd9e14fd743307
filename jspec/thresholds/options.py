"""The options of ``python -m jspec.thresholds``."""

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Literal

from jspec.benches import BENCHES
from jspec.options import Drafting, Options, parse_into

FIRST, LAST = 40, 100  # of each bench: beyond the prompts that the experiments measure


@dataclasses.dataclass(frozen=True)
class ThresholdOptions(Drafting):
    """What to calibrate, and with what; each field's annotation is its help.

    Raises:
      ValueError: an option out of range.
    """

    seed: Annotated[int, "of the draws"] = 0
    prompts: Annotated[
        str | None,
        f"JSON lines, as python -m jspec.run takes them; default: {FIRST + 1} to {LAST} of each bench",
    ] = None
    bench: Annotated[str | None, f"the prompts of {', '.join(BENCHES)}"] = None
    limit: Annotated[int | None, "only the first so many prompts"] = None
    retrieve: Annotated[
        Literal["table", "text", "both"], "what the thresholds are for: --graft on, text or both"
    ] = "table"
    max_new_tokens: Annotated[int, "of each answer"] = 64
    batch: Annotated[int, "prompts decoded at a time"] = 8

    def __post_init__(self):
        self.run_options()  # refuses what decoding refuses

    def run_options(self, **changes) -> Options:
        """What ``python -m jspec.run`` would be given to decode so."""
        graft = {"table": "on"}.get(self.retrieve, self.retrieve)
        return super().run_options(**{"graft": graft, **changes})


def parse(argv: Sequence[str] | None = None) -> ThresholdOptions:
    """The options on a command line.

    Raises:
      ValueError: an unknown option, or one out of range.
    """
    said = "Calibrates at what confidence graft stops a draft, and keeps that for --graft."
    return parse_into(ThresholdOptions, argv, "python -m jspec.thresholds", said)
