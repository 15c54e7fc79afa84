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
    time.sleep(0.05 + 2 * reward_timeout.ALARM_LOOK_SECONDS)  # nothing comes late


def test_limits_do_not_nest():
    """The inner one would switch the outer one off."""
    with pytest.raises(AssertionError, match="within"), timely(5, "outer"), timely(5, "inner"):
        pass
    with pytest.raises(TooSlow), timely(0.1, "this"):  # and it works as before
        time.sleep(10)


def test_a_task_that_catches_everything_makes_no_reward_of_it():
    def careful():
        try:
            time.sleep(60)
        except Exception:  # noqa: BLE001
            return 0.0

    with pytest.raises(TooSlow), timely(0.2, "this"):
        careful()

    with pytest.raises(TooSlow), timely(0.2, "this"):
        try:
            time.sleep(60)
        except BaseException:  # noqa: BLE001
            time.sleep(0.01)


def test_math_verifys_own_alarm_does_not_end_ours():
    import signal

    with pytest.raises(TooSlow), timely(0.3, "this"):
        signal.alarm(100)
        signal.alarm(0)
        time.sleep(10)


def test_code_that_never_comes_back_ends_the_process_with_a_traceback():
    """faulthandler's thread needs no interpreter: here one that another thread never gives up."""
    program = """
import ctypes, faulthandler
from grpo.sampling import reward_timeout
later = faulthandler.dump_traceback_later
faulthandler.dump_traceback_later = lambda s, **k: later(0.5, **k)
with reward_timeout.timely(0.1, "this"):
    ctypes.pythonapi.PyThread_acquire_lock.restype = ctypes.c_int
    lock = ctypes.pythonapi.PyThread_allocate_lock
    lock.restype = ctypes.c_void_p
    held = ctypes.c_void_p(lock())
    while True:
        ctypes.pythonapi.PyThread_acquire_lock(held, 1)  # holds the interpreter while it waits
"""
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
        recipe = a_recipe(prompts_of([MIXED]), reward_timeout_seconds=0.2)
        recipe.task.rewards = function
        with pytest.raises(RuntimeError, match=f"(?s)tasks/fake.py: rewards.*{reason}") as caught:
            sampled(FakeEngine(), recipe, prompts_of([MIXED]))
        assert caught.value.__cause__ is not None  # with its traceback


def rewarded(seconds, groups, monkeypatch, capsys, *, between=0.0):
    """-> what is said while so many groups are rewarded, each for `seconds`, and sampled."""
    monkeypatch.setattr(reward_timeout, "SPEAK_SECONDS", 0.4)
    monkeypatch.setattr(reward_timeout, "ALARM_LOOK_SECONDS", 0.02)
    monkeypatch.setattr(reward_timeout, "alarm", reward_timeout.Alarm())  # a new one
    recipe, engine = a_recipe(), FakeEngine()
    recipe.task.rewards = lambda item, text: time.sleep(seconds) or {"correctness": 1, "format": 1}
    decode = engine.text
    engine.text = lambda completion: time.sleep(between) or decode(completion)
    sampled(engine, recipe, prompts_of([MIXED] * groups), group_size=1)
    return capsys.readouterr().err


def test_slow_rewards_are_not_waited_for_in_silence(monkeypatch, capsys):
    said = rewarded(1.5, 1, monkeypatch, capsys)
    assert said.count("waiting for the rewards of question '?', tasks/fake.py, ") >= 2
    assert "tasks/fake.py, 1 s by now" in said


def test_many_rewards_that_are_not_slow_by_themselves_are_waited_for_aloud_too(monkeypatch, capsys):
    """An evaluation's have no group: 512 of 5 s each are 40 minutes."""
    said = rewarded(0.1, 15, monkeypatch, capsys)
    assert "waiting for the rewards" in said and ", 1 s by now" in said


def test_of_quick_rewards_nothing_is_said(monkeypatch, capsys):
    assert rewarded(0.001, 60, monkeypatch, capsys, between=0.02) == ""
