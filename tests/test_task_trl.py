"""TRL's reward functions in tasks/trl.py: what they get, what a run makes of what they return."""

import asyncio
import json
import math
from pathlib import Path

import pytest
from fakes import a_recipe

from grpo.task import load_items, load_task, reward_group, total
from tasks import trl

CHAT = [{"role": "system", "content": "Add."}, {"role": "user", "content": "2+3?"}]
CHAT_ITEM = {"prompt": CHAT, "solution": "5", "level": 2}
TEXT_ITEM = CHAT_ITEM | {"prompt": "2+3?"}
FUNCTIONS = """
import asyncio

def content(completion):
    return completion if isinstance(completion, str) else completion[0]["content"]

def right(completions, solution, **kwargs):
    return [float(s in content(c)) for c, s in zip(completions, solution)]

async def harder(prompts, completions, level, log_metric, **kwargs):
    await asyncio.sleep(0)
    log_metric("level", level[0])
    return [n * len(content(c)) if content(c) else None for c, n in zip(completions, level)]

def longest(completions, **kwargs):  # compares a call's completions
    sizes = [len(content(c)) for c in completions]
    return [size == max(sizes) for size in sizes]
"""
COPY = """
REWARD_WEIGHTS = {"right": 1.0, "harder": 0.5, "longest": -1.0}
OUTCOME = "right"

def functions():
    import functions_of_this_test as of

    return {name: getattr(of, name) for name in REWARD_WEIGHTS}
"""


@pytest.fixture
def copied(tmp_path, monkeypatch):
    """Returns the path of a user's copy of tasks/trl.py, with its functions and data."""
    (tmp_path / "functions_of_this_test.py").write_text(FUNCTIONS)
    lines = [json.dumps(CHAT_ITEM), json.dumps(TEXT_ITEM)] * 4
    (tmp_path / "data.jsonl").write_text("\n".join(lines))
    source = Path(trl.__file__).read_text() + COPY + f"\nDATA = {str(tmp_path / 'data.jsonl')!r}\n"
    (tmp_path / "trl_copy.py").write_text(source)
    return str(tmp_path / "trl_copy.py")


def rewarded(monkeypatch, functions, item, *texts):
    monkeypatch.setattr(trl, "functions", lambda: functions)
    weights = {name: 2.0**-i for i, name in enumerate(functions)}
    recipe = a_recipe(task=trl, TASK="trl", REWARD_WEIGHTS=weights)
    found = reward_group(recipe, item, list(texts))
    return [list(rewards.values()) for rewards in found], [total(r, weights) for r in found]


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
    (lambda completions, **_: [1.0], "is shorter"),
    (lambda completions, completion_ids, **_: [1.0, 1.0], "completion_ids"),
    (lambda completions, **_: [1.0, "yes"], "'yes'"),
    (lambda completions, **_: [1.0, math.nan], "nan"),
])  # fmt: skip
def test_what_does_not_fit_ends_the_run(function, says, monkeypatch):
    other = lambda completions, **_: [0, 0]
    with pytest.raises((RuntimeError, SystemExit), match=says):
        rewarded(monkeypatch, {"other": other, "f": function}, CHAT_ITEM, "a", "b")


def test_a_copy_has_its_own_functions_and_data(copied):
    task, texts = load_task(copied), ["", "5", "five", "no"]
    items = load_items(copied, task, "train")
    assert len(items) == 7
    recipe = a_recipe(task=task, TASK=copied, REWARD_WEIGHTS=None, OUTCOME=None)
    recipe.prompts = [(0, items[0], [5])]
    recipe.resolve()
    assert recipe.weights == task.REWARD_WEIGHTS and recipe.outcome == "right"
    found = reward_group(recipe, items[0], texts)
    assert [r["right"] for r in found] == [0, 1, 0, 0]
    assert [r["longest"] for r in found] == [0, 0, 1, 0]  # of a group's four, not of one
    assert repr([r["harder"] for r in found]) == "[nan, 2.0, 8.0, 4.0]"  # level 2
