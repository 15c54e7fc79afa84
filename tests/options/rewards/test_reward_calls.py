"""The time limit of a task's functions."""

import math
import signal
import time

import pytest
from processes import python

from grpo.calls import TooSlow, timely, watchdog


def for_ever():
    while True:
        pass


def careful():
    try:
        time.sleep(60)
    except Exception:  # noqa: BLE001
        return 0.0


@pytest.mark.parametrize("busy", [for_ever, careful, lambda: time.sleep(60)])
def test_what_takes_too_long_is_interrupted(busy):
    """Also in a task that catches everything."""
    with pytest.raises(TooSlow, match="this took more than 0.2 s"), timely(0.2, "this"):
        busy()
        pytest.fail("it was not interrupted")


def test_what_is_in_time_is_left_alone():
    before = signal.getsignal(signal.SIGALRM)
    for _ in range(20):
        with timely(60, "this"):
            assert 0 < signal.getitimer(signal.ITIMER_REAL)[0] <= 60 and watchdog.ends < math.inf
    nothing_follows(before)


def nothing_follows(before):
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0) and watchdog.ends == math.inf
    assert signal.getsignal(signal.SIGALRM) == before


def test_an_alarm_that_rings_as_the_block_ends_leaves_no_watchdog(monkeypatch):
    """Or it would end the process later, while the next completions are sampled."""
    before, plain = signal.getsignal(signal.SIGALRM), signal.setitimer

    def late(timer, seconds):
        plain(timer, seconds)
        if seconds == 0:
            signal.raise_signal(signal.SIGALRM)

    with pytest.raises(TooSlow), timely(0.005, "this"):  # from then on any alarm is one
        monkeypatch.setattr(signal, "setitimer", late)
    nothing_follows(before)


NEVER_BACK = """
    ctypes.pythonapi.PyThread_acquire_lock.restype = ctypes.c_int
    lock = ctypes.pythonapi.PyThread_allocate_lock
    lock.restype = ctypes.c_void_p
    mutex = ctypes.c_void_p(lock())
    while True:
        ctypes.pythonapi.PyThread_acquire_lock(mutex, 1)  # keeps the interpreter while it waits
"""
OWN_ALARM = """
    signal.alarm(100)
    signal.alarm(0)
    time.sleep(60)
"""


@pytest.mark.parametrize("block", [NEVER_BACK, OWN_ALARM])
def test_what_can_not_be_interrupted_ends_the_process_with_a_traceback(block):
    """Also an alarm that the task has cancelled, as math-verify does. The watchdog needs no
    interpreter: here one that another thread never gives up."""
    program = f"""
import ctypes, signal, time
from grpo import calls
calls.GRACE_SECONDS = 0.4
with calls.timely(0.1, "this"):{block}"""
    run = python("-c", program)
    assert run.returncode == 1 and 'File "<string>"' in run.stderr
