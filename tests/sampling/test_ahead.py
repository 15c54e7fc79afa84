"""Sampling in a thread of its own, while its reader computes rewards."""

import threading
import time

import pytest
from fakes import ALL_RIGHT, MIXED, FakeEngine, a_recipe, prompts_of, sampled

from grpo.sampling.ahead import ahead
from grpo.sampling.reward_timeout import TooSlow


def test_it_gives_the_same_values_and_does_not_wait_for_the_reader():
    done = threading.Event()

    def values():
        yield from range(5)
        done.set()

    read = ahead(values())
    assert next(read) == 0 and done.wait(5)  # the reader has one, and all others are there
    assert list(read) == [1, 2, 3, 4]


def test_what_it_raises_comes_after_what_it_yielded():
    def values():
        yield 1
        raise ValueError("the weights are broken")

    read = ahead(values())
    assert next(read) == 1
    with pytest.raises(ValueError, match="the weights are broken"):
        next(read)


def test_it_ends_where_the_reader_leaves_and_cleans_up_in_its_own_thread():
    ended = []

    def values():
        try:
            while True:
                time.sleep(0.01)
                yield 1
        finally:
            ended.append(threading.current_thread())

    for _ in (read := ahead(values())):
        break
    read.close()
    (thread,) = ended
    assert thread is not threading.main_thread() and not thread.is_alive()


def test_rewards_beside_are_those_of_the_same_groups_and_in_the_main_thread():
    recipe, threads = a_recipe(), []
    rewards = recipe.task.rewards
    recipe.task.rewards = lambda *a: threads.append(threading.current_thread()) or rewards(*a)
    prompts = prompts_of([MIXED, ALL_RIGHT, MIXED])
    expected = sampled(FakeEngine(), recipe, prompts)
    assert sampled(FakeEngine(), recipe, prompts, beside=True) == expected
    assert set(threads) == {threading.main_thread()}


def test_a_reward_that_hangs_beside_sampling_is_interrupted_all_the_same():
    recipe = a_recipe(REWARD_TIMEOUT_SECONDS=0.2)
    recipe.task.rewards = lambda item, text: time.sleep(60)
    with pytest.raises(RuntimeError, match="REWARD_TIMEOUT_SECONDS") as caught:
        sampled(FakeEngine(), recipe, prompts_of([MIXED] * 3), beside=True)
    assert isinstance(caught.value.__cause__, TooSlow)
