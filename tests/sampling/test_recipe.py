"""The recipe: prompts of each rank and worker, and settings on which they must agree."""

import json
from itertools import islice
from types import SimpleNamespace

import pytest
import torch
from fakes import MIXED, a_recipe, prompts_of
from transformers import AutoTokenizer

import grpo_ref_split as trainer
from grpo.sampling import start as start_module
from grpo.sampling import worker
from grpo.sampling.rollout import Stream


# --- Prompts -----------------------------------------------------------------------
def test_ranks_share_each_epoch_without_overlap():
    prompts = list(range(10))
    ranks = [list(islice(Stream(prompts, 0, rank, 3), 10)) for rank in range(3)]
    order = [prompt for turn in zip(*ranks, strict=True) for prompt in turn]  # of all ranks
    assert sorted(order[:10]) == sorted(order[10:20]) == prompts
    assert order[:10] != order[10:20]  # a new order
    assert ranks[0] == list(islice(Stream(prompts, 0, 0, 3), 10))  # the seed's
    assert ranks[0] != list(islice(Stream(prompts, 1, 0, 3), 10))


def test_long_prompts_are_left_out_and_counted(tiny, monkeypatch, capsys):
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    items = [{"question": "2 + 2?", "answer": "4"}, {"question": "how many " * 50, "answer": "1"}]
    task = SimpleNamespace(
        load=lambda split: items,
        messages=lambda item: [{"role": "user", "content": item["question"]}],
    )
    monkeypatch.setattr(trainer, "MAX_PROMPT_TOKENS", 40)
    assert [
        index
        for index, _, _ in start_module.load_split(trainer.constants(), task, "train", tokenizer)
    ] == [0]
    assert "2 questions, 1 left out" in capsys.readouterr().out  # not in silence
    monkeypatch.setattr(trainer, "MAX_PROMPT_TOKENS", 2)
    with pytest.raises(SystemExit, match="MAX_PROMPT_TOKENS = 2"):
        start_module.load_split(trainer.constants(), task, "train", tokenizer)


def test_every_epoch_has_each_prompt_once_in_an_order_of_its_own():
    prompts, order = list("abcdefg"), Stream(list("abcdefg"), seed=3)
    epochs = [[order[7 * epoch + at] for at in range(7)] for epoch in range(20)]
    assert all(sorted(epoch) == prompts for epoch in epochs)
    assert len(set(map(tuple, epochs))) == 20 and prompts == list("abcdefg")
    other = Stream(prompts, seed=4)
    assert [other[at] for at in range(7)] != epochs[0]


def test_the_order_is_the_trainers_and_may_be_read_anywhere():
    """Positions come from the server: a worker sees some of them, back and forth."""
    prompts = list(range(10))
    order, alone = Stream(prompts, 5), Stream(prompts, 5, rank=0, world=1)
    expected = [next(alone) for _ in range(45)]
    positions = torch.randperm(45, generator=torch.Generator().manual_seed(0)).tolist()
    assert [order[at] for at in positions] == [expected[at] for at in positions]


# --- Settings ----------------------------------------------------------------------
def test_settings_are_the_same_after_a_journey_as_json():
    recipe = a_recipe(prompts_of([MIXED]))
    mine = recipe.settings()
    worker.check_settings(json.loads(json.dumps(mine)), mine)
    # What may differ: how many rows a machine has room for, and where it gives up
    other = a_recipe(prompts_of([MIXED]), sample_batch=8).settings()
    worker.check_settings(other, mine)


@pytest.mark.parametrize(("name", "change"), [
    ("TASK", {"task_name": "gsm8k"}),
    ("GROUP_SIZE", {"group_size": 4}),
    ("MAX_PROMPT_TOKENS", {"max_prompt_tokens": 99}),
    ("MAX_COMPLETION_TOKENS", {"max_completion_tokens": 99}),
    ("TEMPERATURE", {"temperature": 0.9}),
    ("REWARD_WEIGHTS", {"reward_weights": {"correctness": 1.0, "format": 1.0}}),
    ("OUTCOME", {"outcome": "format"}),
    ("STOP_STRINGS", {"stop_strings": ["</answer>"]}),
    ("SKIP_FLAT_GROUPS", {"skip_flat_groups": "reward"}),
    ("SEED", {"seed": 1}),
    ("prompts", {"prompts": prompts_of([MIXED, MIXED])}),
    ("prompts", {"prompts": [(0, {}, [5, 7])]}),  # another template, tokenizer or split
    ("prompts", {"prompts": [(1, {}, [5, 6])]}),
])  # fmt: skip
def test_a_worker_with_other_constants_is_told_which(name, change):
    theirs, fields = a_recipe(prompts_of([MIXED])).settings(), {"prompts": prompts_of([MIXED])}
    mine = a_recipe(**fields | change).settings()
    with pytest.raises(SystemExit, match=f"constants differ from the trainer's: {name}") as caught:
        worker.check_settings(json.loads(json.dumps(theirs)), mine)
    assert str(caught.value).count("here,") == 1  # and of no other


def test_a_trainer_that_does_not_tell_a_setting_has_another():
    mine = a_recipe().settings()
    theirs = {k: v for k, v in mine.items() if k != "SEED"}
    with pytest.raises(SystemExit, match="SEED is 0 here, None there"):
        worker.check_settings(theirs, mine)
