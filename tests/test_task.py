"""A user's task: what it may return, and the TaskError of what it may not."""

import math
import re
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fakes import PROMPT, FakeEngine, a_recipe, sampled
from transformers import AutoTokenizer

import grpo_ref_split as trainer
from grpo import prepare
from grpo.faults import TaskError
from grpo.options.workers.shared_settings import settings_of
from grpo.prepare import preview
from grpo.rewards import reward_texts
from grpo.sample import Question
from grpo.task import Recipe, load_split, load_task, prompt_of

QUESTION = {"question": "Why?"}


def chat(item):
    return [{"role": "user", "content": item["question"]}]


def loaded(tiny, load=lambda split: [QUESTION], messages=chat, template=None, **options):
    """-> the texts of the prompts of a task "mine"."""
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    tokenizer.chat_template = template or tokenizer.chat_template
    c = SimpleNamespace(TASK="mine", MODEL=tiny, MAX_PROMPT_TOKENS=99, CHAT_TEMPLATE=options)
    recipe = Recipe(c, SimpleNamespace(load=load, messages=messages))
    return [tokenizer.decode(prompt.ids) for prompt in load_split(recipe, "train", tokenizer)]


def refused(names, function, *arguments, **named):
    """Calls what must end with a TaskError of the task's file that has the parts `names`, in this
    order, and what it must be."""
    with pytest.raises(SystemExit) as error:
        function(*arguments, **named)
    pattern = ".*".join(map(re.escape, ["tasks/mine.py: ", *names, ": it must "]))
    assert re.search(pattern, str(error.value), re.DOTALL), str(error.value)


# --- Questions ----------------------------------------------------------------------
CALLS = {"load": "load('train')", "messages": f"messages({QUESTION})"}


@pytest.mark.parametrize(("name", "function", "got"), [
    ("load", lambda split: [], "returned []"),
    ("load", lambda split: [QUESTION, 5], "5"),
    ("load", lambda split: {"train": []}, "'train'"),
    ("load", lambda split: {}[split], "KeyError: 'train'"),
    ("messages", lambda item: item["question"], "'Why?'"),
    ("messages", lambda item: [], "[]"),
    ("messages", lambda item: [item["question"]], "['Why?']"),
    ("messages", lambda item: chat(item)[0], "{'role': 'user', 'content': 'Why?'}"),
    ("messages", lambda item: [{"role": "user"}], "[{'role': 'user'}]"),
    ("messages", lambda item: [{"role": "user", "content": 5}], "[{'role': 'user', 'content': 5}]"),
    ("messages", lambda item: item["city"], "KeyError: 'city'"),
])  # fmt: skip
def test_a_load_without_questions_and_messages_that_are_no_chat_are_refused(
    name, function, got, tiny
):
    refused([CALLS[name], got], loaded, tiny, **{name: function})


def test_all_questions_with_a_fault_are_told_at_once(tiny):
    items = [{"question": x} for x in ("a", None, "b", 5, [], {}, b"x")] + [{}, {"question": "c"}]
    with pytest.raises(SystemExit, match="6 of the 9 items .*leave them out") as error:
        loaded(tiny, lambda split: items)
    first = str(error.value).split("\n")[1:]
    assert all(f"'question': {x!r}" in line for x, line in zip((None, 5, []), first, strict=True))
    with pytest.raises(TaskError, match="ZeroDivision"):  # of the task, not of its data
        loaded(tiny, lambda split: items, messages=lambda item: 1 / 0)


def test_questions_may_come_one_by_one_and_options_reach_the_chat_template(tiny):
    assert len(loaded(tiny, lambda split: iter([QUESTION] * 2))) == 2
    template = "{{ messages[0].content }}{% if enable_thinking %} think{% endif %}"
    assert loaded(tiny, template=template) == ["Why?"]
    assert loaded(tiny, template=template, enable_thinking=True) == ["Why? think"]
    refused(["Why?", "no system"], loaded, tiny, template="{{ raise_exception('no system') }}")


# --- Rewards ------------------------------------------------------------------------
def rewarded(rewards):
    """-> the rewards of a group of two, each of which a task "mine" gave."""
    task = SimpleNamespace(rewards=lambda item, text: rewards(text))
    (group,) = sampled(FakeEngine(), a_recipe(task=task, TASK="mine"), [PROMPT])
    return [sample.rewards for sample in group.samples]


@pytest.mark.parametrize("kind", [bool, np.bool_, int, np.float32, np.array, torch.tensor])
def test_a_reward_may_be_a_truth_or_any_librarys_number(kind):
    """`return {"correctness": answer == gold, ...}` is what a user writes first."""
    given = rewarded(lambda text: {"correctness": kind(text == "first"), "format": kind(False)})
    assert given == [{"correctness": 1.0, "format": 0.0}, {"correctness": 0.0, "format": 0.0}]
    assert {type(value) for r in given for value in r.values()} == {float}


VALUES = ["1", math.nan, [1.0], np.ones(1), np.float32("inf"), 1e39, -1e39, -math.inf, 10**400]
OTHER_NAMES = [["correct", "format"], ["correctness"], ["correctness", "format", 7]]


@pytest.mark.parametrize("rewards", [
    *[{"correctness": value, "format": 1.0} for value in VALUES],
    *[dict.fromkeys(names, 1.0) for names in OTHER_NAMES],
    *[1.0, True, [1.0, 0.0]],  # the weights have others than "reward"
], ids=lambda rewards: repr(rewards)[:40])  # fmt: skip
def test_a_reward_that_is_no_number_or_of_another_name_is_refused_with_what_it_was_given(rewards):
    given = rewards if isinstance(rewards, dict) else {"reward": rewards}
    seen = ["rewards()", f"{given!r:.500}", repr(PROMPT[1]), "'first'"]
    refused(seen, rewarded, lambda text: rewards)


def judged(texts=("first", "second"), **task):
    """-> (recipe, its rewards) of a task "mine" with these members, weights and outcome."""
    unset = {"REWARD_WEIGHTS": None, "OUTCOME": None}
    task = SimpleNamespace(**task)
    recipe = a_recipe([(0, QUESTION, [5])], task=task, TASK="mine", **unset)
    recipe = recipe.resolved()
    return recipe, reward_texts(recipe, QUESTION, list(texts))


def test_a_reward_alone_is_called_reward_and_is_the_outcome():
    for value, number in [(True, 1.0), (0.25, 0.25), (np.float32(2), 2.0), (-1e29, -1e29)]:
        recipe, rewards = judged(rewards=lambda item, text, value=value: value)
        assert rewards == [{"reward": number}] * 2
        assert (recipe.weights, recipe.outcome) == ({"reward": 1.0}, "reward")


def test_none_is_a_reward_that_does_not_apply():
    recipe, rewards = judged(rewards=lambda item, text: {"correctness": text == "first", "b": None})
    assert recipe.weights == {"correctness": 1.0, "b": 1.0}
    assert recipe.outcome == "correctness"
    assert [r["correctness"] for r in rewards] == [1, 0] and math.isnan(rewards[0]["b"])
    assert math.isnan(judged(rewards=lambda item, text: None)[1][0]["reward"])


def shortest(item, texts):
    return [len(text) == min(map(len, texts)) for text in texts]


def test_rewards_that_compare_see_the_group():
    recipe, rewards = judged(group_rewards=shortest)
    assert [r["reward"] for r in rewards] == [1, 0] and recipe.outcome == "reward"
    recipe, rewards = judged(
        rewards=lambda item, text: {"correctness": 1},
        group_rewards=lambda item, texts: [{"short": s} for s in shortest(item, texts)],
    )
    assert rewards == [{"correctness": 1, "short": 1}, {"correctness": 1, "short": 0}]
    assert recipe.outcome == "correctness"


@pytest.mark.parametrize(("given", "got"), [
    (lambda item, texts: [True], "[True]"),
    (lambda item, texts: {"a": 1}, "{'a': 1}"),
    (lambda item, texts: {1.0, 2.0}, "{1.0, 2.0}"),  # without an order
    (lambda item, texts: [1.0] * len(texts), "{'reward': 1.0}"),  # as rewards() does
])  # fmt: skip
def test_group_rewards_that_are_not_one_for_each_are_refused(given, got):
    both = {"rewards": lambda item, text: 0.5} if got == "{'reward': 1.0}" else {}
    weights = {"REWARD_WEIGHTS": {"reward": 1.0}}
    refused(["group_rewards()", got], judged, group_rewards=given, **both, **weights)


@pytest.mark.parametrize(("members", "names"), [
    ({}, ["OUTCOME", "None", "['a', 'b']"]),
    ({"OUTCOME": "c"}, ["OUTCOME", "'c'", "['a', 'b']"]),
    ({"REWARD_WEIGHTS": {"a": "1"}}, ["REWARD_WEIGHTS", "{'a': '1'}"]),
    ({"REWARD_WEIGHTS": {}}, ["REWARD_WEIGHTS", "{}"]),
])  # fmt: skip
def test_a_tasks_weights_and_outcome_must_fit(members, names):
    with pytest.raises(TaskError, match=".*".join(map(re.escape, names))):
        judged(rewards=lambda item, text: {"a": 1, "b": 2}, **members)


def test_a_tasks_weights_and_outcome_are_taken_and_a_constant_overrides_them():
    own = {"REWARD_WEIGHTS": {"b": 3.0, "a": 1.0}, "OUTCOME": "b"}
    task = SimpleNamespace(rewards=lambda item, text: {"a": 1, "b": 2}, **own)
    recipe = a_recipe([PROMPT], task=task, REWARD_WEIGHTS=None, OUTCOME=None)
    recipe = recipe.resolved()
    assert (recipe.weights, recipe.outcome) == ({"b": 3.0, "a": 1.0}, "b")
    assert list(reward_texts(recipe, PROMPT[1], [""])[0]) == ["b", "a"]
    assert settings_of(recipe)["order of REWARD_WEIGHTS"] == ["b", "a"]  # workers compare it, too
    recipe = a_recipe([PROMPT], task=task, REWARD_WEIGHTS={"a": 1, "b": 0}, OUTCOME="a")
    recipe = recipe.resolved()
    assert (recipe.weights, recipe.outcome) == ({"a": 1, "b": 0}, "a")


# --- The file -----------------------------------------------------------------------
GOOD = "def load(split): return [{'city': 'Rome'}]\n"
GOOD += "def messages(item): return [{'role': 'user', 'content': CONTENT + item['city']}]\n"
GOOD += "def rewards(item, completion): return len(completion) / 0\n"


def test_a_task_may_be_a_path_whose_folder_it_can_import_from(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my").mkdir()
    (tmp_path / "my/cities.py").write_text("from beside import CONTENT\n" + GOOD)
    (tmp_path / "my/beside.py").write_text('CONTENT = "Where is "')
    task = load_task("my/cities.py")
    (text,) = loaded(tiny, task.load, task.messages)
    assert "Where is Rome" in text
    prompts = [(0, task.load("train")[0], [5])]
    recipe = a_recipe(prompts, task=task, TASK="my/cities.py", REWARD_WEIGHTS=None)
    with pytest.raises(TaskError, match="^my/cities.py: .*ZeroDivisionError, line 4: "):
        recipe.resolved()


@pytest.mark.parametrize(("text", "names"), [
    ("def load(split)\n", ["SyntaxError", "line 1"]),
    ("import json\n1 / 0\n", ["ZeroDivisionError", "line 2"]),
    ("import json, no_such_module\n", ["line 1", "no_such_module"]),
    (GOOD.replace("def messages", "def chat"), ["messages", "missing"]),
    (GOOD.replace("def rewards", "def judge"), ["rewards", "missing"]),
    (GOOD + "\ndef reply(item, turns): ...\nclass Environment: ...\n", ["beside class"]),
])  # fmt: skip
def test_a_mistake_in_a_tasks_file_is_said(text, names, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(TaskError, match=".*".join(map(re.escape, ["mine.py: ", *names]))):
        load_task(str(tmp_path / "mine.py"))


# --- What is shown at the start -------------------------------------------------------
def previewed(tiny, capsys, messages=chat, template=None, **task):
    """-> what is printed of a task's first prompt."""
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    tokenizer.chat_template = tokenizer.chat_template if template is None else template
    task = SimpleNamespace(**{"rewards": lambda item, text: text == "42"} | task)
    task.messages = messages
    item = {"question": "What is 6 * 7?", "answer": 42}
    own = {"TASK": "mine", "MODEL": "its name", "REWARD_WEIGHTS": None, "OUTCOME": None}
    recipe = a_recipe(task=task, **own)
    question = Question(7, item, *prompt_of(recipe, item, tokenizer))
    preview(replace(recipe, prompts=[question]).resolved(), tokenizer, 1)
    return capsys.readouterr().out


def test_a_message_that_the_template_loses_is_said(tiny, capsys):
    asked = lambda item: [{"role": "system", "content": "Be brief."}, *chat(QUESTION)]
    loses = "{{ messages[-1].content }}"
    assert "changes the system message" in previewed(tiny, capsys, messages=asked, template=loses)
    assert ":\nBe brief.\n\nWhy?\n" in previewed(tiny, capsys, messages=asked, template="")


@pytest.mark.parametrize(("gold", "got"), [
    (lambda item: "43", "'43', which earns {'reward': 0"),
    (lambda item: 42, "42"),
    (lambda item: item["solution"], "KeyError: 'solution'"),
])  # fmt: skip
def test_a_gold_answer_that_is_wrong_is_refused_where_the_task_writes_it(gold, got, tiny, capsys):
    refused(["gold({'question'", got], previewed, tiny, capsys, gold=gold)
    right = previewed(tiny, capsys, gold=lambda item: "42")
    assert "gold answer '42': reward 1" in right and "loses or changes" not in right
    assert "gold answer" not in previewed(tiny, capsys, gold=lambda item: None)
    tagged = previewed(tiny, capsys, rewards=lambda item, text: text == "<answer>42</answer>")
    assert "gold answer '42': reward 0" in tagged  # the "answer" alone, without gold()


# --- Before the model is loaded -----------------------------------------------------
def test_names_that_are_not_those_of_the_weights_are_found_before_the_model_is_loaded(
    tiny, tmp_path, monkeypatch
):
    """An empty completion has them: it is rewarded at the start, as it can be sampled."""
    rewards = lambda item, text: {"correct": 1.0, "format": 1.0}
    task = SimpleNamespace(load=lambda split: [QUESTION], messages=chat, rewards=rewards)
    task.REWARD_WEIGHTS = {"correctness": 1.0, "format": 1.0}
    monkeypatch.setitem(sys.modules, "tasks.mine", task)
    monkeypatch.setattr(prepare, "load_policy", None)
    constants = {"MODEL": str(tiny), "RUN_DIR": str(tmp_path), "TASK": "mine", "KL_BETA": 0}
    constants |= {"MAX_PROMPT_TOKENS": 128, "MAX_COMPLETION_TOKENS": 128}
    for main in (trainer.main, trainer.worker):
        refused(["rewards()", "'Why?'", "completion ''"], main, **constants)
