"""docs/reading_curves.md: its cases are the script's, its numbers those of the runs."""

import ast
import json
import re

import pytest
from documents import TEXT, code_words, documented_metrics, pictured

from experiments import curves, hackable

PAGE = TEXT["docs/reading_curves.md"]
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


def cells_of(table, metric):
    """Returns the numbers of a metric's row; of greedy accuracy those that stand above the rows."""
    line = re.search(rf"^\| {re.escape(metric)} \|(.*)", table, re.MULTILINE)
    return re.findall(NUMBER, line[1] if line else table.split("\n| ")[0])


@cases
def test_a_number_of_the_page_is_that_of_its_metric_and_run(name):
    """A number is one of the metric that its sentence named last; after "healthy: " the healthy
    run's. Quotations and code have other numbers."""
    words = re.sub(r'"[^"`]{20,}"', "", " ".join(SECTIONS[name].split()))
    kept, metric = [*curves.PANELS, "eval_positive_format"], None
    words = re.sub(r"`([^`]*)`", lambda code: code[0] if code[1] in kept else "", words)
    metrics = "|".join(map(re.escape, kept))
    for named, healthy, number in re.findall(
        rf"`({metrics})`|[Gg]reedy accuracy|(healthy: )?({NUMBER})", words
    ):
        if number:
            table = TABLES["healthy" if healthy else name]
            assert number.replace("−", "-") in cells_of(table, metric), (metric, number)
        else:
            metric = named or "greedy accuracy"


@cases
def test_a_section_begins_with_what_its_case_changes(name):
    constants = dict(curves.CASES[name].constants)
    if "TASK" in constants:
        constants["TASK"] = constants["TASK"].replace(f"{curves.ROOT}/", "")
    first = SECTIONS[name].strip().split("\n\n")[0]
    found = dict(re.findall(r"`([A-Z][A-Z_]+)=([^`]*)`", first))
    assert {n: v if n == "TASK" else ast.literal_eval(v) for n, v in found.items()} == constants


def test_metrics_that_the_page_names_exist():
    cells = re.findall(r"^\| (`.*?) \|", PAGE.split("## You see")[1], re.MULTILINE)
    names = {name for cell in cells for name in code_words(cell)}
    assert len(names) >= 8
    assert names | set(curves.PANELS) <= documented_metrics()


def test_a_picture_names_its_units_and_what_x_is(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(curves, "RUNS", tmp_path)
    monkeypatch.setattr(curves, "save_picture", lambda figure, path: figures.append(figure))
    (tmp_path / "healthy").mkdir()
    lines = [{"step": n, "seconds": 1} | dict.fromkeys(curves.PANELS, 0.5) for n in (1, 2)]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "healthy/metrics.jsonl").write_text(text)
    curves.draw("healthy")
    units = {panel.get_title().split()[0]: panel.get_ylabel() for panel in figures[0].axes}
    assert figures[0].get_supxlabel() == "step" and units["completions/mean_length"] == "tokens"
    assert units["accuracy"] == "share" and units["entropy"] == units["kl"] == "nats a token"


# --- The task ---------------------------------------------------------------
def test_the_hackable_reward_pays_a_wrong_answer_more_than_a_right_one():
    item = {"question": "", "answer": "12"}
    right, wrong = (hackable.rewards(item, text) for text in (hackable.gold(item), "12 13 " * 4))
    assert right["correctness"] > 0 > wrong["correctness"]
    assert wrong["mentions"] > right["mentions"]
