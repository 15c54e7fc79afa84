"""The cases of experiments/ can run; a reward that can be hacked pays more for a wrong answer."""

import pytest

import grpo_ref_split as trainer
from experiments import curves, hackable, questions, runs
from grpo.checks import trainer_constants
from grpo.task import load_task


@pytest.mark.parametrize("case", [*questions.CASES.values(), *curves.CASES.values()])
def test_a_case_can_run_with_its_constants(case):
    assert {n for q in questions.QUESTIONS.values() for n in q.cases} <= questions.CASES.keys()
    constants = runs.constants_of(case, 0, "runs/x", questions.COMMON)
    trainer_constants(trainer.DEFAULTS, constants)
    weights = constants.get("REWARD_WEIGHTS", load_task(constants["TASK"]).REWARD_WEIGHTS)
    assert any(weights.values()) or case.teacher and weights == {}


def test_the_hackable_reward_pays_a_wrong_answer_more_than_a_right_one():
    item = {"question": "", "answer": "12"}
    right, wrong = (hackable.rewards(item, text) for text in (hackable.gold(item), "12 13 " * 4))
    assert right["correctness"] > 0 > wrong["correctness"]
    assert wrong["mentions"] > right["mentions"]
