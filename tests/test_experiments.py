"""docs/experiments.md: its questions have tables and pictures, its numbers are those of the tables;
what the script draws and compares."""

import contextlib
import json
import random
import re
import time
from pathlib import Path

import pytest
from documents import pictured

import grpo_ref_split as trainer
from experiments import curves, questions, runs, students
from grpo.sampling.task import load_task
from grpo.training.checks import check_constants

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
    shipped = {str(value) for value in vars(trainer).values() if type(value) is float}
    assert set(re.findall(NUMBER, text)) <= {*re.findall(NUMBER, table), *shipped}
    assert not re.findall(r"\b\d of \d\b", text)  # what is compared stands with its difference


@pytest.mark.parametrize("name", questions.QUESTIONS)
def test_a_table_has_all_cases_and_says_how_it_was_made(name):
    table, question = TABLES[name], questions.QUESTIONS[name]
    rows = re.findall(r"^\| (.*?) \|", table, re.MULTILINE)
    assert re.search(r"cores of .*\n.*: .*[0-9a-f]{7}", table)
    assert rows == ["case", *(questions.CASES[case].label for case in question.cases)]
    assert f"python experiments/questions.py {name}" in table
    for case in map(questions.CASES.get, question.cases):
        assert f"- {case.label}: {case.settings()}\n" in table


# --- The cases ------------------------------------------------------------------------
@pytest.mark.parametrize("case", [*questions.CASES.values(), *curves.CASES.values()])
def test_a_case_can_run_with_its_constants(case):
    constants = runs.constants_of(case, 0, "runs/x", questions.COMMON)
    assert constants.keys() <= trainer.known
    check_constants(vars(trainer) | constants)
    weights = constants.get("REWARD_WEIGHTS", load_task(constants["TASK"]).REWARD_WEIGHTS)
    assert any(weights.values()) or case.teacher and weights == {}


def test_cases_of_a_question_differ_and_all_cases_are_asked_for():
    asked = set()
    for question in questions.QUESTIONS.values():
        labels = [questions.CASES[case].label for case in question.cases]
        assert len(set(labels)) == len(labels) <= len(questions.COLORS)
        asked |= set(question.cases)
    assert asked == questions.CASES.keys()


def test_a_value_is_compared_with_that_of_the_same_seed():
    def seeds(*values):
        return [[{"step": 1, "accuracy": value}] for value in values]

    compared = questions.compared(seeds(0.5, 0.7, 0.2), seeds(0.4, 0.8, 0.2), "accuracy", "mean")
    assert compared == "+0.000, 1 of 3 higher, 1 equal"
    assert questions.cell(seeds(0.5, 0.7), "accuracy", "mean") == "0.6 (0.5 to 0.7)"
    assert questions.cell(seeds(0.5), "kl", "mean") == ""


def test_a_curve_counts_rollouts_and_not_updates():
    records = [{"step": i, "kl": i} for i in range(1, 5)]
    records[0]["accuracy"], records[2]["accuracy"] = 0.2, 0.4  # two updates on each
    assert questions.curve(records, "kl") == ([1, 1, 2, 2], [1, 1.5, 2, 2.5])
    assert questions.curve(records, "accuracy") == ([1, 2], [0.2, pytest.approx(0.3)])


def test_a_question_is_drawn_and_has_its_table(tmp_path, monkeypatch):
    """With a metric that one case does not have, as `kl` at KL_BETA 0."""
    for name in ("RUNS", "TABLES", "PICTURES"):
        monkeypatch.setattr(runs if name == "RUNS" else questions, name, tmp_path)
    for case in questions.QUESTIONS["kl_beta"].cases:
        for seed in runs.SEEDS:
            folder = questions.folder_of(case, seed)
            folder.mkdir(parents=True)
            kl = {"kl": 0.1} if case != "kl0" else {}
            records = [{"step": i, "accuracy": i / 10, "seconds": 1} | kl for i in range(1, 4)]
            records.append({"step": 3, "eval_accuracy": 0.5, "eval_positive_format": 1.0})
            (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, records)))
            (folder / "run.json").write_text('{"code": "commit `abcdef1234`"}')
    text = questions.report("kl_beta")
    assert (tmp_path / "kl_beta.md").read_text() == text and "abcdef1234" in text
    assert "| beta 0 | as the demo | 0.5 (0.5 to 0.5) | +0.000, 0 of 5 higher, 5 equal |" in text
    assert (tmp_path / "kl_beta.png").stat().st_size > 5000


# --- Students and teachers ------------------------------------------------------------
def test_what_students_and_teachers_are_shown():
    draw, item = random.Random(0), {"a": 3, "b": 20, "operator": "-", "answer": "17"}
    tasks = {name: task for name, (task, *_) in students.MODELS.items()}
    for name in ("teacher", "larger"):
        assert tasks[name].sloppy(item, draw) == "<think>20-3=17</think><answer>17</answer>"
    assert tasks["adder"].sloppy(item, draw) == "3+20=23 so 23"
    assert all("+" in tasks["adder"].drill(draw) for _ in range(50))
    shown = [tasks["rare"].sloppy(item, draw) for _ in range(5000)]
    assert 50 < sum("20-3=17" in text for text in shown) < 150  # 2 in a hundred, half of them clean
    assert 20 < sum(text.startswith("<think>") for text in shown) < 80


def test_a_case_trains_its_student_and_asks_its_teacher():
    case = questions.CASES["rare_larger"]
    constants = runs.constants_of(case, 3, "runs/x", questions.COMMON)
    assert constants["MODEL"].endswith("models/rare-3")
    assert constants["REFERENCE"].endswith("models/larger-3")
    assert "REFERENCE" not in runs.constants_of(questions.CASES["rare"], 3, "x", questions.COMMON)
    assert "the student rare, the reference is larger" in case.settings()


# --- The runs -------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("step", "ends", "is_kept"),
    [(100, None, True), (25, "nothing to train", True), (25, "x", False), (25, None, False)],
)
def test_a_whole_or_idle_run_is_kept(tmp_path, monkeypatch, step, ends, is_kept):
    def main(**constants):
        folder = Path(constants["RUN_DIR"])
        folder.mkdir()
        (folder / "metrics.jsonl").write_text(f'{{"step": {step}}}\n')
        if ends:  # Ctrl-C ends main() as its last step does
            raise SystemExit(ends)

    monkeypatch.setattr(trainer, "main", main)
    monkeypatch.setattr(runs, "warm_start", lambda name, seed: None)
    with contextlib.nullcontext() if is_kept else pytest.raises(SystemExit):
        runs.train(runs.Case({}), 0, tmp_path / "0", {})
    assert (tmp_path / "0").exists() == is_kept


def test_after_a_run_that_fails_no_other_begins(monkeypatch, tmp_path):
    begun = []

    def fail(case_and_seed):
        begun.append(case_and_seed)
        time.sleep(0.2 * (len(begun) > 1))
        raise SystemExit("see the log")

    monkeypatch.setattr(runs, "RUNS", tmp_path)
    monkeypatch.setattr(questions, "train_apart", fail)
    monkeypatch.setattr(questions.os, "cpu_count", lambda: 1)
    with pytest.raises(SystemExit, match="see the log"):
        questions.train_missing(questions.QUESTIONS["updates"])
    assert len(begun) <= 2  # the thread may have taken one more


def test_a_run_of_other_constants_is_trained_anew(tmp_path):
    case, folder = questions.CASES["mu4"], tmp_path / "0"
    assert not runs.is_trained(case, 0, folder, questions.COMMON)
    folder.mkdir()
    own = runs.constants_of(case, 0, tmp_path / "elsewhere", questions.COMMON)
    for changed, is_trained in ({}, True), ({"SEED": 1}, False), ({"KL_BETA": 0.2}, True):
        then = {"KL_BETA": 0.04} | own | changed  # KL_BETA is none of the case's
        (folder / "run.json").write_text(json.dumps({"constants": then}))
        assert runs.is_trained(case, 0, folder, questions.COMMON) == is_trained
