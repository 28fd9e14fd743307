"""Ctrl-C: not lost where an exception cannot be raised, not heard while a checkpoint is written."""

import signal
import threading

import pytest

from jspec.train.interrupts import heard, put_off


@pytest.fixture(autouse=True)
def heed_interrupts():
    """Also where a shell started the tests in the background, with Ctrl-C ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Swallowing:
    """As a callback of JAX's: what is raised in it is lost."""

    def __call__(self):
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            return


def test_an_interrupt_that_was_swallowed_is_seen():
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), heard() as look:
        look()
        Swallowing()()
        look()
        raise AssertionError("it was lost")
    assert signal.getsignal(signal.SIGINT) is before


def test_an_interrupt_is_put_off_to_the_end():
    done = []
    with pytest.raises(KeyboardInterrupt), heard() as look:
        with put_off():
            signal.raise_signal(signal.SIGINT)
            done.append("the checkpoint")
        done.append("more")
    assert done == ["the checkpoint"]
    with pytest.raises(KeyboardInterrupt):
        look()  # it was heard by the handler outside


def test_other_threads_and_ignored_signals_are_left_alone():
    done = []

    def work():
        with heard() as look, put_off():
            look()
            done.append(1)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with heard(), put_off():
            signal.raise_signal(signal.SIGINT)
            done.append(2)
    finally:
        signal.signal(signal.SIGINT, before)
    assert done == [1, 2]
