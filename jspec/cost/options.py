"""The options of ``python -m jspec.cost``."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from jspec.cost.estimate import CHIPS
from jspec.options import Drafting, Options, parse_into

FIGURES = (".svg", ".png")
CAPACITY = 256  # that of a short prompt and 128 new tokens, as in ``python -m jspec.run``
GRID_BATCHES, GRID_CAPACITIES = (1, 4, 8), (512, 1024)


@dataclasses.dataclass(frozen=True)
class CostOptions(Drafting):
    """What to measure; each field's annotation is its help.

    Raises:
      ValueError: an option out of range.
    """

    batch: Annotated[int, "prompts decoded at a time"] = 1
    capacity: Annotated[int, "cache rows of a prompt and its answer"] = CAPACITY
    grid: Annotated[
        bool, f"batches {GRID_BATCHES} by capacities {GRID_CAPACITIES}, whatever else is given"
    ] = False
    seconds: Annotated[float, "of measuring, about, compilation left out"] = 20.0
    estimate: Annotated[
        str | None, f"instead, an estimate for a TPU that is not there: {', '.join(CHIPS)}"
    ] = None
    figure: Annotated[str | None, "draw them there: an .svg or .png file"] = None

    def __post_init__(self):
        self.run_options()  # refuses what decoding refuses
        if self.capacity < 32:
            raise ValueError(f"--capacity must be 32 or above, got {self.capacity}")
        if not 0 <= self.seconds <= 3600:
            raise ValueError(f"--seconds must be in 0..3600, got {self.seconds:g}")
        if self.estimate is not None and self.estimate not in CHIPS:
            raise ValueError(f"--estimate must be one of {', '.join(CHIPS)}, got {self.estimate}")
        if self.figure is not None and Path(self.figure).suffix not in FIGURES:
            raise ValueError(f"--figure must end in {' or '.join(FIGURES)}, got {self.figure}")

    def run_options(self, **changes) -> Options:
        """What ``python -m jspec.run`` would be given to decode so."""
        return super().run_options(**{"smart": "on", **changes})

    @property
    def cells(self) -> list[tuple[int, int]]:
        """Batches and capacities to measure."""
        if not self.grid:
            return [(self.batch, self.capacity)]
        return [(batch, capacity) for capacity in GRID_CAPACITIES for batch in GRID_BATCHES]


def parse(argv: Sequence[str] | None = None) -> CostOptions:
    """The options on a command line.

    Raises:
      ValueError: an unknown option, or one out of range.
    """
    said = "Measures what a round of decoding costs on this machine, and keeps it for --smart on."
    return parse_into(CostOptions, argv, "python -m jspec.cost", said)
