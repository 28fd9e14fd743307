"""Calibrated thresholds on the disk: readable JSON in the user's cache, a file for each use that they hold for."""

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

from jspec.files import put
from jspec.method import Method
from jspec.methods.graft import check_checkpoints, check_thresholds, graft
from jspec.models.fetch import cache_dir

FORMAT = 2
SIZE = 1 << 20  # bytes of a file, at most
CHAINS = ("dflash", "domino")  # they draft chains: retrieved tokens go on where the sure part ends


@dataclasses.dataclass(frozen=True)
class Use:
    """What thresholds hold for.

    Attributes:
      target: fingerprint of the target.
      head: fingerprint of the draft head; None without one.
      method: name of the method that drafts.
      place: of ``graft``.
      retrieve: likewise.
      budget: most nodes of a tree.
      detail: the method's own, and its depth.
      greedy: at temperature 0.
    """

    target: str
    head: str | None
    method: str
    place: str
    retrieve: str
    budget: int
    detail: str
    greedy: bool


@dataclasses.dataclass(frozen=True)
class Thresholds:
    """Thresholds, and what they were found with.

    Attributes:
      use: what they hold for.
      checkpoints: of ``graft``; there is a threshold for each, or one alone where ``use.place`` is "tail".
      values: the thresholds.
      prompts: how many.
      rounds: how many were counted.
      tokens: a round, expected with these thresholds.
      unpruned: likewise with all of them 0.
    """

    use: Use
    checkpoints: tuple[int, ...]
    values: tuple[float, ...]
    prompts: int
    rounds: int
    tokens: float
    unpruned: float


def use_of(
    method: Method, target: str, head: str | None, greedy: bool, retrieve: str = "table"
) -> Use:
    """What ``--graft`` makes of a method.

    Args:
      method: who drafts.
      target: fingerprint of the target.
      head: likewise of the head, or None.
      greedy: at temperature 0.
      retrieve: of ``graft``.
    """
    place = "tail" if method.name in CHAINS else "root"
    detail = f"depth {method.needs.depth}, {method.detail}"
    return Use(target, head, method.name, place, retrieve, method.budget, detail, greedy)


def ready_graft(
    method: Method,
    target: str,
    head: str | None = None,
    *,
    greedy: bool = True,
    retrieve: str = "table",
    **options: Any,
) -> Method:
    """``graft`` of a method as ``--graft`` has it: with calibrated thresholds, else with the usual ones.

    Args:
      method: who drafts.
      target: fingerprint of the target.
      head: likewise of the head, or None.
      greedy: at temperature 0.
      retrieve: of ``graft``; thresholds are calibrated for each.
      **options: further ones of ``graft``.

    Raises:
      ValueError: a file of thresholds that is damaged.
    """
    use = use_of(method, target, head, greedy, retrieve)
    path, found = thresholds_path(use), {}
    if path.exists():
        kept = read_thresholds(path, use)
        found = {"checkpoints": kept.checkpoints, "thresholds": kept.values}
    return graft(method, **{**graft_options(use), **found, **options})


def graft_options(use: Use) -> dict[str, Any]:
    """What ``graft`` is given in a setting, but for checkpoints and thresholds."""
    leaves = {"leaves": 1} if use.place == "tail" else {}
    return {"place": use.place, "retrieve": use.retrieve, **leaves}


def thresholds_path(use: Use) -> Path:
    """Where the user's cache keeps them."""
    text = json.dumps(dataclasses.asdict(use), sort_keys=True)
    return cache_dir() / "graft" / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"


def write_thresholds(path: Path, found: Thresholds) -> None:
    """Writes thresholds, all of them or nothing.

    Raises:
      OSError: they cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"format": FORMAT, **dataclasses.asdict(found)}, indent=1, ensure_ascii=False)
    put(path, lambda file: file.write(f"{text}\n".encode()), shared=True)


def read_thresholds(path: Path, use: Use) -> Thresholds:
    """Reads thresholds that hold for a use.

    Raises:
      ValueError: the file cannot be read, is damaged, or holds for another use.
    """
    anew = "calibrate anew with python -m jspec.thresholds"
    try:
        with path.open("rb") as file:
            text = file.read(SIZE + 1)
        if len(text) > SIZE:
            raise ValueError("it is too large")
        found = _thresholds(json.loads(text))
        if found.use != use:
            raise ValueError("it is for another target, head, method or temperature")
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}") from None
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"{path} is damaged: {reason}: {anew}") from None
    return found


def _thresholds(found: Any) -> Thresholds:
    if not isinstance(found, dict) or found["format"] != FORMAT:
        raise ValueError(f"it is not of format {FORMAT}")
    names = [field.name for field in dataclasses.fields(Thresholds)]
    if unknown := found.keys() - {*names, "format"}:
        raise ValueError(f"it has {min(unknown)!r}")
    said = {name: found[name] for name in names}
    said["use"] = use = Use(**said["use"])
    said["checkpoints"] = checkpoints = check_checkpoints(said["checkpoints"])
    said["values"] = check_thresholds(
        said["values"], 1 if use.place == "tail" else len(checkpoints)
    )
    return Thresholds(**said)
