"""A task of one's own, tasks/NAME.py: what it may return, and what is said where it may not."""

import math
import re
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fakes import NAMED, PROMPT, FakeEngine, a_recipe, sampled
from transformers import AutoTokenizer

import grpo_ref_split as trainer
from grpo.sampling import start
from grpo.sampling.preview import preview
from grpo.sampling.recipe import (
    ids_of,
    load_chat,
    load_items,
    load_split,
    load_task,
    reward_group,
)
from grpo.sampling.rollout import make_group


def chat(question):
    return [{"role": "user", "content": question}]


def loaded(tiny, load=lambda split: [{"question": "Why?"}], messages=chat, split="train"):
    """-> the prompts of a task "mine"."""
    task = SimpleNamespace(load=load, messages=messages)
    constants = SimpleNamespace(TASK="mine", MODEL=tiny, MAX_PROMPT_TOKENS=99, CHAT_TEMPLATE={})
    return load_split(constants, task, split, AutoTokenizer.from_pretrained(tiny))


def refused(sentence, function, *arguments, **named):
    """Calls what must end with the sentence, of the one task's file."""
    with pytest.raises(SystemExit, match=rf"^tasks/mine.py: .*{re.escape(sentence)}"):
        function(*arguments, **named)


# --- Questions ----------------------------------------------------------------------
ITEMS = 'must return a list of dicts, each with a "question" (or write messages(item)), for "train"'


@pytest.mark.parametrize(
    ("load", "sentence"),
    [
        (lambda split: [], "returned no item"),  # was: raise MAX_PROMPT_TOKENS
        (lambda split: [{"question": "?"}, {"text": 5}], "returned {'text': 5} as item 1"),
        (lambda split: {"train": []}, "returned 'train' as item 0"),
    ],
)
def test_a_load_that_gives_no_questions_is_told_what_it_gave_and_what_it_must(load, sentence, tiny):
    refused(f"{sentence}: it {ITEMS}", loaded, tiny, load)


def test_questions_may_come_one_by_one(tiny):
    assert len(loaded(tiny, lambda split: iter([{"question": "Why?"}] * 2))) == 2


@pytest.mark.parametrize(
    ("messages", "what"),
    [
        (lambda question: question, "returned 'Why?'"),
        (lambda question: [], "returned []"),
        (lambda question: [question], "returned ['Why?']"),
        (lambda question: chat(question)[0], "returned {'role': 'user', 'content': 'Why?'}"),
        (lambda question: [{"role": "user"}], "returned [{'role': 'user'}]"),
        (lambda question: chat(5), "returned [{'role': 'user', 'content': 5}]"),
    ],
)
def test_messages_that_are_no_chat_are_said(messages, what, tiny):
    refused(f"messages('Why?') {what}", loaded, tiny, messages=messages)
    refused('must return a list of {"role": ..., "content": ...}', loaded, tiny, messages=messages)


# --- Rewards ------------------------------------------------------------------------
MUST = (
    "must return a dict of numbers below 1e30, True, False or None (does not apply) by the names in"
)


def rewarded(rewards):
    """-> the rewards of a group of two, each of which a task "mine" gave."""
    task = SimpleNamespace(rewards=lambda item, text: rewards(text))
    return sampled(FakeEngine(), a_recipe(task=task, TASK="mine"), [PROMPT])[0]


@pytest.mark.parametrize("kind", [bool, np.bool_, int, np.float32, np.array, torch.tensor])
def test_a_reward_may_be_a_truth_or_any_librarys_number(kind):
    """`return {"correctness": answer == gold, ...}` is what comes to mind first."""
    group = rewarded(lambda text: {"correctness": kind(text == "first"), "format": kind(False)})
    assert group[2] == [{"correctness": 1.0, "format": 0.0}, {"correctness": 0.0, "format": 0.0}]
    assert {type(value) for r in group[2] for value in r.values()} == {float}
    assert make_group(group, **NAMED).rewards.tolist() == [[1, 0], [0, 0]]


@pytest.mark.parametrize("value", ["1", float("nan"), [1.0], np.ones(1), np.float32("inf")])
def test_a_reward_that_is_no_number_is_named_with_question_and_completion(value):
    rewards = {"correctness": value, "format": 1.0}
    what = (
        f"rewards() returned {rewards!r} for the question {PROMPT[1]!r} and the completion 'first'"
    )
    refused(f"{what}: it {MUST}", rewarded, lambda text: rewards)


@pytest.mark.parametrize("rewards", [1.0, True, None, [1.0, 0.0]])
def test_a_reward_without_a_name_is_refused_where_the_weights_have_others(rewards):
    named = {"reward": rewards}
    what = f"rewards() returned {named} for the question {PROMPT[1]!r} and the completion 'first'"
    refused(f"{what}: it {MUST}", rewarded, lambda text: rewards)


NAMES = [["correct", "format"], ["correctness"], ["correctness", "format", 7]]


@pytest.mark.parametrize("names", NAMES)
def test_names_that_are_not_those_of_the_weights_are_refused(names):
    refused(MUST, rewarded, lambda text: dict.fromkeys(names, 1.0))


def judged(item=None, texts=("first", "second"), **task):
    """-> (recipe, its rewards) of a task "mine" with these members, weights and outcome its own."""
    task, item = SimpleNamespace(**task), item or {"question": "Why?"}
    unset = {"REWARD_WEIGHTS": None, "OUTCOME": None}
    recipe = a_recipe([(0, item, [5])], task=task, TASK="mine", **unset)
    recipe.resolve()
    return recipe, reward_group(recipe, item, list(texts))


def test_a_reward_alone_is_called_reward_and_is_the_outcome():
    for value, number in [(True, 1.0), (0.25, 0.25), (np.float32(2), 2.0)]:
        recipe, rewards = judged(rewards=lambda item, text, value=value: value)
        assert rewards == [{"reward": number}] * 2
        assert (recipe.c.REWARD_WEIGHTS, recipe.c.OUTCOME) == ({"reward": 1.0}, "reward")


def test_none_is_a_reward_that_does_not_apply():
    recipe, rewards = judged(rewards=lambda item, text: {"correctness": text == "first", "b": None})
    assert recipe.c.REWARD_WEIGHTS == {"correctness": 1.0, "b": 1.0}
    assert recipe.c.OUTCOME == "correctness"
    assert [r["correctness"] for r in rewards] == [1, 0] and math.isnan(rewards[0]["b"])
    assert math.isnan(judged(rewards=lambda item, text: None)[1][0]["reward"])


def test_rewards_that_compare_see_the_group():
    def shortest(item, texts):
        return [len(text) == min(map(len, texts)) for text in texts]

    recipe, rewards = judged(group_rewards=shortest)
    assert [r["reward"] for r in rewards] == [1, 0] and recipe.c.OUTCOME == "reward"
    both = {"rewards": lambda item, text: {"correctness": 1}}
    both["group_rewards"] = lambda item, texts: [{"short": s} for s in shortest(item, texts)]
    recipe, rewards = judged(**both)
    assert rewards == [{"correctness": 1, "short": 1}, {"correctness": 1, "short": 0}]
    assert recipe.c.OUTCOME == "correctness"


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (lambda item, texts: [True], "group_rewards() returned 1 values"),
        (lambda item, texts: {"a": 1}, "group_rewards() returned {'a': 1}: it must return a list"),
        (lambda item, texts: 1.0, "group_rewards() returned 1.0: it must return a list"),
        (lambda item, texts: [1.0] * len(texts), "both return ['reward']"),
    ],
)
def test_group_rewards_that_are_not_one_for_each_are_refused(given, sentence):
    alone = {} if "both" not in sentence else {"rewards": lambda item, text: 1.0}
    weights = {"REWARD_WEIGHTS": {"reward": 1.0}}
    refused(sentence, judged, group_rewards=given, **alone, **weights)


def test_what_fails_is_said_with_what_it_was_given():
    """group_rewards() had all completions, rewards() that one."""
    set_to = {"REWARD_WEIGHTS": {"reward": 1.0}}
    failed = (
        r"tasks/mine.py: group_rewards\(\) failed with Zero.* completions \['first', 'second'\]$"
    )
    with pytest.raises(RuntimeError, match=failed):
        judged(group_rewards=lambda item, texts: 1 / 0, **set_to)
    with pytest.raises(RuntimeError, match=r"rewards\(\) failed with Zero.* completion 'second'$"):
        judged(rewards=lambda item, text: 1 / (text == "first"), **set_to)


@pytest.mark.parametrize(
    ("members", "sentence"),
    [
        ({}, "OUTCOME = None must name the reward that says right (> 0) or wrong, one of ['a', 'b"),
        ({"OUTCOME": "c"}, "OUTCOME = 'c' must name the reward"),
        ({"REWARD_WEIGHTS": {"a": "1"}}, "REWARD_WEIGHTS = {'a': '1'} must be numbers by name"),
        ({"REWARD_WEIGHTS": {}}, "REWARD_WEIGHTS = {} must be numbers by name"),
    ],
)
def test_a_tasks_weights_and_outcome_must_fit(members, sentence):
    refused(sentence, judged, rewards=lambda item, text: {"a": 1, "b": 2}, **members)


def test_a_tasks_weights_and_outcome_are_taken_and_a_constant_overrides_them():
    own = {"REWARD_WEIGHTS": {"b": 3.0, "a": 1.0}, "OUTCOME": "b"}
    task = SimpleNamespace(rewards=lambda item, text: {"a": 1, "b": 2}, **own)
    recipe = a_recipe([PROMPT], task=task, REWARD_WEIGHTS=None, OUTCOME=None)
    recipe.resolve()
    assert (recipe.c.REWARD_WEIGHTS, recipe.c.OUTCOME) == ({"b": 3.0, "a": 1.0}, "b")
    assert list(reward_group(recipe, PROMPT[1], [""])[0]) == ["b", "a"]
    assert recipe.settings()["REWARD_WEIGHTS"] == [["b", 3.0], ["a", 1.0]]  # what workers compare
    recipe = a_recipe([PROMPT], task=task, REWARD_WEIGHTS={"a": 1, "b": 0}, OUTCOME="a")
    recipe.resolve()
    assert (recipe.c.REWARD_WEIGHTS, recipe.c.OUTCOME) == ({"a": 1, "b": 0}, "a")


# --- The file -----------------------------------------------------------------------
TASK = """
from beside import CONTENT

def load(split):
    return [{"city": "Rome"}]

def messages(item):
    return [{"role": "user", "content": CONTENT + item["city"]}]

def rewards(item, completion):
    return len(completion) / 0
"""


def test_a_task_may_be_a_path_whose_folder_it_can_import_from(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my").mkdir()
    (tmp_path / "my/cities.py").write_text(TASK)
    (tmp_path / "my/beside.py").write_text('CONTENT = "Where is "')
    task = load_task("my/cities.py")
    constants = SimpleNamespace(TASK="my/cities.py", MODEL=tiny, MAX_PROMPT_TOKENS=99)
    constants.CHAT_TEMPLATE = {}
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    ((_, item, ids),) = load_split(constants, task, "train", tokenizer)
    assert "Where is Rome" in tokenizer.decode(ids)
    recipe = a_recipe([(0, item, ids)], task=task, TASK="my/cities.py", REWARD_WEIGHTS=None)
    with pytest.raises(RuntimeError, match=r"^my/cities.py: rewards\(\) failed with ZeroDiv"):
        recipe.resolve()
    # Elsewhere on a worker's machine
    settings = [a_recipe(TASK=path).settings() for path in ("/x/cities.py", "my/cities.py")]
    assert settings[0] == settings[1]
    with pytest.raises(SystemExit, match=f"TASK = 'cities.py': there is no file {tmp_path}/cit"):
        load_task("cities.py")
    (tmp_path / "my/cities.py").write_text(TASK.replace("(item)", "(q)"))
    with pytest.raises(
        SystemExit, match=r"^my/cities.py: messages\(q\) must be messages\(item\), w"
    ):
        load_task("my/cities.py")
    (tmp_path / "my/cities.py").write_text("def load(split): pass")
    with pytest.raises(SystemExit, match=r"my/cities.py lacks messages, rewards \(or group_rew"):
        load_task("my/cities.py")
    with pytest.raises(SystemExit, match="no tasks/gsm9k.py .*: is gsm8k meant?"):
        load_task("gsm9k")


# --- What is shown at the start -------------------------------------------------------
def previewed(tiny, capsys, messages=None, template=None, **task):
    """-> what is printed of a task's first prompt."""
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    tokenizer.chat_template = tokenizer.chat_template if template is None else template
    task = SimpleNamespace(**{"rewards": lambda item, text: text == "42"} | task)
    task.messages = messages or (lambda item: chat(item["question"]))
    item = {"question": "What is 6 * 7?", "answer": 42}
    own = {"TASK": "mine", "MODEL": "its name", "REWARD_WEIGHTS": None, "OUTCOME": None}
    recipe = a_recipe(task=task, **own)
    recipe.prompts.append((7, item, ids_of(recipe.c, task, item, tokenizer)))
    recipe.resolve()
    preview(recipe.c, recipe, tokenizer, 1)
    return capsys.readouterr().out


def test_the_first_prompt_and_its_rewards_are_shown(tiny, capsys):
    out = previewed(tiny, capsys)
    assert re.search(r"prompt 7 as its name sees it, \d+ tokens:\n<\|im_start\|>user\nWhat is", out)
    assert out.rstrip().endswith("rewards of the gold answer '42': reward 1")
    assert "rewards of an empty completion: reward 0" in out
    assert "loses or changes" not in out


def test_a_long_prompt_is_cut_where_it_is_shown(tiny, capsys):
    out = previewed(tiny, capsys, messages=lambda item: chat("ab" * 2000))
    assert len(out) < 3000 and "characters more" in out and "loses or changes" not in out


def test_a_model_without_a_chat_template_is_said_to_have_none(tiny, capsys, mine, monkeypatch):
    asked = [{"role": "system", "content": "Be brief."}, *chat("Why?")]
    out = previewed(tiny, capsys, messages=lambda item: asked, template="")
    assert "no chat template, so the texts are joined:\nBe brief.\n\nWhy?\n" in out
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    tokenizer.chat_template = None
    monkeypatch.setattr(start, "load_tokenizer", lambda name: tokenizer)
    monkeypatch.setattr(trainer, "CHAT_TEMPLATE", {"a": 1})
    with pytest.raises(SystemExit, match=r"CHAT_TEMPLATE = \{'a': 1\} must be empty: .* no chat"):
        trainer.main()


def test_a_message_that_the_template_loses_is_said(tiny, capsys):
    asked = [{"role": "system", "content": "Be brief."}, *chat("Why?")]
    template = "{{ messages[-1].content }}"
    out = previewed(tiny, capsys, messages=lambda item: asked, template=template)
    assert "the chat template loses or changes the system's message" in out
    with pytest.raises(SystemExit, match="chat template of MODEL = 'its name'.*refuses.*no system"):
        template = "{{ raise_exception('no system') }}"
        previewed(tiny, capsys, messages=lambda item: chat("Why?"), template=template)


def test_a_gold_answer_that_is_wrong_is_refused_where_the_task_writes_it(tiny, capsys):
    out = previewed(tiny, capsys, rewards=lambda item, text: text == "<answer>42</answer>")
    assert 'the "answer" alone is wrong by OUTCOME' in out and "write gold(item)" in out
    assert "gold answer '42': reward 1" in previewed(tiny, capsys, gold=lambda item: "42")
    assert "does not apply" in previewed(tiny, capsys, rewards=lambda item, text: None)
    wrong = "gold() returned '43' for the question"
    refused(wrong, previewed, tiny, capsys, gold=lambda item: "43")
    compared = {"REWARD_WEIGHTS": {"short": 1}, "group_rewards": lambda item, texts: [{"short": 0}]}
    both = {"rewards": lambda item, text: {}, "gold": lambda item: "42"}
    refused(
        ": rewards() and group_rewards() gave short 0", previewed, tiny, capsys, **compared, **both
    )
    refused("returned 42: it must be a text", previewed, tiny, capsys, gold=lambda item: 42)
    with pytest.raises(SystemExit, match=r"mine.py: gold\(\) failed with KeyError"):
        previewed(tiny, capsys, gold=lambda item: item["solution"])


def test_options_of_the_chat_template_reach_it(tiny):
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    tokenizer.chat_template = "{{ messages[0].content }}{% if enable_thinking %} think{% endif %}"
    constants = SimpleNamespace(TASK="mine", MODEL=tiny, MAX_PROMPT_TOKENS=99)
    for options, text in [({}, "Why?"), ({"enable_thinking": True}, "Why? think")]:
        constants.CHAT_TEMPLATE = options
        task = SimpleNamespace(load=lambda split: [{"question": "Why?"}], messages=chat)
        ((_, _, ids),) = load_split(constants, task, "train", tokenizer)
        assert tokenizer.decode(ids) == text


# --- Before the model is loaded -----------------------------------------------------
class TheModel(Exception):
    """It is about to be loaded."""


@pytest.fixture
def mine(tiny, tmp_path, monkeypatch):
    """-> the trainer's task "mine"."""

    def load_policy(*_):
        raise TheModel

    task = SimpleNamespace(load=lambda split: [{"question": "Why?"}], messages=chat)
    task.rewards = lambda item, text: {"correctness": text == "42", "format": 1.0}
    monkeypatch.setitem(sys.modules, "tasks.mine", task)
    constants = {"MODEL": str(tiny), "RUN_DIR": str(tmp_path), "TASK": "mine", "KL_BETA": 0}
    for name, value in constants.items():
        monkeypatch.setattr(trainer, name, value)
    monkeypatch.setattr(start, "load_policy", load_policy)
    return task


def test_a_task_that_is_as_it_should_be_gets_as_far_as_the_model(mine):
    with pytest.raises(TheModel):
        trainer.main()


def test_names_that_are_not_those_of_the_weights_are_found_before_the_model_is_loaded(mine):
    mine.REWARD_WEIGHTS = {"correctness": 1.0, "format": 1.0}
    mine.rewards = lambda item, text: {"correct": 1.0, "format": 1.0}
    refused(f"'Why?'}} and the completion '': it {MUST}", trainer.main)
    refused(f"'Why?'}} and the completion '': it {MUST}", trainer.worker)


def test_a_task_that_does_not_cope_with_an_empty_completion_is_told_so(mine):
    """It can be sampled, and would end the run then."""
    mine.rewards = lambda item, text: {"correctness": text.split()[-1] == "42", "format": 1.0}
    failed = r"tasks/mine.py: rewards\(\) failed with IndexError.*'Why\?'.*completion ''"
    with pytest.raises(RuntimeError, match=failed) as caught:
        trainer.main()
    assert type(caught.value.__cause__) is IndexError  # with its traceback


def test_rewards_that_take_too_long_are_found_before_the_model_is_loaded(mine, monkeypatch):
    monkeypatch.setattr(trainer, "REWARD_TIMEOUT_SECONDS", 1)
    mine.rewards = lambda item, text: time.sleep(60)
    with pytest.raises(RuntimeError, match="failed with TooSlow.*more than 1 s"):
        trainer.main()


def test_a_missing_eval_split_is_found_before_the_model_is_loaded(mine):
    mine.load = {"train": [{"question": "Why?"}]}.__getitem__
    with pytest.raises(SystemExit, match=r"^tasks/mine.py: load\('test'\) failed with KeyError"):
        trainer.main()


GOOD = "def load(split): return [{'q': 1}]\ndef messages(item): return []\n"
MISTAKES = {  # a file's text: what is said, without a traceback
    "def load(split)\n": r"mine.py, line 1 can't be imported: SyntaxError",
    "import json\n1 / 0\n": r"mine.py, line 2 can't be imported: ZeroDivisionError",
    GOOD + "def rewards(completions, **more): pass\n": (
        r"mine.py: rewards\(completions, \*\*more\) must be rewards\(item, completion\)"
    ),
}


@pytest.mark.parametrize("text", MISTAKES)
def test_a_mistake_in_a_tasks_file_is_said_with_its_line(text, tmp_path):
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(SystemExit, match=MISTAKES[text]):
        load_task(str(tmp_path / "mine.py"))


def test_a_mistake_in_load_or_messages_is_said_with_its_line(tmp_path):
    text = "def load(split):\n    return [{}['a']]\ndef messages(item):\n    return item['b']\n"
    (tmp_path / "mine.py").write_text(text + "def rewards(item, completion): return 1\n")
    name = str(tmp_path / "mine.py")
    task = load_task(name)
    with pytest.raises(
        SystemExit, match=r"load\('train'\) failed with KeyError\('a'\), line 2; it"
    ):
        load_items(name, task, "train")
    with pytest.raises(SystemExit, match=r"messages\({}\) failed with KeyError\('b'\), line 4: it"):
        load_chat(name, task, {})


@pytest.mark.parametrize("size", [1e39, -1e39, float("-inf"), pytest.param(10**400, id="huge")])
def test_a_reward_that_the_wire_can_not_hold_is_refused_where_it_is_given(size):
    rewards = {"correctness": 1.0, "format": size}
    refused(f"and the completion 'first': it {MUST}", rewarded, lambda text: rewards)
    small = {"correctness": 1.0, "format": -1e29}
    assert rewarded(lambda text: small)[2] == [small] * 2
