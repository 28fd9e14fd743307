"""Files that are there whole or not at all."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any


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
