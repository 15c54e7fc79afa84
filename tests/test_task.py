"""A task of one's own, tasks/NAME.py: what it may return, and what is said where it may not."""

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
from grpo.sampling.recipe import load_split
from grpo.sampling.rollout import make_group


def chat(question):
    return [{"role": "user", "content": question}]


def loaded(tiny, load=lambda split: [{"question": "Why?"}], messages=chat, split="train"):
    """-> the prompts of a task "mine"."""
    task = SimpleNamespace(load=load, messages=messages)
    constants = SimpleNamespace(TASK="mine", MAX_PROMPT_TOKENS=99)
    return load_split(constants, task, split, AutoTokenizer.from_pretrained(tiny))


def refused(sentence, function, *arguments, **named):
    """Calls what must end with the sentence, of the one task's file."""
    with pytest.raises(SystemExit, match=rf"^tasks/mine.py: .*{re.escape(sentence)}"):
        function(*arguments, **named)


# --- Questions ----------------------------------------------------------------------
ITEMS = 'it must return a list of dicts, each with a "question", for "train" and EVAL_SPLIT'


@pytest.mark.parametrize(
    ("load", "sentence"),
    [
        (lambda split: [], "returned no item"),  # was: raise MAX_PROMPT_TOKENS
        (lambda split: [{"question": "?"}, {"text": 5}], "returned {'text': 5} as item 1"),
        (lambda split: {"train": []}, "returned 'train' as item 0"),
    ],
)
def test_a_load_that_gives_no_questions_is_told_what_it_gave_and_what_it_must(load, sentence, tiny):
    refused(f"{sentence}: {ITEMS}", loaded, tiny, load)


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
MUST = "it must return a dict of finite numbers, or True and False, by the names in REWARD_WEIGHTS"


def rewarded(rewards):
    """-> the rewards of a group of two, each of which a task "mine" gave."""
    task = SimpleNamespace(rewards=lambda item, text: rewards(text))
    return sampled(FakeEngine(), a_recipe(task=task, task_name="mine"), [PROMPT])[0]


@pytest.mark.parametrize("kind", [bool, np.bool_, int, np.float32, np.array, torch.tensor])
def test_a_reward_may_be_a_truth_or_any_librarys_number(kind):
    """`return {"correctness": answer == gold, ...}` is what comes to mind first."""
    group = rewarded(lambda text: {"correctness": kind(text == "first"), "format": kind(False)})
    assert group[2] == [{"correctness": 1.0, "format": 0.0}, {"correctness": 0.0, "format": 0.0}]
    assert {type(value) for r in group[2] for value in r.values()} == {float}
    assert make_group(group, **NAMED).rewards.tolist() == [[1, 0], [0, 0]]


@pytest.mark.parametrize("value", [None, "1", float("nan"), [1.0], np.ones(1), np.float32("inf")])
def test_a_reward_that_is_no_number_is_named_with_question_and_completion(value):
    rewards = {"correctness": value, "format": 1.0}
    what = (
        f"rewards() returned {rewards!r} for the question {PROMPT[1]!r} and the completion 'first'"
    )
    refused(f"{what}: {MUST}", rewarded, lambda text: rewards)


@pytest.mark.parametrize("rewards", [1.0, True, None, [1.0, 0.0]])
def test_rewards_without_names_are_refused(rewards):
    what = f"rewards() returned {rewards} for the question {PROMPT[1]!r} and the completion 'first'"
    refused(f"{what}: {MUST}", rewarded, lambda text: rewards)


NAMES = [["correct", "format"], ["correctness"], ["correctness", "format", 7]]


@pytest.mark.parametrize("names", NAMES)
def test_names_that_are_not_those_of_the_weights_are_refused(names):
    refused(MUST, rewarded, lambda text: dict.fromkeys(names, 1.0))


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
    mine.rewards = lambda item, text: {"correct": 1.0, "format": 1.0}
    refused(f"'Why?'}} and the completion '': {MUST}", trainer.main)
    refused(f"'Why?'}} and the completion '': {MUST}", trainer.worker)


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
    with pytest.raises(KeyError, match="test"):
        trainer.main()
