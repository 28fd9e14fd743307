"""Draft heads on disk, in two formats, each a folder with a readable config.json.

Native: the weights in ``params/``, by orbax, as training holds them. Published: ``model.safetensors``, as JetSpec's,
DFlash's and EAGLE-3's heads are published. A folder is written whole or not at all.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from jaxtyping import DTypeLike
from safetensors import SafetensorError
from safetensors.flax import save_file

from jspec.heads.config import HeadConfig, HeadError
from jspec.heads.kinds import AnyConfig, code_of, config_from_json, layout_of, pair
from jspec.heads.published import as_head_error
from jspec.mesh import check_heads, shard_params
from jspec.models.config import read_json
from jspec.models.load import Target, from_hub, is_hub_id
from jspec.models.tensors import sample

_FILES = {"config.json", "params", "model.safetensors", "README.md"}  # what a head's folder holds
SHIPPED = Path(__file__).parent / "heads" / "shipped"  # heads that come with jspec, a folder each


@dataclasses.dataclass(frozen=True)
class Head:
    """A head that is ready to draft for a target.

    Attributes:
      config: its class says which kind it is.
      params: see ``jspec.heads.parallel`` or ``jspec.heads.eagle``; in the target's dtype.
      fingerprint: 16 hex digits that name config and weights, in either format.
    """

    config: AnyConfig
    params: dict[str, Any]
    name: str
    fingerprint: str


def load_head(name_or_path: str | Path, target: Target) -> Head:
    """A head for a target, by the name of a shipped one, from a folder of either format, or by a hub id; on its mesh.

    Raises:
      HeadError: no such head, a damaged one, or one made for another target.
      ValueError: the target's mesh does not divide its heads.
    """
    folder = locate_head(str(name_or_path))
    config, params = read_head(folder)
    config = pair(config, target)
    check_heads(target.mesh, config, "the head's")
    fingerprint = head_fingerprint(config, params)
    dtype = target.params["embed"].dtype
    draft_ids = params.pop("draft_ids", None)
    params = jax.tree.map(lambda x: x.astype(dtype), params)
    if draft_ids is not None:
        params = code_of(config).with_draft_ids(params, target.params, draft_ids)
    return Head(config, shard_params(target.mesh, params), str(name_or_path), fingerprint)


def shipped_head(
    target: Target, causal: bool | None = None, corrected: bool = False, kind: type = HeadConfig
) -> str | None:
    """The name of a shipped head that was trained on a target; None where there is none.

    Args:
      target: compared by fingerprint.
      causal: which of the parallel heads is taken where there are both.
      corrected: one with a correction is wanted, or one without.
      kind: the class of its config.
    """
    fitting = {}
    for name in _shipped():
        config = _config_in(SHIPPED / name)
        fits = isinstance(config, kind) and corrected == (config.correction is not None)
        if fits and config.target_fingerprint == target.fingerprint:
            fitting.setdefault(getattr(config, "causal", None), name)
    return fitting.get(causal, next(iter(fitting.values()), None))


def read_config(name_or_path: str | Path) -> AnyConfig:
    """The config of a head, without its weights, by what ``load_head`` takes.

    Raises:
      HeadError: there is no head.
    """
    return _config_in(locate_head(str(name_or_path)))


def _config_in(folder):
    with as_head_error():
        return config_from_json(read_json(folder / "config.json"))


def read_head(folder: Path) -> tuple[AnyConfig, dict[str, Any]]:
    """Config and arrays of a head in a folder, in the dtype in which they are stored.

    Raises:
      HeadError: what is there is no head, or a damaged one.
    """
    config = _config_in(folder)
    with as_head_error():
        if (folder / "params").is_dir():
            found = _restore(folder / "params", config)
        else:
            found = layout_of(config).read_arrays(folder, config)
    if config.draft_vocab_size is not None:  # before JAX makes 32 bits of them
        _check_draft_ids(config, np.asarray(found["draft_ids"]))
    if (folder / "params").is_dir():
        return config, found
    with as_head_error():
        return config, layout_of(config).from_tensors(config, jax.tree.map(jnp.asarray, found))


def save_head(folder: str | Path, config: AnyConfig, head: Mapping[str, Any]) -> None:
    """Writes a head in the native format; a head that is there already is replaced.

    Args:
      folder: made where need be.
      config: the head's.
      head: as ``Head.params``; the target's rows are left out.

    Raises:
      HeadError: arrays that ``config`` does not ask for; a folder that holds something else, or can't be written.
    """
    head = _own(config, head)
    check_place(Path(folder))

    def write(path):
        try:
            with ocp.StandardCheckpointer() as checkpointer:
                checkpointer.save((path / "params").absolute(), head)
        except ValueError as error:  # so orbax says that a disk is full
            raise OSError(str(error).splitlines()[0]) from None

    _write(Path(folder), config, jnp.dtype(head["fc"].dtype).name, write)


def export_head(
    folder: str | Path,
    config: AnyConfig,
    head: Mapping[str, Any],
    dtype: DTypeLike = jnp.bfloat16,
    card: str | None = None,
) -> None:
    """Writes a head in the published layout; see ``save_head``.

    Args:
      folder: made where need be.
      config: the head's.
      head: likewise.
      dtype: of the weights in the file; a floating one.
      card: what the README.md beside it says; None: there is none.
    """
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"dtype must be a floating one, got {jnp.dtype(dtype).name}")
    head = _own(config, head)

    def cast(x):
        return x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x

    def write(path):
        tensors = jax.tree.map(cast, layout_of(config).to_tensors(config, head))
        save_file(tensors, path / "model.safetensors", {"format": "pt"})  # for its owner only
        (path / "model.safetensors").chmod((path / "config.json").stat().st_mode)
        if card is not None:
            (path / "README.md").write_text(card, encoding="utf-8")

    _write(Path(folder), config, jnp.dtype(dtype).name, write)


def head_fingerprint(config: AnyConfig, head: Mapping[str, Any]) -> str:
    """16 hex digits over the config and 4096 evenly spaced bytes of each array, in bf16 where that holds its values."""
    # Heads keep the fingerprints that they had when there was nothing else.
    said = repr(config).replace(", shift_labels=False, correction=None", "")
    digest = hashlib.sha256(said.encode())
    for name, array in sorted(layout_of(config).to_tensors(config, head).items()):
        if jnp.issubdtype(array.dtype, jnp.floating):
            narrow = array.astype(jnp.bfloat16)
            array = narrow if (narrow.astype(array.dtype) == array).all() else array
        digest.update(sample(name, np.asarray(array)))
    return digest.hexdigest()[:16]


def _shipped():
    return sorted(path.name for path in SHIPPED.glob("*/"))


def locate_head(name: str) -> Path:
    """The folder of a head: by the name of a shipped one, by its path, or downloaded by its hub id.

    Raises:
      HeadError: there is none.
    """
    names = _shipped()
    if name in names:
        return SHIPPED / name
    try:
        path = Path(name).expanduser()
        there, is_run = path.is_dir(), (path / "log.jsonl").is_file()
    except (OSError, RuntimeError, ValueError) as error:  # too long a name, an unknown user's home
        raise HeadError(f"no head {name!r}: {error}") from None
    if not there and is_hub_id(name) and not path.exists():
        with as_head_error():
            return from_hub(name)
    if not there:
        raise HeadError(f"no head {name!r}: give {', '.join([*names, 'a folder or a hub id'])}")
    if is_run:
        raise HeadError(f"{path} is a run of jspec.train: a head is {path / 'head'}, once exported")
    return path


def check_place(folder: Path) -> None:
    """Makes sure that orbax can read what it writes into a folder: it takes its path for a pattern.

    Raises:
      HeadError: the path has a character that means something in one.
    """
    if bad := sorted(set("[]\\*") & set(str(folder.absolute()))):
        raise HeadError(
            f"{folder} has a {bad[0]!r} in its path: checkpoints there could not be read"
        )


def _own(config, head):
    """What is stored of a head, if it is all that there should be."""
    head = {name: x for name, x in head.items() if name != "lm_head"}
    _check_shapes(_by_name(head), config, "the head's arrays")
    if config.draft_vocab_size is not None:
        _check_draft_ids(config, np.asarray(head["draft_ids"]))
    return head


@contextlib.contextmanager
def readable(path: Path) -> Iterator[None]:
    """Whatever goes wrong while orbax reads is one line about ``path``.

    Raises:
      HeadError: instead of any other error.
    """
    try:
        for folder in (path, path / "default"):
            if (folder / "manifest.ocdbt").exists():
                _read_through(folder)
        yield
    except HeadError:
        raise
    except Exception as error:  # of many kinds, orbax's and those of the storage below it
        reason = (str(error).strip() or repr(error)).splitlines()[0]
        raise HeadError(f"the weights in {path} cannot be read: {reason}") from None


def _read_through(folder):
    """Reads all that orbax has stored, one after the other, so that damage shows here.

    Orbax reads everything at once and stops at the first failure: what is still being read then is reported on
    stderr, by traceback, after the error's own line.
    """
    store = ts.KvStore.open({"driver": "ocdbt", "base": folder.absolute().as_uri() + "/"}).result()
    for key in store.list().result():
        store.read(key).result()


def _restore(path, config):
    with readable(path), ocp.StandardCheckpointer() as checkpointer:
        stored = _by_name(checkpointer.metadata(path.absolute()).item_metadata.tree)
        _check_shapes(stored, config, f"the weights in {path}")
        # Here, and not where it was written: that may have been another kind of machine.
        device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        names, tree = jax.tree.flatten(_names(_wanted(config)))
        wanted = [
            jax.ShapeDtypeStruct(stored[name].shape, stored[name].dtype, sharding=device)
            for name in names
        ]
        return checkpointer.restore(path.absolute(), tree.unflatten(wanted))


def _wanted(config):
    """The arrays of a head that are stored, as ``jax.ShapeDtypeStruct``."""
    head = jax.eval_shape(lambda: code_of(config).init_head(config, jax.random.key(0)))
    if config.draft_vocab_size is not None:
        head["draft_ids"] = jax.ShapeDtypeStruct((config.draft_vocab_size,), jnp.int32)
    return head


def _names(tree):
    """The tree with the name of each leaf: its keys, with dots between."""
    name = functools.partial(jax.tree_util.keystr, simple=True, separator=".")
    return jax.tree_util.tree_map_with_path(lambda path, _: name(path), tree)


def _by_name(tree):
    return dict(zip(jax.tree.leaves(_names(tree)), jax.tree.leaves(tree)))


def _check_shapes(found, config, what):
    """Makes sure that named arrays are those that ``config`` asks for."""
    wanted = _by_name(_wanted(config))
    for name in sorted(found.keys() | wanted.keys()):
        shapes = [x[name].shape if name in x else "no array" for x in (found, wanted)]
        if shapes[0] != shapes[1]:
            raise HeadError(f"{what}: {name} is {shapes[0]}, the config asks for {shapes[1]}")


def _check_draft_ids(config, ids):
    if ids[0] < 0 or ids[-1] >= config.vocab_size or (np.diff(ids) <= 0).any():
        raise HeadError(f"draft_ids must ascend within the vocabulary 0..{config.vocab_size - 1}")


def _write(folder: Path, config: AnyConfig, dtype: str, write: Callable[[Path], None]):
    """Makes a folder of config.json and what ``write`` adds, next to ``folder``; then puts it there.

    A kill at any moment leaves the old folder or the new one, under its name or, between two renames, as ``.NAME.old``.
    """
    folder = folder.resolve()  # a link goes on pointing to it
    work, old = (
        folder.with_name(f".{folder.name}.{what}") for what in (f"{os.getpid()}.partial", "old")
    )
    if old.is_dir() and not folder.exists():
        os.replace(old, folder)  # a kill came between the two renames
    if folder.exists():
        try:
            config_from_json(read_json(folder / "config.json"))
        except ValueError:
            raise HeadError(f"{folder} holds something that is no head: give another") from None
        if more := sorted({path.name for path in folder.iterdir()} - _FILES):
            raise HeadError(f"{folder} holds more than a head ({more[0]}): give another") from None
    text = json.dumps(layout_of(config).config_to_json(config, dtype), indent=2)
    try:
        _clear(folder)
        shutil.rmtree(old, ignore_errors=True)
        work.mkdir(parents=True)
        (work / "config.json").write_text(text + "\n", encoding="utf-8")
        write(work)
        if folder.exists():
            os.replace(folder, old)
        try:
            os.replace(work, folder)
        except OSError:
            if old.exists():
                os.replace(old, folder)
            raise
        shutil.rmtree(old, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        raise HeadError(f"{folder} cannot be written: {error}") from None
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _clear(folder: Path) -> None:
    """Takes away what processes that were killed have left behind of a folder."""
    if not folder.parent.is_dir():
        return
    for path in folder.parent.iterdir():
        head, _, pid = path.name.removesuffix(".partial").rpartition(".")
        if path.name.endswith(".partial") and head == f".{folder.name}" and pid.isdigit():
            try:
                os.kill(int(pid), 0)
            except (ProcessLookupError, OverflowError):
                shutil.rmtree(path, ignore_errors=True)
            except OSError:
                pass  # it lives, and is another user's
