"""Files that are there whole or not at all."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any


def check_writable(folder: Path, size: int = 0) -> None:
    """Makes sure, as far as can be known beforehand, that files can be put into a folder.

    Args:
      folder: that is there.
      size: bytes that they need.

    Raises:
      OSError: it is no folder, or one that cannot be written, or its disk is full.
    """
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise OSError(f"{folder} is no folder that can be written")
    if size > (free := shutil.disk_usage(folder).free):
        raise OSError(f"{folder} needs {size >> 10} KB, and its disk has {free >> 10} left")


def put(path: Path, write_to: Callable[[Any], Any], shared: bool = False) -> None:
    """Writes a file whole or not at all.

    Args:
      path: a file that is there is replaced.
      write_to: writes the content into the binary file that it is given.
      shared: other processes may write it at the same time. Without it, what a kill leaves behind is overwritten.

    Raises:
      OSError: it cannot be written.
    """
    part = path.with_name(f"{path.name}.{os.getpid()}.part" if shared else f"{path.name}.part")
    try:
        with part.open("wb") as file:
            write_to(file)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
