"""Time limits of rewards."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
from fakes import MIXED, FakeEngine, a_recipe, prompts_of, sampled

from grpo.sampling import reward_timeout
from grpo.sampling.reward_timeout import TooSlow, timely

ROOT = Path(__file__).parent.parent.parent


def for_ever():
    while True:
        pass


@pytest.mark.parametrize("busy", [for_ever, lambda: time.sleep(60)])
def test_what_takes_too_long_is_interrupted(busy):
    started = time.monotonic()
    with (
        pytest.raises(TooSlow, match=r"the rewards took more than 0.2 s"),
        timely(0.2, "the rewards"),
    ):
        busy()
    assert time.monotonic() - started < 5


def test_what_is_in_time_is_left_alone():
    for _ in range(20):
        with timely(0.05, "this"):
            time.sleep(0.001)
    time.sleep(0.1)  # nothing comes late


def test_a_task_that_catches_everything_makes_no_reward_of_it():
    def careful():
        try:
            time.sleep(60)
        except Exception:  # noqa: BLE001
            return 0.0

    with pytest.raises(TooSlow), timely(0.2, "this"):
        careful()


NEVER_BACK = """
    ctypes.pythonapi.PyThread_acquire_lock.restype = ctypes.c_int
    lock = ctypes.pythonapi.PyThread_allocate_lock
    lock.restype = ctypes.c_void_p
    held = ctypes.c_void_p(lock())
    while True:
        ctypes.pythonapi.PyThread_acquire_lock(held, 1)  # holds the interpreter while it waits
"""
OWN_ALARM = """
    signal.alarm(100)
    signal.alarm(0)
    time.sleep(60)
"""


@pytest.mark.parametrize("block", [NEVER_BACK, OWN_ALARM])
def test_what_can_not_be_interrupted_ends_the_process_with_a_traceback(block):
    """Also an alarm that the task has cancelled, as math-verify does. faulthandler's thread needs
    no interpreter: here one that another thread never gives up."""
    program = f"""
import ctypes, faulthandler, signal, time
from grpo.sampling import reward_timeout
later = faulthandler.dump_traceback_later
faulthandler.dump_traceback_later = lambda s, **k: later(0.5, **k)
with reward_timeout.timely(0.1, "this"):{block}"""
    run = subprocess.run(
        [sys.executable, "-c", program],
        check=False,
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=60,
    )
    assert run.returncode == 1 and "Timeout" in run.stderr and 'File "<string>"' in run.stderr


def test_a_reward_that_fails_or_hangs_stops_the_run_with_question_and_completion():
    def broken(item, text):
        raise KeyError("answer")

    def slow(item, text):
        if text == "second":
            time.sleep(60)
        return {"correctness": 1.0, "format": 1.0}

    for function, reason in [
        (broken, "KeyError.*'first'"),
        (slow, "REWARD_TIMEOUT_SECONDS.*'second'"),
    ]:
        recipe = a_recipe(prompts_of([MIXED]), REWARD_TIMEOUT_SECONDS=0.2)
        recipe.task.rewards = function
        with pytest.raises(RuntimeError, match=f"(?s)tasks/fake.py: rewards.*{reason}") as caught:
            sampled(FakeEngine(), recipe, prompts_of([MIXED]))
        assert caught.value.__cause__ is not None  # with its traceback


def test_slow_rewards_are_not_waited_for_in_silence(monkeypatch, capsys):
    monkeypatch.setattr(reward_timeout, "SPEAK_SECONDS", 0.4)
    recipe = a_recipe()
    recipe.task.rewards = lambda item, text: time.sleep(1) or {"correctness": 1, "format": 1}
    sampled(FakeEngine(), recipe.others(GROUP_SIZE=1), prompts_of([MIXED]))
    said = capsys.readouterr().err
    assert said.count("waiting for the rewards of question '?', tasks/fake.py, since ") == 2
