"""Rewards that a task can not give, or not in time, and rewards that are awaited."""

import asyncio
import math
import multiprocessing
import signal
import threading
import time
from types import SimpleNamespace

import pytest
import requests
from fakes import MIXED, FakeEngine, a_recipe, a_run, prompts_of, sampled

from grpo.metrics import rollout_metrics
from grpo.rewards import begin_rewards, group_of, reward_texts, set_rewards
from grpo.stop import stop

NAN = {"correctness": math.nan, "format": math.nan}


def away(item, text):
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


def test_plain_rewards_of_a_group_share_the_limit(capsys):
    recipe = recipe_with(lambda item, text: time.sleep(0.3) or {"correctness": 1, "format": 0})
    group = group_of(recipe, {}, ["a"] * 4)
    recipe = recipe.others(REWARD_TIMEOUT_SECONDS=0.7)
    set_rewards(recipe, group, begin_rewards(recipe, group))
    assert [math.isnan(s.total) for s in group.samples] == [False, False, True, True]
    assert "took more than 0.7 s: 2 of 4 calls" in capsys.readouterr().out


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


def test_async_rewards_work_where_a_loop_runs_already():
    """As in a notebook."""

    async def cell():
        return reward_texts(recipe_with(quick), {"question": "?"}, ["a"])

    assert asyncio.run(cell()) == [{"correctness": 1.0, "format": 0.0}]


@pytest.mark.parametrize("members", [
    {"rewards": swallows}, {"rewards": blocks}, {"rewards": waits},
    {"rewards": quick, "group_rewards": lambda item, texts: time.sleep(4)},
])  # fmt: skip
def test_a_time_limit_holds_for_code_that_catches_it_blocks_the_loop_or_is_beside_it(members):
    recipe = a_recipe(task=SimpleNamespace(**members), REWARD_TIMEOUT_SECONDS=0.2, TASK="mine")
    (group,) = sampled(FakeEngine(), recipe, prompts_of([MIXED]))
    given = [not math.isnan(rewards["format"]) for rewards in rewards_of(group)]
    assert given == [members["rewards"] is waits, False]


# --- Graders that fork ------------------------------------------------------------------
FORK = multiprocessing.get_context("fork")


def forks_and_terminates():
    process = FORK.Process(target=time.sleep, args=(99,))
    process.start()
    process.terminate()
    process.join(60)
    return process.exitcode == -signal.SIGTERM


def has_a_pool():
    with FORK.Pool(2) as pool:
        return pool.map(abs, [-1]) == [1]


@pytest.mark.parametrize("call", [forks_and_terminates, has_a_pool])
def test_graders_may_fork(call):
    recipe = recipe_with(lambda item, text: {"correctness": call(), "format": 0})
    recipe = recipe.others(REWARD_TIMEOUT_SECONDS=60)
    with stop.listening():
        (group,) = sampled(FakeEngine(), recipe, prompts_of([MIXED]))
    assert [r["correctness"] for r in rewards_of(group)] == [1.0, 1.0]
    assert signal.getsignal(signal.SIGALRM) == signal.SIG_DFL and not stop.asked
