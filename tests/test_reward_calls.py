"""The time limit of a task's functions."""

import contextlib
import signal
import time

import pytest
from processes import python

from grpo import rewards
from grpo.faults import TooSlow
from grpo.rewards import timely


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
    with pytest.raises(TooSlow, match="0.2"), timely(0.2):
        busy()
        pytest.fail("it was not interrupted")


def test_an_alarm_that_is_lost_rings_again(monkeypatch):
    """Python prints and drops what is raised in a __del__, or in a hook of fork()."""
    monkeypatch.setattr(rewards, "GRACE_SECONDS", 0.2)

    class Deaf:
        def __del__(self):
            time.sleep(0.5)

    began = time.monotonic()
    with pytest.raises(TooSlow), timely(0.1):
        Deaf()
        time.sleep(60)
    assert time.monotonic() - began < 30


@pytest.mark.parametrize("rings", [False, True])
def test_a_block_leaves_no_timer_even_if_the_alarm_rings_as_it_ends(rings, monkeypatch):
    """Or it would end the process later, while the next completions are sampled."""
    before, plain = signal.getsignal(signal.SIGALRM), signal.setitimer

    def late(timer, seconds):
        plain(timer, seconds)
        if rings and (timer, seconds) == (signal.ITIMER_REAL, 0):
            signal.raise_signal(signal.SIGALRM)

    with pytest.raises(TooSlow) if rings else contextlib.nullcontext(), timely(60):
        assert 0 < signal.getitimer(signal.ITIMER_REAL)[0] <= 60
        monkeypatch.setattr(signal, "setitimer", late)
    for timer in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL):
        assert signal.getitimer(timer) == (0, 0)
    assert signal.getsignal(signal.SIGALRM) == before


def test_c_code_that_computes_for_ever_is_named_and_ends_the_process():
    """It keeps the interpreter, so that no code of Python runs again."""
    program = """
from grpo import rewards
rewards.os.cpu_count = lambda: 1
rewards.GRACE_SECONDS = 0.4
with rewards.timely(0.1):
    max(range(10**11))
"""
    run = python("-c", program)
    assert run.returncode == -signal.SIGVTALRM and 'File "<string>", line 6' in run.stderr


def test_many_threads_may_compute_until_the_limit():
    program = """
import time, torch
from grpo import rewards
rewards.GRACE_SECONDS, end, a = 0, time.monotonic() + 3, torch.ones(1000, 1000)
with rewards.timely(4):
    while time.monotonic() < end:
        a @ a
"""
    assert python("-c", program).returncode == 0
