"""docs/reading_curves.md: its cases are the script's, its numbers those of the runs."""

import ast
import math
import re

import pytest
import torch
from documents import ROOT, TEXT, code_words, documented_metrics

import grpo_ref_split as trainer
from experiments import curves, defects, hackable
from experiments.runs import constants_of
from grpo.loss import group_advantages
from grpo.sampling.task import load_task
from grpo.training.checks import check_constants
from tasks.arithmetic import SIZES

PAGE = TEXT["docs/reading_curves.md"]
SECTIONS = dict(
    re.findall(r"\n!\[.*?\]\(curves/(\w+)\.png\)\n(.*?)(?=\n## |\n### |\Z)", PAGE, re.DOTALL)
)
TABLES = dict(re.findall(r"## (\w+)\n(.*?)(?=\n## |\Z)", curves.TABLES.read_text(), re.DOTALL))
WORDS = {name: " ".join(text.split()) for name, text in SECTIONS.items()}
NUMBER = r"(?<![\w.])[-−]?\d+(?:\.\d+(?:e[-+]?\d+)?|e[-+]?\d+)(?!\w|\.\d)"
DEMO = (ROOT / "benchmarks/results/demo.md").read_text()
GREEDY, FORMATTED = "greedy accuracy", "eval_positive_format"


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


def rows_of(table):
    """Returns ({metric: cells}, steps) of a run's table, greedy accuracy and format too."""
    lines = [line.split("|")[1:-1] for line in table.splitlines() if line.startswith("| ")]
    rows = {cells[0].strip(): [cell.strip() for cell in cells[1:]] for cells in lines}
    steps = [int(span.split("-")[1]) for span in rows.pop("steps", [])]
    rows[GREEDY] = re.findall(r"([\d.]+) after \d", table)
    rows[FORMATTED] = re.findall(r"([\d.]+) are then in the format", table)
    return rows, steps


def wrong_numbers(words, case, healthy):
    """Returns what of a section's words is not in the tables of its case and of the healthy run.

    A number is one of the metric that its sentence named last. Those of one metric in a sentence
    come in the order of steps: "from" the first, "to" the last, "in the end", or "by step" which.
    "(healthy: ...)" is the healthy run's, of the steps of the number before it.
    """
    wrong, names = [], "|".join(map(re.escape, [*curves.PANELS, FORMATTED]))
    pattern = rf"`({names})`|([Gg]reedy accuracy)|(\(healthy: |from |to )?({NUMBER})(?=([^`,;.)]*))"
    (rows, steps), (others, ends) = rows_of(case), rows_of(healthy)
    for sentence in re.split(r"(?<=[.:]) (?=[A-Z`*(])|(?<=\.\*\*) ", without_quotes(words)):
        metric, last = None, {}
        for name, greedy, before, number, then in re.findall(pattern, sentence):
            if not number:
                metric = name or GREEDY
                continue
            number, before = number.replace("−", "-"), before.strip("(: ")
            cells = (others if before == "healthy" else rows).get(metric, [])
            places = [i for i, cell in enumerate(cells) if cell == number]
            if before == "healthy":
                at = last.get(metric)
                found = [i for i in places if at is None or ends[i] == steps[at]]
            else:
                found = [i for i in places if i > last.get(metric, -1)]
                found = [i for i in found if may_stand_at(i, cells, steps, before, then)]
                last[metric] = found[0] if found else -1
            if not found:
                wrong.append(f"{number} of {metric}: {sentence}")
    return wrong


def may_stand_at(column, cells, steps, before, then):
    """Returns whether the words around a number may mean this column of its row."""
    if before == "from" and column > 0:
        return False
    if place := re.match(r" by step (\d+)", then):
        return steps[column] == int(place[1])
    if then.startswith(" in the end"):
        return column == len(cells) - 1
    return before != "to" or not any(cells[column + 1 :])


def without_quotes(words):
    """Returns words without quotations and code that names no metric: tests of their own."""
    kept = {*curves.PANELS, FORMATTED}
    words = re.sub(r'"[^"`]{20,}"', "", words.replace(f"samples at {curves.COOLER}", ""))
    return re.sub(r"`([^`]*)`", lambda code: code[0] if code[1] in kept else "", words)


@pytest.mark.parametrize("name", curves.CASES)
def test_a_number_of_the_page_is_that_of_its_metric_run_and_steps(name):
    assert not wrong_numbers(WORDS[name], TABLES[name], TABLES["healthy"])


def test_wrong_numbers_are_found():
    case = """Greedy accuracy: 0.5 after 0, 0.125 after 9 steps; 0.25 are then in the format.
| steps | 1-10 | 21-30 | 31-40 |
| kl | 0.75 | 10.5 | |
| reward | -0.5 | 1.25 | -1.5 |
"""
    healthy = case.replace("-1.5", "2.5").replace("0.75", "3e-07")
    right = (
        "`kl` climbs from 0.75 to 10.5 (healthy: 10.5). Greedy accuracy falls to 0.125, `reward` "
        "from −0.5 over 1.25 by step 30 to -1.5 in the end (healthy: 2.5); `kl` is 0.75 by step 10 "
    )
    assert not wrong_numbers(right, case, healthy)
    changes = {
        "from 0.75 to 10.5": "from 10.5 to 0.75",  # another order
        "0.75 to 10.5 (healthy: 10.5)": "0.75 (healthy: 10.5)",  # of other steps
        "to 0.125": "to 0.25",  # another metric's
        "over 1.25": "over −1.25",
        "1.25 by step 30": "1.25 by step 10",
        "1.25 by step 30 to -1.5": "0 to 1.25",  # not the last
        "to -1.5 in the end (healthy: 2.5)": "to 2.5 in the end (healthy: -1.5)",
        "0.75 by step 10 ": "3e-07 by step 10 ",  # the healthy run's
        "`kl` climbs": "It climbs",  # of no metric
    }
    for old, new in changes.items():
        assert wrong_numbers(right.replace(old, new, 1), case, healthy), (old, new)


def settings_of(words):
    """Returns the constants that code sets in words, `NAME=value`."""
    found = {}
    for name, value in re.findall(r"`([A-Z][A-Z_]+)=([^`]*)`", words):
        found[name] = value if name == "TASK" else ast.literal_eval(value)
    return found


@pytest.mark.parametrize("name", curves.CASES)
def test_a_section_begins_with_what_its_case_changes(name):
    constants = dict(curves.CASES[name].constants)
    if "TASK" in constants:
        constants["TASK"] = constants["TASK"].replace(f"{curves.ROOT}/", "")
    assert settings_of(SECTIONS[name].strip().split("\n\n")[0]) == constants


def test_what_the_page_says_of_constants_follows_from_them():
    demo = vars(trainer) | constants_of(curves.CASES["healthy"], 0, curves.RUNS / "healthy", {})
    cases = {name: demo | case.constants for name, case in curves.CASES.items()}
    assert cases["rate"]["LEARNING_RATE"] == pytest.approx(10 * demo["LEARNING_RATE"])
    completions = [c["GROUP_SIZE"] * c["PROMPTS_PER_STEP"] for c in (cases["pairs"], demo)]
    assert completions[0] == completions[1]
    pair = group_advantages(torch.tensor([3.25, -3.0]), scale_by_std=True)
    assert pair.tolist() == pytest.approx([0.5**0.5, -(0.5**0.5)], abs=1e-4)
    steps = rows_of(TABLES["rate"])[1][-1]
    for spans in re.findall(r"means of steps (\d+)-(\d+)", PAGE):
        assert int(spans[1]) in curves.ENDS and int(spans[0]) == int(spans[1]) - curves.WINDOW + 1
    assert "by step 30 (means of steps 21-30)" in WORDS["hacked"]
    for name, words in {
        "rate": f"`IDLE_LIMIT` ends the run at step {steps}: `nothing to train for "
        f"{demo['IDLE_LIMIT']} steps`",
        "high_kl": f"{cases['high_kl']['KL_BETA'] / demo['KL_BETA']:g} times the trainer's",
        "pairs": "as many completions",
        "temperature": f"samples at {curves.COOLER}, trains at {demo['TEMPERATURE']:g}",
    }.items():
        assert words in WORDS[name]
    whole = " ".join(PAGE.split())
    for words in [
        "### The learning rate is ten times too high",
        f"### Pairs instead of groups of {demo['GROUP_SIZE']}",
        f"with seed {curves.SEED}.",
        f"means over {curves.WINDOW} steps, or greedy accuracy on {SIZES['test']} questions",
    ]:
        assert words in whole


def test_quotations_are_those_of_the_runs():
    refused = re.search(r"At step 1: (.*)", TABLES["temperature"])[1]
    assert f'"{refused}"' in WORDS["temperature"]
    ended = re.findall(r"0, rewards shuffled \| 0\.526 \| ([\d.]+)", DEMO)
    ended += re.findall(r"rewards shuffled within .*?0\.526 -> ([\d.]+)", DEMO, re.DOTALL)
    low, middle, high = sorted(f"{float(share):.0%}".rstrip("%") for share in ended)
    assert f"ended at {low}, {middle} and {high} %" in WORDS["shuffled"]


def test_a_line_has_a_gap_at_a_step_without_the_metric():
    records = [
        {"step": 0, "eval_accuracy": 0.5},
        {"step": 1, "seconds": 1.0, "kl": 0.0},
        {"step": 2, "seconds": 1.0},
        {"step": 3, "seconds": 1.0, "kl": None},
        {"step": 3, "eval_accuracy": 0.75},
        {"step": 4, "seconds": 1.0, "kl": 2.0},
    ]
    steps, kl = curves.line_of(records, "kl")
    assert steps == [1, 2, 3, 4]
    assert str(kl) == "[0.0, nan, nan, 2.0]"
    assert curves.line_of(records, "reward")[1].count(math.nan) == 4


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
