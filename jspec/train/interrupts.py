"""Ctrl-C where Python's own handling of it is not enough: it is neither lost nor heard in the midst of a checkpoint."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def heard() -> Iterator[Callable[[], None]]:
    """Gives a function that raises KeyboardInterrupt if there was a Ctrl-C.

    An exception that is raised in a callback of JAX's is swallowed, so who waits for one has to look, too.
    """
    seen = []

    def handle(number, frame):
        seen.append(number)
        raise KeyboardInterrupt

    def look():
        if seen:
            raise KeyboardInterrupt

    with _handled_by(handle):
        yield look


@contextlib.contextmanager
def put_off() -> Iterator[None]:
    """A Ctrl-C is heard at the end of what is done here."""
    seen = []
    with _handled_by(lambda number, frame: seen.append((number, frame))) as before:
        yield
    if seen:
        before(*seen[0])


@contextlib.contextmanager
def _handled_by(handle):
    """Only where Ctrl-C is handled by Python, and in the thread that can say how."""
    before = signal.getsignal(signal.SIGINT)
    if not callable(before) or threading.current_thread() is not threading.main_thread():
        yield before
        return
    signal.signal(signal.SIGINT, handle)
    try:
        yield before
    finally:
        signal.signal(signal.SIGINT, before)
