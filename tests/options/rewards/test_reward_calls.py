"""The time limit of a task's functions."""

import time

import pytest
from processes import python

from grpo.calls import TooSlow, timely


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
    started = time.monotonic()
    with pytest.raises(TooSlow, match="this took more than 0.2 s"), timely(0.2, "this"):
        busy()
    assert time.monotonic() - started < 5


def test_what_is_in_time_is_left_alone():
    for _ in range(20):
        with timely(0.05, "this"):
            time.sleep(0.001)
    time.sleep(0.1)  # nothing follows


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
