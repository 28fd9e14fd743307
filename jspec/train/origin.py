"""The head that a run goes on from (``--init``), and the record by which a run's folder is known again."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from jspec.checkpoint import head_fingerprint, locate_head, read_head
from jspec.device import DTYPES
from jspec.files import put
from jspec.heads.kinds import AnyConfig, pair
from jspec.heads.parallel import trained
from jspec.models.config import read_json
from jspec.models.load import Target
from jspec.train.data import Text
from jspec.train.options import TrainOptions

_OPTIONS = {"mask_token_id": "mask_token"}  # what an option of the head is called in its config
_FREE = (
    "block_size",
    "causal",
    "steps",
    "target_fingerprint",
)  # the last was checked, if it is there


class Origin(NamedTuple):
    """A head to go on from.

    ``name`` as it was given, its ``config``, ``fingerprint``, trained ``weights``, ``draft_ids`` if it has some, and
    what its ``card`` says, if it has one.
    """

    name: str
    config: AnyConfig
    fingerprint: str
    weights: Mapping[str, Any]
    draft_ids: Int[np.ndarray, " Vd"] | None
    card: str | None


def read_origin(options: TrainOptions, target: Target) -> tuple[Origin | None, TrainOptions]:
    """The head of ``options.init``, and the options with its taps, draft vocabulary and correction if they name none.

    Raises:
      ValueError: there is no such head, or it is another target's.
    """
    if options.init is None:
        return None, options
    folder = locate_head(options.init)
    config, arrays = read_head(folder)
    config = pair(config, target)
    try:
        card = (folder / "README.md").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        card = None
    ids = arrays.get("draft_ids")
    ids = None if ids is None else np.asarray(ids)
    mine = head_fingerprint(config, arrays), trained(arrays), ids
    head = dataclasses.replace(
        options.head,
        taps=options.head.taps or config.taps,
        draft_vocab_size=options.head.draft_vocab_size or config.draft_vocab_size,
    )
    if (own := config.correction) is not None and head.correction is None:
        sizes = {"correction_rank": own.rank, "gru_size": own.gru_size, "pure_drafts": own.prefix}
        head = dataclasses.replace(head, **sizes)
    return Origin(options.init, config, *mine, card), dataclasses.replace(options, head=head)


def check_origin(origin: Origin, config: AnyConfig) -> None:
    """Makes sure that a head of a config can go on from another: its block and mask, or its steps, alone may differ.

    And a head that has a correction can go on from one that has none.

    Raises:
      ValueError: what differs, as the options call it.
    """
    if type(config) is not type(origin.config):
        raise ValueError(
            f"init: the head {origin.name} must be {config.called}, it is {origin.config.called}"
        )
    wanted, there = dataclasses.asdict(config), dataclasses.asdict(origin.config)
    differ = [key for key in wanted if key not in _FREE and there[key] != wanted[key]]
    if origin.config.correction is None:
        differ = [key for key in differ if key != "correction"]
    if "num_layers" in differ:
        differ = [key for key in differ if key != "windows"]  # one a layer
    if differ:
        names = {key: f"head.{_OPTIONS.get(key, key)}" for key in differ}
        found = "; ".join(f"{names[key]} {there[key]}, not {wanted[key]}" for key in differ)
        raise ValueError(
            f"init: the head {origin.name} has {found}: give what it has, or where that is taken over, nothing"
        )


def run_record(
    options: TrainOptions, target: Target, texts: Sequence[Text], origin: Origin | None
) -> dict[str, Any]:
    """All that a run's result depends on, as JSON has it; not what its folders are called."""
    record = dataclasses.asdict(options)
    for where in ("library", "also", "run", "accel", "mesh", "text", "target"):
        del record[where]
    dtype = target.params["embed"].dtype
    record["dtype"] = next((name for name, kind in DTYPES.items() if kind == dtype), dtype.name)
    digest = hashlib.sha256()
    for text in texts:
        digest.update(np.asarray([len(text.tokens), text.start], np.int32).tobytes())
        digest.update(text.tokens.tobytes())
    record |= {"target_fingerprint": target.fingerprint, "texts": digest.hexdigest()[:16]}
    record["init"] = origin and origin.fingerprint
    return json.loads(json.dumps(record))


def check_record(folder: Path, record: Mapping[str, Any]) -> None:
    """Makes sure that a run's folder, if it has a checkpoint, is that of this record.

    Raises:
      ValueError: what differs.
    """
    path = folder / "config.json"
    if not _has_checkpoint(folder):
        return
    if not path.exists():
        raise ValueError(
            f"{folder} has checkpoints, but has lost its config.json: what they are of is unknown"
        )
    # An option that is newer than the run had what is now its default.
    usual = _flat(json.loads(json.dumps(dataclasses.asdict(TrainOptions()))))
    there, wanted = usual | _flat(read_json(path)), _flat(record)
    if changed := sorted(name for name in wanted if there.get(name) != wanted[name]):
        raise ValueError(
            f"{folder} holds a run of another config ({', '.join(changed)} differ): "
            "use another --run or the old config"
        )


def write_record(folder: Path, record: Mapping[str, Any]) -> None:
    """Writes the record, where there is no checkpoint that has one."""
    if not (folder / "config.json").exists() or not _has_checkpoint(folder):
        folder.mkdir(parents=True, exist_ok=True)
        content = json.dumps(record, indent=1).encode()
        put(folder / "config.json", lambda file: file.write(content))


def _has_checkpoint(folder: Path) -> bool:
    return any(
        path.name.isdigit() for name in ("last", "best") for path in folder.glob(name + "/*")
    )


def _flat(record: Mapping[str, Any]) -> dict[str, Any]:
    """Groups of options by their options' names."""
    out = {}
    for name, value in record.items():
        inner = value.items() if isinstance(value, Mapping) else ()
        out |= {f"{name}.{key}": one for key, one in inner} or {name: value}
    return out
