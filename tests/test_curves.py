"""docs/reading_curves.md: its cases are the script's, its numbers those of the runs."""

import re

import pytest
from documents import TEXT, code_words, documented_metrics

import grpo_ref_split as trainer
from experiments import curves, defects, hackable
from experiments.runs import constants_of
from grpo.sampling.recipe import load_task
from grpo.training.checks import check_constants

PAGE = TEXT["docs/reading_curves.md"]
SECTIONS = dict(
    re.findall(r"\n!\[.*?\]\(curves/(\w+)\.png\)\n(.*?)(?=\n## |\n### |\Z)", PAGE, re.DOTALL)
)
TABLES = dict(re.findall(r"## (\w+)\n(.*?)(?=\n## |\Z)", curves.TABLES.read_text(), re.DOTALL))
NUMBER = r"(?<![\w.])\d+\.\d+(?![\w.])"


@pytest.mark.parametrize("name", curves.CASES)
def test_a_case_can_run_with_its_constants(name):
    constants = constants_of(curves.CASES[name], 0, curves.RUNS / name, {})
    assert constants.keys() <= trainer.known
    check_constants(vars(trainer) | constants)
    task = load_task(constants["TASK"])
    weights = constants.get("REWARD_WEIGHTS") or task.REWARD_WEIGHTS
    assert any(weights.values())


def test_the_page_has_each_case_with_its_command_and_picture():
    assert SECTIONS.keys() == TABLES.keys() == curves.CASES.keys()
    for name, text in SECTIONS.items():
        assert f"`python experiments/curves.py {name}`" in text
    pictures = [curves.PICTURES / f"{name}.png" for name in curves.CASES]
    assert sum(picture.stat().st_size for picture in pictures) < 700_000


@pytest.mark.parametrize("name", curves.CASES)
def test_numbers_of_a_case_are_those_of_its_run_or_of_the_healthy_one(name):
    known = re.findall(NUMBER, f"{TABLES[name]}{TABLES['healthy']} {curves.COOLER}")
    for number in re.findall(NUMBER, SECTIONS[name]):
        assert number in known, number


def test_metrics_that_the_page_names_exist():
    table = PAGE.split("## You see")[1]
    cells = re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
    names = {name for cell in cells for name in code_words(cell)}
    assert len(names) >= 8
    assert names | set(curves.PANELS) <= documented_metrics()


def test_the_reward_that_is_hacked_pays_a_wrong_answer_more_than_a_right_one():
    item = {"question": "", "answer": "12"}
    assert hackable.rewards(item, hackable.gold(item))["correctness"] > 0
    paid = [hackable.rewards(item, text) for text in (hackable.gold(item), "12 13 " * 4)]
    assert paid[1]["correctness"] < 0
    assert paid[1]["mentions"] > paid[0]["mentions"]


def test_a_defect_takes_the_weight_of_the_last_token_alone(monkeypatch):
    import torch

    seen = []
    monkeypatch.setattr(
        trainer.grpo_loss_triton, "grpo_loss", lambda *a, **names: seen.append(a[6])
    )
    monkeypatch.setattr(
        "grpo.models.load_tokenizer", lambda name: type("T", (), {"eos_token_id": 2})
    )
    defects.no_eos(trainer)
    ids = torch.tensor([5, 2, 2, 7])
    trainer.grpo_loss_triton.grpo_loss(None, None, ids, None, None, None, torch.ones(4))
    assert seen[0].round().tolist() == [1, 0, 0, 1] and seen[0].all()
