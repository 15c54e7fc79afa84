"""class Environment: one for each completion, with its state, closed whatever happens."""

import math
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from fakes import a_recipe, sampled
from test_turns import Actor, prompts

from grpo.faults import TaskError
from grpo.options.turns.turns import stream_turns
from grpo.sample import Prompt


class Counter:
    """Counts down from the item's secret; the reward is how often it was asked."""

    live, made, ended = set(), [], []
    __len__ = lambda self: 0  # it may be falsy

    def __init__(self, item):
        self.left, self.asked = item["secret"], 0
        self.live.add(self)
        self.made.append(self)

    def reply(self, turn):
        self.asked += 1
        self.left -= 1
        if self.left < 0:
            raise ValueError("no more")
        return {"role": "user", "content": f"left {self.left}"} if self.left else None

    def rewards(self, turns):
        return {"reward": self.asked, "turns": len(turns)}

    def close(self):
        self.live.discard(self)
        self.ended.append(self)


@pytest.fixture(autouse=True)
def fresh():
    Counter.live, Counter.made, Counter.ended = set(), [], []


def recipe_of(tokenizer, *secrets, environment=Counter, **constants):
    task = SimpleNamespace(Environment=environment, messages=lambda item: [])
    own = {"MAX_COMPLETION_TOKENS": 200, "REWARD_WEIGHTS": {"reward": 1.0, "turns": 0.0}}
    recipe = a_recipe(task=task, **own | {"OUTCOME": "reward", "TASK": "mine"} | constants)
    recipe = replace(recipe, prompts=list(prompts(tokenizer, *secrets)))
    return recipe


def test_each_completion_has_an_environment_and_its_own_state(tokenizer):
    recipe = recipe_of(tokenizer, 3, 1)
    actor = Actor(tokenizer, ["One", "two", "three"])
    groups = sampled(actor, recipe, iter(recipe.prompts))
    found = {g.item["secret"]: [(s.text, s.rewards) for s in g.samples] for g in groups}
    three = ["One", "left 2", "two", "left 1", "three"], {"reward": 3.0, "turns": 5.0}
    assert found == {3: [three] * 2, 1: [(["One"], {"reward": 1.0, "turns": 1.0})] * 2}
    assert len(Counter.made) == len(Counter.ended) == 4 and not Counter.live


def test_a_truncated_conversation_is_rewarded_and_closed_too(tokenizer):
    recipe = recipe_of(tokenizer, 3, MAX_COMPLETION_TOKENS=4)
    (group,) = sampled(Actor(tokenizer, ["One", "two"]), recipe, iter(recipe.prompts))
    assert all(s.truncated and s.rewards["reward"] <= 1 for s in group.samples)
    assert not Counter.live


@pytest.mark.parametrize("method", ["__init__", "reply", "rewards", "close"])
@pytest.mark.parametrize("hangs", [False, True])
def test_whichever_method_fails_all_others_are_closed_and_soon(tokenizer, method, hangs):
    """Of six environments, the third; hanging ones are given up together."""

    def fail(self, *arguments):
        third = len(Counter.made) == 2 if method == "__init__" else self is Counter.made[2]
        if third:
            Counter.live.discard(self)
            raise OSError("no more")
        return getattr(Counter, method)(self, *arguments)

    slow = {"close": lambda self: time.sleep(9)} if hangs else {}
    bad = type("Bad", (Counter,), slow | {method: fail})
    recipe = recipe_of(tokenizer, 1, 1, 1, environment=bad, REWARD_TIMEOUT_SECONDS=1)
    began = time.monotonic()
    with pytest.raises(TaskError, match="OSError"):
        sampled(Actor(tokenizer, ["One"]), recipe, iter(recipe.prompts))
    assert time.monotonic() - began < 3 and (hangs or not Counter.live)  # 5 s if each had its own


def test_all_are_closed_if_the_stream_is_not_read_to_its_end(tokenizer):
    recipe = recipe_of(tokenizer, 1, 5, 5)
    actor = Actor(tokenizer, ["One", "two", "three", "four", "five"])
    settings = {"group_size": 2, "max_sequences": 99, "max_new_tokens": 200, "seed": 0}
    groups = stream_turns(actor, recipe, (Prompt(p, p[2]) for p in recipe.prompts), **settings)
    next(groups)
    assert Counter.live
    groups.close()
    assert not Counter.live


def test_what_an_environment_may_not_return_is_said(tokenizer):
    for got in (5, {"role": "tool"}, {"role": 1, "content": "x"}):
        bad = type("Bad", (), {"__init__": lambda self, item: None, "reply": lambda *_, g=got: g})
        recipe = recipe_of(tokenizer, 1, environment=bad)
        recipe.task.rewards = lambda item, turns: {"reward": 1, "turns": 1}
        with pytest.raises(TaskError, match=f"returned {got}: it must .* a text or a message"):
            sampled(Actor(tokenizer, ["One"]), recipe, iter(recipe.prompts))
    recipe = recipe_of(tokenizer, 1, environment=lambda item: None)
    recipe.task.rewards = lambda item, turns: {"reward": 1, "turns": 1}
    with pytest.raises(TaskError, match="an object with reply"):
        sampled(Actor(tokenizer, ["One"]), recipe, iter(recipe.prompts))


def test_rewards_of_none_and_those_without_weights(tokenizer):
    """None does not apply; the names are those of an empty completion, as for rewards()."""

    rewards = lambda self, turns: None if self.asked > 1 else 1.0
    silent = type("Silent", (Counter,), {"rewards": rewards})
    recipe = recipe_of(tokenizer, 1, 2, environment=silent, REWARD_WEIGHTS=None, OUTCOME=None)
    recipe = recipe.resolved()
    assert recipe.weights == {"reward": 1.0} and not Counter.live
    groups = sampled(Actor(tokenizer, ["One", "two"]), recipe, iter(recipe.prompts))
    found = {g.item["secret"]: [s.rewards["reward"] for s in g.samples] for g in groups}
    assert found[1] == [1.0] * 2 and repr(found[2]) == "[nan, nan]"


def test_an_environment_that_is_made_too_late_gives_no_reward(tokenizer):
    class Slow(Counter):
        def __init__(self, item):
            time.sleep(9 * (item["secret"] == 1))
            super().__init__(item)

    recipe = recipe_of(tokenizer, 1, 2, environment=Slow, REWARD_TIMEOUT_SECONDS=0.1)
    groups = sampled(Actor(tokenizer, ["One", "two"]), recipe, iter(recipe.prompts))
    found = {g.item["secret"]: [s.rewards["reward"] for s in g.samples] for g in groups}
    assert repr(found) == "{1: [nan, nan], 2: [2.0, 2.0]}" and not Counter.live


def test_an_environment_whose_reply_is_late_gives_no_reward(tokenizer):
    late = type("Late", (Counter,), {"reply": lambda self, turn: time.sleep(9)})
    recipe = recipe_of(tokenizer, 1, environment=late, REWARD_TIMEOUT_SECONDS=0.1)
    (group,) = sampled(Actor(tokenizer, ["One"]), recipe, iter(recipe.prompts))
    assert all(math.isnan(s.total) for s in group.samples) and not Counter.live


def test_async_methods_are_awaited_and_plain_ones_called_in_the_main_thread(tokenizer):
    threads = {}

    class Both(Counter):
        async def reply(self, turn):
            threads["reply"] = threading.current_thread()
            return super().reply(turn)

        def rewards(self, turns):
            threads["rewards"] = threading.current_thread()
            return super().rewards(turns)

        async def close(self):
            super().close()

    recipe = recipe_of(tokenizer, 2, environment=Both)
    (group,) = sampled(Actor(tokenizer, ["One", "two"]), recipe, iter(recipe.prompts))
    assert [s.rewards["reward"] for s in group.samples] == [2.0, 2.0] and not Counter.live
    assert threads["rewards"] is threading.main_thread() is not threads["reply"]
