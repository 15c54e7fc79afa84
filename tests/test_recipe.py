"""The recipe: prompts of each rank and worker."""

from dataclasses import replace
from itertools import islice
from types import SimpleNamespace

import pytest
import torch
from fakes import a_recipe

from grpo.rollout import Order
from grpo.task import load_questions, load_split


def test_long_prompts_are_left_out_and_counted(tokenizer, capsys):
    items = [{"question": "2 + 2?", "answer": "4"}, {"question": "how many " * 50, "answer": "1"}]
    task = SimpleNamespace(
        load=lambda split: items,
        messages=lambda item: [{"role": "user", "content": item["question"]}],
    )
    recipe = a_recipe(task=task, MAX_PROMPT_TOKENS=40)
    assert [question.index for question in load_split(recipe, "train", tokenizer)] == [0]
    assert "2 questions, 1 left out" in capsys.readouterr().out  # not in silence
    with pytest.raises(SystemExit, match="MAX_PROMPT_TOKENS = 2"):
        load_split(recipe.others(MAX_PROMPT_TOKENS=2), "train", tokenizer)


def test_questions_that_are_trained_on_and_evaluated_are_counted(tokenizer, capsys):
    questions = {"train": "abcd", "test": "cdefgh"}
    task = SimpleNamespace(
        load=lambda split: [{"question": f"{letter}?"} for letter in questions[split]],
        messages=lambda item: [{"role": "user", "content": item["question"]}],
    )
    recipe = a_recipe(task=task, MAX_PROMPT_TOKENS=99, EVAL_QUESTIONS=5)
    recipe = replace(recipe, prompts=load_split(recipe, "train", tokenizer))
    assert len(load_questions(recipe, tokenizer)) == 5
    assert "2 of the 5 questions of the evaluation are also trained" in capsys.readouterr().out
    questions["test"] = "xyz"
    load_questions(recipe, tokenizer)
    assert "also trained" not in capsys.readouterr().out


def test_every_epoch_has_each_prompt_once_in_an_order_that_may_be_read_anywhere():
    prompts, order = list("abcdefg"), Order(list("abcdefg"), seed=3)
    expected = list(islice(Order(prompts, seed=3), 140))
    epochs = [tuple(expected[i : i + 7]) for i in range(0, 140, 7)]
    assert all(sorted(epoch) == prompts for epoch in epochs) and len(set(epochs)) == 20
    positions = torch.randperm(140, generator=torch.Generator().manual_seed(0)).tolist()
    assert all(order[at] == expected[at] for at in positions)
    assert list(islice(Order(prompts, seed=4), 7)) != expected[:7]
