import subprocess
import sys

import pytest

from jspec.train.lock import only_one

OTHER = """
import sys
from pathlib import Path
from jspec.train.lock import only_one
with only_one(Path(sys.argv[1])):
    print("in", flush=True)
    sys.stdin.read()
"""


def test_two_processes_in_one_folder(tmp_path):
    folder = tmp_path / "a" / "run"
    command = [sys.executable, "-c", OTHER, str(folder)]
    other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdout.readline() == "in\n"
    with (
        pytest.raises(ValueError, match="run is being written by another process"),
        only_one(folder),
    ):
        pass
    other.kill()  # as it happens
    other.communicate()
    with only_one(folder):
        assert list(folder.iterdir()) == []
    with only_one(folder):
        pass
