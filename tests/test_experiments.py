"""docs/experiments.md: its questions are the script's, its numbers those of the runs; the defects
that a case puts into the trainer are those that its words say."""

import contextlib
import re
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from documents import TEXT

import grpo_ref_split as trainer
from experiments import chains, defects, questions, runs
from experiments.runs import changed, commit_of, constants_of
from grpo.forward import CompletionModel
from grpo.sampling.task import load_task
from grpo.training.checks import check_constants

PAGE = TEXT["docs/experiments.md"]
SECTIONS = dict(
    re.findall(r"\n!\[.*?\]\(experiments/(\w+)\.png\)\n(.*?)(?=\n## |\n### |\Z)", PAGE, re.DOTALL)
)
NUMBER = r"(?<![\w.])\d+\.\d+(?!\w|\.\d)"
COMPARED = r"[+-]\d\.\d{3}, \d of \d higher(?:, \d equal)?"
RANGE = r"[\d.]+ to \d[\d.]*\d"


# --- The page -------------------------------------------------------------------------
def test_the_page_has_each_question_with_its_command_and_picture():
    assert SECTIONS.keys() == questions.QUESTIONS.keys()
    for name, text in SECTIONS.items():
        assert f"`python experiments/questions.py {name}`" in text
        assert (questions.TABLES / f"{name}.md").exists()
    pictures = [questions.PICTURES / f"{name}.png" for name in SECTIONS]
    assert sum(picture.stat().st_size for picture in pictures) < 700_000


@pytest.mark.parametrize("name", questions.QUESTIONS)
def test_numbers_of_a_question_are_those_of_its_table(name):
    """A comparison and a range are a cell's, as they stand there; another number is in a cell."""
    table, text = (questions.TABLES / f"{name}.md").read_text(), SECTIONS[name]
    cells = [cell.strip() for cell in re.findall(r"[^|\n]+", table)]
    text = " ".join(text.split())
    assert "TODO" not in text and "«" not in text
    for found in re.findall(COMPARED, text):
        assert found in cells, found
    for found in re.findall(RANGE, text):
        assert any(found in cell for cell in cells), found
    text = re.sub(rf"{COMPARED}|{RANGE}", "", text)
    known = re.findall(NUMBER, table) + [str(c) for c in constants_in(questions.QUESTIONS[name])]
    for number in re.findall(NUMBER, text):
        assert number in known, number
    assert not re.findall(r"\b\d of \d\b", text)  # what is compared stands with its difference


def constants_in(question):
    """Returns the constants of a question's cases that are numbers, and the shipped ones."""
    given = [value for case in question.cases for value in questions.CASES[case].constants.values()]
    return [value for value in [*given, *vars(trainer).values()] if type(value) is float]


@pytest.mark.parametrize("name", questions.QUESTIONS)
def test_a_table_has_all_cases_and_says_how_it_was_made(name):
    table, question = (questions.TABLES / f"{name}.md").read_text(), questions.QUESTIONS[name]
    rows = re.findall(r"^\| (.*?) \|", table, re.MULTILINE)
    assert re.search(r"cores of .*\ncommits of the runs .*: [0-9a-f]{7}", table)
    assert rows == ["case", *(questions.CASES[case].label for case in question.cases)]
    assert f"python experiments/questions.py {name}" in table
    for case in question.cases:
        assert f"- {questions.CASES[case].label}: " in table
        assert questions.CASES[case].settings() in table


# --- The cases ------------------------------------------------------------------------
@pytest.mark.parametrize("name", questions.CASES)
def test_a_case_can_run_with_its_constants(name):
    case = questions.CASES[name]
    constants = constants_of(case, 0, questions.folder_of(name, 0), questions.COMMON)
    assert constants.keys() <= trainer.known
    check_constants(vars(trainer) | constants)
    task = load_task(constants["TASK"])
    assert any((constants.get("REWARD_WEIGHTS") or task.REWARD_WEIGHTS).values())


def test_cases_of_a_question_differ_and_all_cases_are_asked_for():
    asked = set()
    for question in questions.QUESTIONS.values():
        labels = [questions.CASES[case].label for case in question.cases]
        assert len(set(labels)) == len(labels)
        assert len(question.cases) <= len(questions.COLORS)
        asked |= set(question.cases)
    assert asked == questions.CASES.keys()


def test_a_value_is_compared_with_that_of_the_same_seed():
    def runs(*values):
        return [[{"step": 1, "accuracy": value}] for value in values]

    told = questions.compared(runs(0.5, 0.7, 0.2), runs(0.4, 0.8, 0.2), "accuracy", "mean")
    assert told == "+0.000, 1 of 3 higher, 1 equal"
    assert questions.cell(runs(0.5, 0.7), "accuracy", "mean") == "0.6 (0.5 to 0.7)"
    assert questions.cell(runs(0.5), "kl", "mean") == ""


def test_a_curve_counts_rollouts_and_not_updates():
    records = [{"step": i, "seconds": 2.0} for i in range(1, 5)]
    records[0]["accuracy"], records[2]["accuracy"] = 0.2, 0.4  # two updates on each
    assert questions.curve(records, "accuracy", x="rollouts", smooth=1) == ([1, 2], [0.2, 0.4])
    xs, ys = questions.curve(records, "accuracy", x="seconds", smooth=2)
    assert xs == [2.0, 6.0] and ys == pytest.approx([0.2, 0.3])


# --- The tasks ------------------------------------------------------------------------
def test_chains_reward_what_applies_alone():
    (item,) = [i for i in chains.load("test") if len(i["digits"]) == 2][:1]
    a, b = item["digits"]
    right = f"<think>{a}+{b}={a + b}</think><answer>{a + b}</answer>"
    wrong = f"<think>{a}+{b}={a + b} {a}+{b}={a + b}</think><answer>0</answer>"
    assert chains.rewards(item, right) == {
        "correctness": True,
        "short": True,
        "long": None,
        "right_steps": 1.0,
        "wrong_steps": None,
    }
    assert chains.rewards(item, wrong)["wrong_steps"] == 2.0
    assert chains.rewards(item, wrong)["right_steps"] is None
    splits = [{i["question"] for i in chains.load(split)} for split in chains.SIZES]
    assert not set.intersection(*splits) and all(splits)


# --- The defects ----------------------------------------------------------------------
def sequence(tokens, group):
    return SimpleNamespace(completion=[1] * tokens, prompt=[group])


def scaled(defect, *batches):
    """Returns what a defect makes of micro-batches whose losses are 1."""
    turns = [([sequence(n, group) for n in tokens], False) for group, tokens in enumerate(batches)]
    fake = SimpleNamespace(
        plan_turns=lambda *_: turns, batch_loss=lambda *_: (torch.tensor(1.0), {})
    )
    defect(fake)
    planned = fake.plan_turns([s for batch, _ in turns for s in batch])
    return [fake.batch_loss(None, None, None, batch, None)[0].item() for batch, _ in planned]


def test_sums_are_not_divided_by_the_number_of_micro_batches():
    assert scaled(defects.sums_unscaled, [3], [5], [1]) == [3, 3, 3]


def test_micro_batch_means_weigh_a_token_by_its_micro_batch():
    # 8 tokens in all: a weight of 1/8 becomes 1/2 of 1/6, and 1/2 of 1/2
    assert scaled(defects.micro_batch_means, [4, 2], [2]) == pytest.approx([8 / 12, 8 / 4])
    assert scaled(defects.micro_batch_means, [4, 2], [3, 3]) == pytest.approx([1, 1])


def test_seeds_are_cut_at_the_time_of_the_fastest_case():
    def run(*seconds):
        return [{"step": i, "seconds": s, "accuracy": i / 10} for i, s in enumerate(seconds, 1)]

    cut = questions.timely({"slow": [run(3, 3, 3), run(1, 1)], "fast": [run(1, 1, 5), run(2, 2)]})
    assert [[len(seed) for seed in seeds] for seeds in cut.values()] == [[2, 2], [3, 1]]


@pytest.mark.parametrize(
    ("step", "ends", "is_kept"),
    [
        (100, None, True),
        (25, "nothing to train for 10 steps", True),
        (25, "STEPS = x", False),
        (25, None, False),  # Ctrl-C ends a run as well as its last step does
    ],
)
def test_a_run_that_ends_with_nothing_to_train_is_kept(tmp_path, monkeypatch, step, ends, is_kept):
    def main(**constants):
        folder = Path(constants["RUN_DIR"])
        folder.mkdir()
        (folder / "metrics.jsonl").write_text(f'{{"step": {step}}}\n')
        if ends:
            raise SystemExit(ends)

    monkeypatch.setattr(trainer, "main", main)
    monkeypatch.setattr(runs, "warm_start", lambda case, seed: None)
    with contextlib.nullcontext() if is_kept else pytest.raises(SystemExit):
        runs.train(runs.Case(), 0, tmp_path / "0", {})
    assert (tmp_path / "0").exists() == is_kept


def test_after_a_run_that_fails_no_other_begins(monkeypatch, tmp_path):
    begun = []

    def fail(case_and_seed):
        begun.append(case_and_seed)
        time.sleep(0.2 * (len(begun) > 1))
        raise SystemExit("see the log")

    monkeypatch.setattr(questions, "RUNS", tmp_path)
    monkeypatch.setattr(questions, "train_apart", fail)
    monkeypatch.setattr(questions.os, "cpu_count", lambda: 1)
    with pytest.raises(SystemExit, match="see the log"):
        questions.train_missing(questions.QUESTIONS["updates"])
    assert len(begun) <= 2  # the thread may have taken one more


def test_a_run_of_other_constants_is_found(tmp_path):
    import json

    case = questions.CASES["stale4"]
    then = {"KL_BETA": 0.04, "MICRO_BATCH_TOKENS": 8192, "OUTCOME": "x", "STEPS": 60, "SEED": 0}
    (tmp_path / "run.json").write_text(
        json.dumps({"constants": then, "code": "commit `ab12345f0`"})
    )
    assert changed(case, 0, tmp_path, questions.COMMON) == []
    assert commit_of(tmp_path) == "ab12345"
    assert changed(case, 1, tmp_path, questions.COMMON) == ["SEED"]
    then["KL_BETA"] = 0.2
    (tmp_path / "run.json").write_text(json.dumps({"constants": then, "code": ""}))
    assert changed(case, 0, tmp_path, questions.COMMON) == ["KL_BETA"]


def test_old_samples_wait_as_many_steps_as_is_said():
    from fakes import MIXED, a_group

    made = iter(range(100))
    fake = SimpleNamespace(
        sample_step=lambda run: ([a_group(MIXED, policy_version=next(made))], {}, []),
        checks=SimpleNamespace(check_first_update=None),
    )
    defects.stale(fake, by=3)
    trained = [fake.sample_step(None)[0][0] for _ in range(5)]
    assert [g.policy_version for g in trained] == [0, 1, 2, 3, 4]
    assert next(made) == 5 + 3  # three more were sampled than trained


@pytest.mark.parametrize("mask", [True, False])
def test_padding_on_the_left_is_right_with_a_mask_alone(monkeypatch, tiny, mask):
    from transformers import AutoModelForCausalLM

    model = CompletionModel(AutoModelForCausalLM.from_pretrained(tiny).eval(), share_prompts=False)
    prompts, completions = [[5, 6, 7, 8], [9, 5]], [[6, 7], [8, 9, 5]]
    with torch.no_grad():
        right, ids = model(prompts, completions)
        monkeypatch.setattr(CompletionModel, "_separate", None)  # to be put back
        fake = SimpleNamespace(checks=SimpleNamespace(check_first_update=None))
        defects.padded_on_the_left(fake, mask=mask)
        padded, same = model(prompts, completions)
    assert ids.tolist() == same.tolist() == [6, 7, 8, 9, 5]
    assert torch.allclose(padded[:2], right[:2], atol=1e-4)  # the longer one has no padding
    assert torch.allclose(padded[2:], right[2:], atol=1e-4) == mask


def test_the_sampler_alone_is_cooler(monkeypatch):
    from grpo.sampling.policy import Policy

    seen = []
    monkeypatch.setattr(Policy, "stream", lambda self, prompts, **names: seen.append(names))
    fake = SimpleNamespace(checks=SimpleNamespace(check_first_update=None))
    defects.cooler_sampler(fake, factor=0.9)
    Policy.stream(None, None, temperature=1.0, seed=0)
    assert seen == [{"temperature": 0.9, "seed": 0}]


def test_a_refused_update_goes_on_and_leaves_its_words(tmp_path):
    def refuse():
        raise RuntimeError("no")

    checks = SimpleNamespace(check_first_update=refuse)
    defects.go_on_if_refused(SimpleNamespace(checks=checks, RUN_DIR=str(tmp_path)))
    assert "goes on" in checks.check_first_update()
    assert (tmp_path / defects.REFUSAL).read_text() == "no"


def test_retokenised_completions_are_those_of_their_text():
    from fakes import a_group

    class Letters:  # "ab" is one id where its letters were sampled
        eos_token_id = 0

        def decode(self, ids):
            return "".join({1: "a", 2: "b", 3: "ab"}[i] for i in ids)

        def __call__(self, text, add_special_tokens):
            return {"input_ids": [3] * (text == "ab") or [1] * len(text)}

    ids, three = [1, 2, 0, 1, 1, 0, 1, 2], {"lengths": (3, 3, 2), "truncated": (False,) * 3}
    group = a_group([[0.0, 0.0]] * 3, completion_ids=torch.tensor(ids).int(), **three)
    fake = SimpleNamespace(
        sample_share=lambda run, *_: iter([(group, False)]),
        update=lambda run, sequences: {"loss": 0.0},
        checks=SimpleNamespace(check_first_update=None),
    )
    defects.retokenised(fake)
    run = SimpleNamespace(policy=SimpleNamespace(tokenizer=Letters()))
    ((found, is_flat),) = fake.sample_share(run, 1, 0, {})
    assert [part.tolist() for part in found.completions(found.completion_ids)] == [
        *([3, 0], [1, 1, 0], [3]),
    ]
    assert found.sampler_logps.tolist() == [-1, -1, -4, -5, -6, -7] and not is_flat
    assert fake.update(run, []) == {"loss": 0.0, "retokenised": 2 / 3}
    assert fake.update(run, []) == {"loss": 0.0, "retokenised": 0}  # of each step anew
