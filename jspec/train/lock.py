"""One process at a time in a folder."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # not a POSIX system
    fcntl = None


@contextlib.contextmanager
def only_one(folder: Path) -> Iterator[None]:
    """Makes a folder, where need be, and keeps it for this process; a kill lets it go. One left empty is taken away.

    Raises:
      ValueError: another process has it.
    """
    made = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    if fcntl is None:
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{folder} is being written by another process: wait for it") from None
        except OSError:
            pass  # a file system without locks
        yield
    finally:
        os.close(handle)
        if made:
            with contextlib.suppress(OSError):
                folder.rmdir()  # only an empty one goes
