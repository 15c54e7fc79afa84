"""`python evaluate.py` on the tiny model: what it prints, keeps and refuses."""

import json
import shutil
import sys
from pathlib import Path

import pytest
from fakes import tiny_policy
from processes import launch

import evaluate
import grpo_ref_split as trainer
from evaluate import OF_TASK, run_of
from grpo.checkpoint import CONSTANTS
from grpo.commands.merge import merge
from grpo.policy import Policy
from tasks import arithmetic

RUN = {"TASK": "even", "MAX_PROMPT_TOKENS": 128, "MAX_COMPLETION_TOKENS": 6, "EVAL_QUESTIONS": 12}


def as_checkpoint(folder, **changes):
    """Adds what the trainer writes of the run's constants."""
    (folder / CONSTANTS).write_text(json.dumps(RUN | changes))
    return folder


@pytest.fixture
def model(tiny, tmp_path, monkeypatch):
    """-> a checkpoint, in an empty working folder."""
    monkeypatch.setattr(arithmetic, "SIZES", {"train": 9, "test": 20})
    monkeypatch.setitem(trainer.DEFAULTS, "MAX_PROMPT_TOKENS", 128)
    monkeypatch.chdir(tmp_path)
    return as_checkpoint(shutil.copytree(tiny, tmp_path / "run/step_000003"))


def run(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["evaluate.py", "--local_rank=0", *map(str, words)])
    evaluate.main()


OURS = Path("runs/eval/run--step_000003")  # the answers of `model`


def answers(folder=OURS, kind="greedy"):
    """-> {question: answers} in the file of a model."""
    (path,) = folder.glob("*.jsonl")
    lines = map(json.loads, path.read_text().splitlines())
    return {line["question"]: line["answers"] for line in lines if line["kind"] == kind}


def test_a_checkpoint_is_evaluated_with_the_constants_of_its_run(model, monkeypatch, capsys):
    sizes, rows = [], Policy.stream
    noted = lambda *given, **own: sizes.append(own["max_sequences"]) or rows(*given, **own)
    monkeypatch.setattr(Policy, "stream", noted)
    run(monkeypatch, model, "even", "SEED=3", "--samples", 4, "SAMPLE_BATCH=3", "GROUP_SIZE=2")
    assert sizes == [3, 4]  # a question's samples are a group
    found = json.loads((OURS / "even-test.json").read_text())
    kind = "4 samples at temperature 1"
    greedy, sampled = answers(), answers(kind=kind)
    assert list(greedy) == list(sampled) and len(greedy) == 12
    assert {len(group) for group in greedy.values()} == {1}
    assert {len(group) for group in sampled.values()} == {4}
    assert max(answer["tokens"] for (answer,) in greedy.values()) == 6
    right = [answer["rewards"]["correctness"] > 0 for (answer,) in greedy.values()]
    assert found["greedy"]["right"][0] == sum(right) / 12
    assert [len(answer["text"]) % 2 == 0 for (answer,) in greedy.values()] == right
    four = found[kind]
    assert four["right"][0] == four["pass@1"] <= four["pass@4"]
    out = capsys.readouterr().out
    assert str(model) in out and "pass@4" in out and "correctness > 0" in out


def test_before_and_after_side_by_side_an_adapter_too(tiny, model, tmp_path, monkeypatch, capsys):
    adapter = tmp_path / "adapter"
    tiny_policy(tiny, drift=0.1, lora_rank=4).save(adapter)
    merge(str(adapter), "merged")
    run(monkeypatch, model, adapter, "merged", "even", "--out", tmp_path / "out")
    names = adapter.parts[-2:], (tmp_path.name, "merged"), ("run", "step_000003")
    texts = [answers(tmp_path / "out" / "--".join(name)) for name in names]
    assert texts[0] == texts[1] != texts[2]
    out = capsys.readouterr().out
    (row,) = [line for line in out.splitlines() if line.strip().startswith("right - first")]
    assert row.count("[") == 2 and "  -  " in row


def test_models_whose_paths_end_alike_have_a_folder_each(model, monkeypatch):
    other = shutil.copytree(model, Path("other/run/step_000003"))
    run(monkeypatch, model, other, "even", "--out", "out")
    for number, path in enumerate((model, other), start=1):
        folder = Path("out", f"{OURS.name}--{number}")
        assert json.loads((folder / "even-test.json").read_text())["model"] == str(path)


def test_a_merged_or_copied_model_keeps_the_constants_of_its_run(tiny, model, tmp_path, capsys):
    (folder := tmp_path / "adapter").mkdir()
    tiny_policy(tiny, drift=0.1, lora_rank=4).save(folder)
    as_checkpoint(model, OUTCOME="correctness")
    saved = run_of(str(model), "even")
    assert saved["MAX_COMPLETION_TOKENS"] == 6 and saved["OUTCOME"] == "correctness"
    shutil.copy(model / CONSTANTS, folder)
    merge(str(folder), out := str(tmp_path / "merged"))
    assert run_of(out, "even") == saved
    assert run_of(out, "arithmetic") == {k: v for k, v in saved.items() if k not in OF_TASK}
    assert "the run that trained" in capsys.readouterr().out
    assert run_of(str(tiny), "even") == {} and "has no grpo_split.json" in capsys.readouterr().out


def test_a_question_that_is_there_again_is_answered_once(model, tmp_path, monkeypatch, capsys):
    source = "def load(split): return [{'question': str(n % 5)} for n in range(100)]\n"
    source += "def messages(item): return [{'role': 'user', 'content': item['question']}]\n"
    source += "def rewards(item, text): return len(text) % 2\n"
    (tmp_path / "again.py").write_text(source)
    as_checkpoint(model, EVAL_QUESTIONS=99)
    run(monkeypatch, model, tmp_path / "again.py", "--out", tmp_path / "out")
    out = capsys.readouterr().out
    assert "100 questions, 95 of them duplicates" in out
    assert len(answers(next((tmp_path / "out").iterdir()))) == 5


MISTAKES = {  # the words, and what is named
    "nowhere/model even": "'nowhere/model'",
    "run/step_000003 evn": "tasks/evn.py",
    "run/step_000003 even EVAL_SPLIT=tests": "'tests'",
    "run/step_000003 even MODEL=a": "MODEL=a",
    "run/step_000003 run/other even": "runs differ in MAX_COMPLETION_TOKENS: give",
    "run/step_000003 even --out file": "--out .*file.* can't be written",
}


@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_is_named(model, monkeypatch, words):
    Path("file").touch()
    as_checkpoint(shutil.copytree(model, Path("run/other")), MAX_COMPLETION_TOKENS=7)
    with pytest.raises(SystemExit, match=MISTAKES[words]):
        run(monkeypatch, *words.split())


OTHERS = {"STOP_STRINGS": ["."], "CHAT_TEMPLATE": {"enable_thinking": True}, "STOP_TOKENS": ["x"]}
OTHERS |= {"TEMPERATURE": 0.5, "MAX_PROMPT_TOKENS": 64, "EVAL_SPLIT": "train", "OUTCOME": "format"}
OTHERS |= {"EVAL_QUESTIONS": 5, "REWARD_TIMEOUT_SECONDS": 9, "DTYPE": "bfloat16"}


@pytest.mark.parametrize("name", OTHERS)
def test_models_whose_runs_differ_are_not_compared_with_ones_constants(model, monkeypatch, name):
    as_checkpoint(shutil.copytree(model, Path("run/other")), **{name: OTHERS[name]})
    as_checkpoint(model, **{name: trainer.DEFAULTS[name]})
    for pair in ("run/step_000003 run/other even", "run/other run/step_000003 even"):
        with pytest.raises(SystemExit, match=f"runs differ in {name}"):
            run(monkeypatch, *pair.split())


@pytest.mark.long
def test_several_ranks_share_the_questions(model, monkeypatch, tmp_path):
    command = [sys.executable, evaluate.__file__, model, "arithmetic", "--out", "two"]
    output = launch(2, command, tmp_path / "log")
    (folder,) = (tmp_path / "two").iterdir()
    together = answers(folder)
    assert len(together) == 12 and output.count("questions  ") == 1
    monkeypatch.setattr(arithmetic, "SIZES", {"train": 9, "test": 500})
    run(monkeypatch, model, "arithmetic")
    assert together == answers()
