"""Rewards that a task can not give, or not in time, and rewards that are awaited."""

import asyncio
import contextlib
import math
import multiprocessing
import re
import signal
import subprocess
import threading
import time
from types import SimpleNamespace

import pytest
import requests
from fakes import MIXED, FakeEngine, a_recipe, a_run, prompts_of, sampled

import grpo_ref_split as trainer
from grpo.constants import Constants
from grpo.metrics import rollout_metrics
from grpo.prepare import prepare
from grpo.rewards import begin_rewards, group_of, set_rewards
from grpo.stop import stop

NAN = {"correctness": math.nan, "format": math.nan}


def away(item, text):
    """A task whose service fails."""
    try:
        if text == "second":
            raise requests.ConnectionError("the judge is away")
        return {"correctness": 1.0, "format": 0.0}
    except requests.RequestException:
        return None


def recipe_with(rewards, **members):
    return a_recipe(task=SimpleNamespace(rewards=rewards, **members), TASK="mine")


def rewards_of(group):
    return [sample.rewards for sample in group.samples]


def test_none_of_a_service_that_fails_is_no_reward(alone):
    recipe = recipe_with(away)
    (group,) = sampled(FakeEngine(), recipe, prompts_of([MIXED]))
    assert repr(rewards_of(group)) == repr([{"correctness": 1.0, "format": 0.0}, NAN])
    metrics = rollout_metrics(a_run(recipe), [group], 0)
    assert metrics["rewards/none"] == 0.5 and metrics["accuracy"] == 1 and metrics["reward"] == 1.0


def test_none_of_group_rewards_is_none_for_each_completion():
    recipe = recipe_with(lambda item, text: {"correctness": 1}, group_rewards=lambda *_: None)
    (group,) = sampled(FakeEngine(), recipe, prompts_of([MIXED]))
    assert repr(rewards_of(group)) == repr([NAN, NAN]) and math.isnan(group.samples[0].total)


def test_plain_rewards_of_a_group_share_the_limit():
    recipe = recipe_with(lambda item, text: time.sleep(0.3) or {"correctness": 1, "format": 0})
    group = group_of(recipe, {}, ["a"] * 4)
    recipe = recipe.others(REWARD_TIMEOUT_SECONDS=0.7)
    set_rewards(recipe, group, begin_rewards(recipe, group))
    assert [math.isnan(s.total) for s in group.samples] == [False, False, True, True]


def test_a_slow_reward_counts_as_none_alone(capsys):
    def slow(item, text):
        if text == "second":
            signal.raise_signal(signal.SIGALRM)
        return {"correctness": 1.0, "format": 0.0}

    recipe = recipe_with(slow).others(REWARD_TIMEOUT_SECONDS=60)
    (group,) = sampled(FakeEngine(), recipe, prompts_of([MIXED]))
    assert [math.isnan(r["format"]) for r in rewards_of(group)] == [False, True]
    assert "took more than 60 s: 1 of 2 calls" in capsys.readouterr().out


# --- Rewards that are awaited -----------------------------------------------------------
def test_async_rewards_of_all_completions_wait_together():
    """Each waits for the last one."""
    waiting, all_wait = [], asyncio.Event()

    async def rewards(item, text):
        waiting.append(threading.get_ident())
        if len(waiting) == 16:
            all_wait.set()
        await all_wait.wait()
        return {"correctness": float(text == "first"), "format": 0.0}

    task = SimpleNamespace(rewards=rewards)
    recipe = a_recipe(task=task, TASK="mine")
    prompts = [(i, {"question": str(i)}, [5, 6]) for i in range(8)]
    groups = sampled(FakeEngine(), recipe, prompts)
    assert len(waiting) == 16 and len(set(waiting)) == 1  # one thread
    assert [r["correctness"] for g in groups for r in rewards_of(g)] == [1.0, 0.0] * 8


TASK = """
def load(split): return [{"question": "1", "answer": "1", "more": [1]}]
def messages(item): return [{"role": "user", "content": item["question"]}]
REWARD_WEIGHTS = {"reward": 1.0}
"""


def prepared(tmp_path, tiny, code, **constants):
    (tmp_path / "mine.py").write_text(TASK + code)
    words = {"TASK": str(tmp_path / "mine.py"), "MODEL": str(tiny), "MAX_PROMPT_TOKENS": 99}
    words |= {"MAX_COMPLETION_TOKENS": 9, "REF_SERVER": None, "REWARD_TIMEOUT_SECONDS": 99}
    return prepare(Constants(trainer.DEFAULTS | words | constants))


def test_async_rewards_work_where_a_loop_runs_already(tmp_path, tiny, capsys):
    """As in a notebook."""

    async def cell():
        prepared(tmp_path, tiny, "async def rewards(item, text): return text == item['answer']")

    asyncio.run(cell())
    assert "gold answer '1': reward 1" in capsys.readouterr().out


def swallows(item, text):
    try:
        time.sleep(0.5)
    except BaseException:  # noqa: BLE001
        return {"correctness": 1, "format": 0}


async def blocks(item, text):
    time.sleep(0.5)  # noqa: ASYNC251
    return {"correctness": 1, "format": 0}


async def waits(item, text):
    await asyncio.sleep(9 * (text == "second"))
    return {"correctness": 1, "format": 0}


async def quick(item, text):
    return {"correctness": 1, "format": 0}


@pytest.mark.parametrize("members", [
    {"rewards": swallows}, {"rewards": blocks}, {"rewards": waits},
    {"rewards": quick, "group_rewards": lambda item, texts: time.sleep(4)},
])  # fmt: skip
def test_a_time_limit_holds_for_code_that_catches_it_blocks_the_loop_or_is_beside_it(members):
    recipe = a_recipe(task=SimpleNamespace(**members), REWARD_TIMEOUT_SECONDS=0.2, TASK="mine")
    (group,) = sampled(FakeEngine(), recipe, prompts_of([MIXED]))
    given = [not math.isnan(rewards["format"]) for rewards in rewards_of(group)]
    assert given == [members["rewards"] is waits, False]


# --- What graders do --------------------------------------------------------------------
def forks_and_terminates():
    process = FORK.Process(target=time.sleep, args=(99,))
    process.start()
    process.terminate()
    process.join(60)
    return process.exitcode == -signal.SIGTERM


def has_a_pool():
    with FORK.Pool(2) as pool:
        return pool.map(abs, [-1]) == [1]


def has_a_subprocess():
    with contextlib.suppress(subprocess.TimeoutExpired):
        return not subprocess.run(["sleep", "99"], timeout=0.1, check=True)
    return True


def has_an_alarm():  # as math-verify has
    before = signal.signal(signal.SIGALRM, lambda *_: 1 / 0)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    with contextlib.suppress(ZeroDivisionError):
        time.sleep(99)
    signal.signal(signal.SIGALRM, before)
    return True


def leaves_a_thread():
    threading.Thread(target=time.sleep, args=(3,), daemon=True).start()
    return True


def catches_all():
    try:
        time.sleep(99)
    except:  # noqa: E722
        return True


def explodes():
    return re.match(r"(a+)+$", "a" * 64 + "b") is None


FORK = multiprocessing.get_context("fork")
GOOD = [forks_and_terminates, has_a_pool, has_a_subprocess, has_an_alarm, leaves_a_thread]


@pytest.mark.parametrize("call", [*GOOD, catches_all, explodes])
def test_graders_may_do_what_graders_do(call):
    seconds = 60 if call in GOOD else 0.3
    recipe = recipe_with(lambda item, text: {"correctness": call(), "format": 0})
    recipe = recipe.others(REWARD_TIMEOUT_SECONDS=seconds)
    with stop.listening():
        (group,) = sampled(FakeEngine(), recipe, prompts_of([MIXED]))
    assert [r["correctness"] == 1 for r in rewards_of(group)] == [call in GOOD] * 2
    assert signal.getsignal(signal.SIGALRM) == signal.SIG_DFL and not stop.asked
