"""The options of ``python -m jspec.cost``."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from jspec.cost.estimate import CHIPS
from jspec.device import Accel, Dtype
from jspec.models.load import DEFAULT_TARGET
from jspec.options import Options, parse_into

FIGURES = (".svg", ".png")
CAPACITY = 512
GRID_BATCHES, GRID_CAPACITIES = (1, 4, 8), (512, 1024)


@dataclasses.dataclass(frozen=True)
class CostOptions:
    """What to measure; each field's annotation is its help.

    Raises:
      ValueError: an option out of range.
    """

    accel: Annotated[Accel, "where to run"] = "auto"
    target: Annotated[str, f"{DEFAULT_TARGET}, a directory, a .gguf file or a hub id"] = (
        DEFAULT_TARGET
    )
    dtype: Annotated[Dtype, "of weights and cache; auto: fp32 on a CPU, else bf16"] = "auto"
    method: Annotated[
        str | None, "who drafts; default: ddtree if there is a head for it, else prompt_lookup"
    ] = None
    head: Annotated[str | None, "a shipped draft head's name or a head's directory"] = None
    budget: Annotated[int | None, "most nodes of a tree, root included"] = None
    depth: Annotated[int | None, "of a tree, at most; default: the method's"] = None
    width: Annotated[int | None, "as python -m jspec.run takes it"] = None
    temperature: Annotated[float, "0: no noise is drawn"] = 0.0
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
        names = {field.name for field in dataclasses.fields(Options)}
        mine = {k: v for k, v in dataclasses.asdict(self).items() if k in names}
        return Options(**{**mine, "smart": "on", **changes})

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
