"""The cases of experiments/ can run; a reward that can be hacked pays more for a wrong answer."""

import pytest

import grpo_ref_split as trainer
from experiments import curves, questions, runs
from grpo.checks import trainer_constants
from grpo.task import load_task


@pytest.mark.parametrize("case", [*questions.CASES.values(), *curves.CASES.values()])
def test_a_case_can_run_with_its_constants(case):
    assert {n for q in questions.QUESTIONS.values() for n in q.cases} <= questions.CASES.keys()
    constants = runs.constants_of(case, 0, "runs/x", questions.COMMON)
    trainer_constants(trainer.DEFAULTS, constants)
    weights = constants.get("REWARD_WEIGHTS", load_task(constants["TASK"]).REWARD_WEIGHTS)
    assert any(weights.values()) or case.teacher and weights == {}
