"""docs/experiments.md: its questions have tables and pictures, its numbers are those of the
tables."""

import re

import pytest
from documents import pictured

import grpo_ref_split as trainer
from experiments import curves, questions, runs
from grpo.checks import settled
from grpo.task import load_task

SECTIONS = pictured("docs/experiments.md", "experiments")
TABLES = {name: (questions.TABLES / f"{name}.md").read_text() for name in SECTIONS}
NUMBER = r"(?<![\w.])\d+\.\d+(?!\w|\.\d)"
COMPARED = r"([+-]\d\.\d{3})(?:, | \()(\d) of 5"  # "+0.011 (5 of 5)": more in five pairs of five
RANGE = r"[\d.]+ to \d[\d.]*\d"
HISTORY = "git show 655591d:experiments/questions.py"


# --- The page -------------------------------------------------------------------------
def test_the_page_has_each_question_with_its_command_and_picture():
    assert SECTIONS.keys() >= questions.QUESTIONS.keys()
    for name, text in SECTIONS.items():
        left = name not in questions.QUESTIONS
        assert f"`python experiments/questions.py {name}`{' at 655591d' * left}\n" in text
        assert (HISTORY in TABLES[name]) == left
    pictures = [questions.PICTURES / f"{name}.png" for name in SECTIONS]
    assert sum(picture.stat().st_size for picture in pictures) < 700_000


@pytest.mark.parametrize("name", SECTIONS)
def test_numbers_of_a_question_are_those_of_its_table(name):
    """A comparison and a range are a cell's; another number is in a cell."""
    table, text = TABLES[name], " ".join(SECTIONS[name].split())
    cells = [cell.strip() for cell in re.findall(r"[^|\n]+", table)]
    for gap, higher in re.findall(COMPARED, text):
        assert any(c.startswith(f"{gap}, {higher} of 5 higher") for c in cells), (gap, higher)
    for found in re.findall(RANGE, text):
        assert any(found in cell for cell in cells), found
    text = re.sub(rf"{COMPARED}|{RANGE}", "", text)
    shipped = {str(value) for value in trainer.DEFAULTS.values() if type(value) is float}
    assert set(re.findall(NUMBER, text)) <= {*re.findall(NUMBER, table), *shipped}
    assert not re.findall(r"\b\d of \d\b", text)  # what is compared stands with its difference


# --- The cases ------------------------------------------------------------------------
@pytest.mark.parametrize("case", [*questions.CASES.values(), *curves.CASES.values()])
def test_a_case_can_run_with_its_constants(case):
    constants = runs.constants_of(case, 0, "runs/x", questions.COMMON)
    settled(trainer.DEFAULTS, constants)
    weights = constants.get("REWARD_WEIGHTS", load_task(constants["TASK"]).REWARD_WEIGHTS)
    assert any(weights.values()) or case.teacher and weights == {}
