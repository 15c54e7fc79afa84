"""Mistakes in a task's functions are named with a line."""

import math
import signal
import sys

import pytest
from fakes import a_recipe

from grpo import rewards
from grpo.faults import TaskError
from grpo.prepare import gold_of
from grpo.rewards import reward_texts
from grpo.stop import stop
from grpo.task import load_chat, load_items, load_task

HEAD = """
import asyncio, functools, os, tempfile, torch
class Mute(Exception):
    def __str__(self): return 1 / 0
    __repr__ = __str__
class Judge:
    async def __call__(self, item, text): return 1.0
async def judge(item, text): return 1.0
def load(split): return [{"question": "?", "answer": "1"}]
def messages(item): return [{"role": "user", "content": "?"}]
def rewards(item, text): return 1.0"""
AFTER = HEAD.count("\n") + 2


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    """-> a function that makes a recipe of HEAD and a task's code, from line AFTER on."""
    monkeypatch.setattr(sys, "path", list(sys.path))

    def make(code):
        file = tmp_path / f"task{len(list(tmp_path.iterdir()))}.py"
        file.write_text(f"{HEAD}\n{code}")
        own = {"TASK": str(file), "REWARD_WEIGHTS": {"reward": 1.0}, "OUTCOME": "reward"}
        return a_recipe(task=load_task(str(file)), **own)

    return make


def rewarded(recipe):
    return reward_texts(recipe, {"question": "?", "answer": "1"}, ["1", "2"])


KINDS = ["GeneratorExit()", "asyncio.CancelledError()", "SystemExit(3)"]
KINDS += ["BaseException('x')", "Mute()", "ValueError('x')", "TimeoutError('x')"]


@pytest.mark.parametrize("error", KINDS)
@pytest.mark.parametrize("function", ["rewards(item, text)", "group_rewards(item, texts)"])
@pytest.mark.parametrize("how", ["def", "async def"])
def test_whatever_a_reward_raises_is_named_with_its_line(error, function, how, recipe):
    task = recipe(f"{how} {function}:\n    raise {error}\n")
    kind = error.partition("(")[0].rpartition(".")[2]
    line = f", line {AFTER + 1}" * (kind != "CancelledError" or how == "def")
    with stop.listening(), pytest.raises(TaskError, match=rf"rewards\(\) failed with .*{line}: "):
        rewarded(task)


def test_the_users_ctrl_c_is_no_mistake(recipe):
    task = recipe("def rewards(item, text): os.kill(os.getpid(), 2)\ngold = lambda item: 1 / 0")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            rewarded(task)
    finally:
        signal.signal(signal.SIGINT, before)


def test_the_line_of_a_library_is_named_beside_that_of_the_task(recipe):
    task = recipe("import json\ndef rewards(item, text):\n    return json.loads('?')\n")
    with pytest.raises(
        TaskError, match=rf"DecodeError, line {AFTER + 2} \(.*json/decoder.py, line \d"
    ):
        rewarded(task)


@pytest.mark.parametrize("code", [
    "rewards = lambda item, text: judge(item, text)",
    "def rewards(item, text): return {'reward': judge(item, text)}",
    "rewards = Judge()",
    "def group_rewards(item, texts): return judge(item, texts)\ndel rewards",
    "class Environment:\n    def __init__(self, item): ...\n    def reply(self, turn): ...\n    "
    + "def rewards(self, turns): return judge(0, turns)\ndel rewards",
])  # fmt: skip
def test_a_coroutine_in_place_of_a_reward_is_named_with_the_cure(code, recipe):
    with pytest.raises(TaskError, match="returned .*coroutine.*: write `async def` if it is rewa"):
        rewarded(recipe(code))


def test_partial_async_functions_and_async_group_rewards_are_awaited(recipe):
    assert rewarded(recipe("rewards = functools.partial(judge)")) == [{"reward": 1.0}] * 2
    code = "async def group_rewards(item, texts): return [1.0] * len(texts)\ndel rewards"
    assert rewarded(recipe(code)) == [{"reward": 1.0}] * 2


def test_async_code_that_blocks_the_loop_is_too_slow(recipe, monkeypatch):
    monkeypatch.setattr(rewards, "GRACE_SECONDS", 0)
    task = recipe("import time\nasync def rewards(item, text): time.sleep(1)")
    task = task.others(REWARD_TIMEOUT_SECONDS=0.1)
    assert repr(rewarded(task)) == repr([{"reward": math.nan}] * 2)


@pytest.mark.parametrize("function", ["load(split)", "messages(item)", "gold(item)"])
def test_other_functions_can_not_be_async(function, recipe):
    task = recipe(f"async def {function}: return 1.0")
    with pytest.raises(TaskError, match=f"{function[:4]}.* returned <coroutine .*plain functions"):
        load_chat(task.c.TASK, task.task, load_items(task.c.TASK, task.task, "train")[0])
        gold_of(task, {}, "")
