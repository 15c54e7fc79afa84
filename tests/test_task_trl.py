"""TRL's reward functions in tasks/trl.py: what they get, what a run makes of what they return."""

import asyncio
import math

import pytest
import torch
from fakes import a_recipe

from grpo.rewards import begin_rewards, group_of
from grpo.rewards import set_rewards as reward
from tasks import trl

CHAT = [{"role": "system", "content": "Add."}, {"role": "user", "content": "2+3?"}]
CHAT_ITEM = {"prompt": CHAT, "solution": "5", "level": 2}
TEXT_ITEM = CHAT_ITEM | {"prompt": "2+3?"}


def rewarded(monkeypatch, functions, item, *texts):
    monkeypatch.setattr(trl, "functions", lambda: functions)
    weights = {name: 2.0**-i for i, name in enumerate(functions)}
    recipe = a_recipe(task=trl, TASK="trl", REWARD_WEIGHTS=weights)
    group = group_of(recipe, item, list(texts))
    reward(recipe, group, begin_rewards(recipe, group))
    return [list(s.rewards.values()) for s in group.samples], [s.total for s in group.samples]


@pytest.mark.parametrize("item, given", [
    (CHAT_ITEM, [[{"role": "assistant", "content": t}] for t in ("5", "")]),
    (TEXT_ITEM, ["5", ""]),
])  # fmt: skip
def test_a_function_gets_a_groups_lists_as_trl_gives_them(item, given, monkeypatch):
    calls = []

    def function(prompts, completions, **columns):
        columns.pop("log_extra")("name", []), columns.pop("log_metric")("name", 1.0)
        calls.append((prompts, completions, columns))
        return [1.0, 0.0]

    rewarded(monkeypatch, {"f": function}, item, "5", "")
    columns = {"solution": ["5"] * 2, "level": [2] * 2}
    assert calls == [([item["prompt"]] * 2, given, columns)]
    assert trl.messages(item)[-1] == CHAT[1]
    roles = [message["role"] for message in trl.as_messages(["5", "no", "6"])]
    assert roles == ["assistant", "user", "assistant"]


def test_values_none_and_weights_are_trls(monkeypatch):
    async def later(completions, **_):
        loops.append(asyncio.get_running_loop())
        return [None, None, 4]

    loops, functions = [], {"plain": lambda completions, **_: [True, None, 0.5], "later": later}
    for item in (CHAT_ITEM, TEXT_ITEM):
        values, totals = rewarded(monkeypatch, functions, item, "a", "b", "c")
        (one, none), unscored, both = values
        assert (one, both) == (1.0, [0.5, 4.0]) and all(map(math.isnan, [none, *unscored]))
        assert totals[::2] == [1.0, 2.5] and math.isnan(totals[1])
    assert loops[0] is loops[1]  # an HTTP client keeps its connections


@pytest.mark.parametrize("function, says", [
    (lambda completions, **_: [1.0], "group_rewards.* failed with ValueError"),
    (lambda completions, **_: 1.0, "group_rewards.* failed with TypeError"),
    (lambda completions, **_: "10", "'f' is a str"),
    (lambda completions, **_: [[1.0], [1.0]], "list"),
    (lambda completions, **_: torch.tensor(1.0), "group_rewards.* failed with TypeError"),
    (lambda completions, completion_ids, **_: [1.0, 1.0], "completion_ids"),
    (lambda completions, **_: [1.0, "yes"], "'yes'"),
    (lambda completions, **_: [1.0, math.nan], "nan"),
])  # fmt: skip
def test_what_does_not_fit_ends_the_run(function, says, monkeypatch):
    other = lambda completions, **_: [0, 0]
    with pytest.raises((RuntimeError, SystemExit), match=says):
        rewarded(monkeypatch, {"other": other, "f": function}, CHAT_ITEM, "a", "b")


def test_any_sequence_of_numbers_will_do_and_a_begun_answer_is_no_part_of_the_prompt(monkeypatch):
    given = []

    def function(prompts, completions, **_):
        given.append((prompts, completions))
        return (value for value in (torch.tensor(1.0), True))

    functions = {"a": function, "b": lambda **_: (1, None), "c": lambda **_: torch.ones(2)}
    begun = CHAT_ITEM | {"prompt": [*CHAT, {"role": "assistant", "content": "So"}]}
    values, _ = rewarded(monkeypatch, functions, begun, "So 5", "So")
    assert values[0] == [1.0, 1.0, 1.0] and values[1][0] == 1.0 and math.isnan(values[1][1])
    texts = [[{"role": "assistant", "content": text}] for text in ("So 5", "So")]
    assert given == [([CHAT] * 2, texts)]
