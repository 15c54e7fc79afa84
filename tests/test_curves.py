"""docs/reading_curves.md: its cases are the script's, its numbers those of the runs."""

import re

import pytest
from documents import pictured

from experiments import curves, hackable

SECTIONS = pictured("docs/reading_curves.md", "curves")
TABLES = dict(re.findall(r"## (\w+)\n(.*?)(?=\n## |\Z)", curves.TABLES.read_text(), re.DOTALL))
NUMBER = r"(?<![\w.])[-−]?\d+(?:\.\d+(?:e[-+]?\d+)?|e[-+]?\d+)(?!\w|\.\d)"
cases = pytest.mark.parametrize("name", curves.CASES)


# --- The page -------------------------------------------------------------------------
def test_the_page_has_each_case_with_its_command_and_picture():
    assert SECTIONS.keys() == TABLES.keys() == curves.CASES.keys()
    for name, text in SECTIONS.items():
        assert f"`python experiments/curves.py {name}`" in text
    pictures = [curves.PICTURES / f"{name}.png" for name in SECTIONS]
    assert sum(picture.stat().st_size for picture in pictures) < 700_000


@cases
def test_a_number_of_the_page_is_in_the_table_of_its_run_or_of_the_healthy_one(name):
    """Quotations and code have other numbers."""
    words = re.sub(r'"[^"`]{20,}"|`[^`]*`', "", " ".join(SECTIONS[name].split()))
    found = {number.replace("−", "-") for number in re.findall(NUMBER, words)}
    assert found <= {"0.7", *re.findall(NUMBER, TABLES[name] + TABLES["healthy"])}


# --- The task ---------------------------------------------------------------
def test_the_hackable_reward_pays_a_wrong_answer_more_than_a_right_one():
    item = {"question": "", "answer": "12"}
    right, wrong = (hackable.rewards(item, text) for text in (hackable.gold(item), "12 13 " * 4))
    assert right["correctness"] > 0 > wrong["correctness"]
    assert wrong["mentions"] > right["mentions"]
