"""The options of ``python -m jspec.train``: one config for all stages, from YAML and the command line."""

import dataclasses
import os
from collections.abc import Sequence
from typing import Literal

import jsonargparse

from jspec.device import Accel, Dtype
from jspec.heads.config import Correction
from jspec.mesh import parse_mesh
from jspec.method import MAX_BUDGET
from jspec.models.load import DEFAULT_TARGET
from jspec.options import ONE_DEVICE, Parser, one_line
from jspec.train.data import BatchConfig
from jspec.train.losses import LossConfig
from jspec.train.optim import OptimConfig
from jspec.train.text import TextConfig

STAGES = ("text", "head", "export")


@dataclasses.dataclass(frozen=True)
class HeadOptions:
    """The head to be trained: its layers have the target's own sizes.

    Attributes:
      kind: parallel: JetSpec's or DFlash's; eagle: EAGLE-3's, to which causal, num_layers and mask_token mean nothing.
      causal: JetSpec's in-block mask; false: DFlash's.
      block_size: slots, the root included; eagle: one more than the steps that are unrolled.
      num_layers: of a parallel head.
      taps: target layers it reads; (): five, or fewer of a small target, spread evenly; of eagle the published three.
      mask_token: whose embedding the drafted slots carry: a special token that the target's texts do not use.
      draft_vocab_size: the most frequent tokens of the training text; null: all tokens.
      shift_labels: each slot drafts the token after its own place, the root's slot too: one more token is drafted.
      correction_rank: of Domino's correction, with which a draft depends on those before it; null: there is none.
      gru_size: of the correction: width of what it remembers of a path.
      pure_drafts: of the correction: so many first drafts do without it.
      own_output: eagle: output rows of its own, trained too, which begin as the target's; false: the target's.

    Raises:
      ValueError: a number out of range.
    """

    kind: Literal["parallel", "eagle"] = "parallel"
    causal: bool = True
    block_size: int = 8
    num_layers: int = 2
    taps: tuple[int, ...] = ()
    mask_token: str = "<empty_output>"
    draft_vocab_size: int | None = None
    shift_labels: bool = False
    correction_rank: int | None = None
    gru_size: int = 256
    pure_drafts: int = 1
    own_output: bool = True

    def __post_init__(self):
        for name, least in {"block_size": 2, "num_layers": 1}.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be {least} or above, got {getattr(self, name)}")
        rank = 1 if self.correction_rank is None else self.correction_rank
        Correction(self.gru_size, rank, self.pure_drafts)  # refuses what none can be

    @property
    def correction(self) -> Correction | None:
        """The correction, as a head's config has it."""
        if self.correction_rank is None:
            return None
        return Correction(self.gru_size, self.correction_rank, self.pure_drafts)


@dataclasses.dataclass(frozen=True)
class TrainOptions:
    """A whole run.

    Attributes:
      target: see ``jspec.load``.
      library: folder of the training text; runs may share it.
      also: folders of further text, written before by the same target with the same taps, to be trained on too.
      max_texts: train on the first so many texts only; the held-out ones stay the same. null: on all.
      run: folder of this head's run.
      init: a head to go on from, by the name of a shipped one or its folder: of the same target and number of layers.
        Its taps and draft vocabulary are taken over where none are named, its block may be another, and a correction
        may be added. null: new weights.
      accel: where to run.
      mesh: devices, as of ``python -m jspec.run``: data divides batch.texts and text.batch, model the heads.
      dtype: of the target's weights and of all products; auto: fp32 on a CPU, else bf16. The trained weights are fp32.
      keep_taps: keep the target's states with the text (about 1.2 KB a token and tap for a width of 576); else they are
        made again in every step.
      teacher: keep its final states too, which KL losses need.
      text: what is written.
      head: its shape.
      batch: the shape of a step.
      loss: what it is trained for.
      optim: how.

    Raises:
      ValueError: an empty name, or a number out of range.
    """

    target: str = DEFAULT_TARGET
    library: str = "library"
    also: tuple[str, ...] = ()
    max_texts: int | None = None
    run: str = "run"
    init: str | None = None
    accel: Accel = "auto"
    dtype: Dtype = "auto"
    mesh: str = ONE_DEVICE
    keep_taps: bool = True
    teacher: bool = True
    text: TextConfig = dataclasses.field(default_factory=TextConfig)
    head: HeadOptions = dataclasses.field(default_factory=HeadOptions)
    batch: BatchConfig = dataclasses.field(default_factory=BatchConfig)
    loss: LossConfig = dataclasses.field(default_factory=LossConfig)
    optim: OptimConfig = dataclasses.field(default_factory=OptimConfig)

    def __post_init__(self):
        for name in ("target", "library", "run"):
            if not getattr(self, name):
                raise ValueError(f"{name} must not be empty")
        data, _ = parse_mesh(self.mesh)
        for name, rows in {"batch.texts": self.batch.texts, "text.batch": self.text.batch}.items():
            if rows % data:
                raise ValueError(f"mesh: data={data} does not divide {name} {rows}")
        for name in ("library", "run"):  # a shell expands "~" only where it stands alone
            object.__setattr__(self, name, os.path.expanduser(getattr(self, name)))
        object.__setattr__(self, "also", tuple(map(os.path.expanduser, self.also)))
        if self.loss.kind != "ce" and self.keep_taps and not self.teacher:
            raise ValueError(
                f"--teacher must be true for a {self.loss.kind} loss, or --keep_taps false"
            )
        for name, size in {
            "head.block_size": self.head.block_size,
            "optim.eval_budget": self.optim.eval_budget,
        }.items():
            if size > MAX_BUDGET:
                raise ValueError(f"{name} must be at most {MAX_BUDGET}, got {size}")
        if self.loss.dpace is not None and self.head.correction is not None:
            raise ValueError("loss.dpace must be off (null) for a head with a correction")
        if self.max_texts is not None and self.max_texts < 1:
            raise ValueError(f"--max_texts must be 1 or above, got {self.max_texts}")


class _Parser(Parser):
    dash = "_"


def _check(name, value, default):
    """Raises ValueError for what jsonargparse lets pass: no mapping for a group, and null."""
    if dataclasses.is_dataclass(default):
        if not isinstance(value, jsonargparse.Namespace):
            raise ValueError(f"--{name} must be a mapping of options, got {value!r}")
        for field in dataclasses.fields(default):
            _check(f"{name}.{field.name}", value[field.name], getattr(default, field.name))
    elif value is None and default is not None:
        raise ValueError(f"--{name} must not be null: leave it out")


def _instantiate(parser, given):
    """The options as dataclasses; where a group's values are refused, the error names the group."""
    try:
        return parser.instantiate(given)
    except ValueError as error:
        for field in dataclasses.fields(TrainOptions):
            if isinstance(given[field.name], jsonargparse.Namespace):
                values = {k: _frozen(v) for k, v in given[field.name].as_dict().items()}
                try:
                    field.default_factory(**values)
                except ValueError as same:
                    if str(same) == str(error):
                        raise ValueError(f"--{field.name}.{error}") from None
        raise


def _frozen(value):
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def parse(argv: Sequence[str] | None = None) -> tuple[TrainOptions, tuple[str, ...]]:
    """The options, and the stages that are asked for: all of them by default.

    Raises:
      ValueError: an unknown option or stage, or a value that is out of range.
    """
    parser = _Parser(
        prog="python -m jspec.train",
        description="Trains a draft head: the target writes text, the head learns to foresee it.",
        allow_abbrev=False,
    )
    parser.add_argument("--config", action=jsonargparse.ActionConfigFile, help="options in YAML")
    # Not "stages": a config could name them then, and would not be heard.
    parser.add_argument(
        "STAGE", nargs="*", default=[], help=f"of {', '.join(STAGES)}; none named: all"
    )
    parser.add_class_arguments(TrainOptions)
    try:
        given = parser.parse_args(argv)
        for field in dataclasses.fields(TrainOptions):
            _check(field.name, given[field.name], getattr(TrainOptions(), field.name))
        chosen = _instantiate(parser, given)
    except (AttributeError, LookupError, RuntimeError, TypeError) as error:
        raise ValueError(one_line(str(error))) from None
    stages = tuple(chosen.STAGE)
    if unknown := set(stages) - set(STAGES):
        raise ValueError(f"no stage {min(unknown)!r}: there are {', '.join(STAGES)}")
    values = {field.name: chosen[field.name] for field in dataclasses.fields(TrainOptions)}
    return TrainOptions(**values), stages or STAGES
