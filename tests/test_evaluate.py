"""`python evaluate.py` on the tiny model: what it prints, keeps, resumes and refuses."""

import json
import shutil
import sys
from pathlib import Path

import pytest
from fakes import a_recipe, tiny_policy
from processes import launch

import evaluate
import grpo_ref_split as trainer
from grpo.options import reward_processes
from grpo.options.merge import merge
from grpo.task import load_task
from tasks import arithmetic, even

RUN = {"TASK": "even", "MAX_PROMPT_TOKENS": 128, "MAX_COMPLETION_TOKENS": 6, "EVAL_QUESTIONS": 12}


def as_checkpoint(folder, **changes):
    """Adds what the trainer writes of the run's constants."""
    (folder / "trainer").mkdir()
    (folder / "trainer/state.json").write_text(json.dumps({"constants": RUN | changes}))
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


def numbers():
    return json.loads((OURS / "even-test.json").read_text())


def lines(folder=OURS, how="greedy"):
    (path,) = folder.glob(f"*{how}*.jsonl")
    return path, path.read_text().splitlines()


def test_a_checkpoint_is_evaluated_with_the_constants_of_its_run(model, monkeypatch, capsys):
    sizes, fit = [], evaluate.fit_worker
    noted = lambda c, *given: sizes.append(c.SAMPLE_BATCH) or fit(c, *given)
    monkeypatch.setattr(evaluate, "fit_worker", noted)
    run(monkeypatch, model, "even", "SEED=3", "--samples", 4, "EVAL_BATCH=5", "SAMPLE_BATCH=9")
    assert sizes == [5, 9]
    (_, greedy), (_, sampled) = lines(), lines(how="4-samples")
    assert len(greedy) == len(sampled) == 1 + 12
    settings, first = json.loads(greedy[0])["settings"], json.loads(greedy[1])
    assert settings["MAX_COMPLETION_TOKENS"] == 6 and settings["how"] == "greedy"
    assert len(first["answers"]) == 1 and len(json.loads(sampled[1])["answers"]) == 4
    found = numbers()
    answers = {r["question"]: r["answers"] for r in map(json.loads, greedy[1:])}
    rewards = json.loads((OURS / "even-test.rewards.json").read_text())["greedy"]
    right = [given["correctness"] > 0 for (given,) in rewards.values()]
    assert found["greedy"]["right"][0] == sum(right) / 12
    texts = [len(answers[int(question)][0]["text"]) for question in rewards]
    assert [length % 2 == 0 for length in texts] == right
    four = found["4 samples at temperature 1"]
    assert four["right"][0] == four["pass@1"] <= four["pass@4"]
    out = capsys.readouterr().out
    assert str(model) in out and "pass@4" in out and "correctness > 0" in out


def test_ctrl_c_keeps_what_is_answered_and_the_rest_follows(model, monkeypatch, capsys):
    def leave(text):
        raise SystemExit(text)

    appended = []

    def append(path, line):
        appended.append(line)
        if len(appended) == 7:  # the settings, then answers
            raise KeyboardInterrupt
        real(path, line)

    real = evaluate.append
    monkeypatch.setattr(evaluate, "leave", leave)
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(evaluate, "append", append)
        run(patch, model, "even")
    path, kept = lines()
    assert len(kept) == 1 + 5
    path.write_text(path.read_text() + "\n" + kept[-1][:20])  # kill -9 in the middle of a line
    capsys.readouterr()
    run(monkeypatch, model, "even", "EVAL_QUESTIONS=10")
    assert " 5 answers are reused: " in capsys.readouterr().out
    _, now = lines()
    questions = [json.loads(line)["question"] for line in now[1:6] + now[7:]]
    assert sorted(questions) == list(range(10))
    # All is there: no model is loaded; and more questions need only themselves
    with monkeypatch.context() as patch:
        patch.setattr(evaluate, "make_policy", None)
        run(patch, model, "even", "EVAL_QUESTIONS=10")
    assert numbers()["greedy"]["questions"] == 10
    run(monkeypatch, model, "even", "EVAL_QUESTIONS=12")
    assert len(lines()[1]) == len(now) + 2 and "10 answers are reused" in capsys.readouterr().out


def test_rewards_are_those_of_the_task_as_it_is_now(model, monkeypatch, tmp_path):
    """Also if a module of it or the gold answers have changed: a file of answers has no rewards."""
    run(monkeypatch, model, "even")
    before, (path, answers) = numbers()["greedy"]["right"][0], lines()
    assert 0 < before < 1
    odd = lambda item, text: {k: -v for k, v in rewards(item, text).items()}
    rewards = even.rewards
    monkeypatch.setattr(even, "rewards", odd)
    monkeypatch.setattr(evaluate, "make_policy", None)
    run(monkeypatch, model, "even")
    assert numbers()["greedy"]["right"][0] == pytest.approx(1 - before) and lines() == (
        path,
        answers,
    )


def test_a_reward_that_junk_can_earn_is_named(model, monkeypatch, capsys):
    """`even` rewards an even length: the empty answer has it, and questions begin with a letter."""
    run(monkeypatch, model, "even", "--samples", 2)
    out = capsys.readouterr().out
    empty, again, *frequent = [line for line in out.splitlines() if "positive rewards of" in line]
    assert "an empty answer: correctness 100%, format 0%; " in empty and "correctness CAN" in empty
    assert "the question" in again and "format 100%" in again
    assert frequent and "the most frequent gold" in frequent[0] and "groups of 2 that teach" in out


def test_before_and_after_side_by_side_an_adapter_too(tiny, model, tmp_path, monkeypatch, capsys):
    adapter = tmp_path / "adapter"
    tiny_policy(tiny, drift=0.1, lora_rank=4).save(adapter)
    merge(str(adapter), "merged")
    begun = []
    monkeypatch.setattr(reward_processes, "start_processes", lambda *limits: begun.append(limits))
    words = "--out", tmp_path / "out", "REWARD_PROCESSES=3"
    run(monkeypatch, model, adapter, "merged", "even", *words)
    ((_, number, _),) = begun  # once, for all models
    assert number == 3
    texts = []
    for name in (adapter.parts[-2:], (tmp_path.name, "merged"), ("run", "step_000003")):
        _, kept = lines(tmp_path / "out" / "--".join(name))
        texts.append(sorted((r["question"], r["answers"]) for r in map(json.loads, kept[1:])))
    assert texts[0] == texts[1] != texts[2]
    out = capsys.readouterr().out
    (row,) = [line for line in out.splitlines() if line.strip().startswith("right - first")]
    assert row.count("[") == 2 and "  -  " in row


def file_of(model, task=even, secret=1, **constants):
    """-> the file of a model's greedy answers to a question that has a secret."""
    recipe = a_recipe([(0, {"question": "?", "secret": secret}, [5, 6])], task=task, **constants)
    return evaluate.file_for(recipe, "greedy", str(model), evaluate.hashes_of(str(model)), "out")


def test_answers_of_other_settings_weights_or_replies_have_files_of_their_own(model, tmp_path):
    tiny_policy(model, lora_rank=4).save(adapter := tmp_path / "adapter")
    found = [file_of(model), file_of(adapter), file_of(model, STOP_TOKENS=["x"])]
    assert found[0] == file_of(model)
    weights = bytearray((model / "model.safetensors").read_bytes())
    weights[len(weights) // 2] ^= 1
    (model / "model.safetensors").write_bytes(weights)
    found += [file_of(model), file_of(adapter)]  # which is known by its base, too
    (model / "generation_config.json").write_text("{}")
    found.append(file_of(model))
    replies = "reply = lambda item, turns: None\nload = messages = rewards = reply\n"
    (path := tmp_path / "asks.py").write_text(replies)
    task = load_task(str(path))  # the replies have a part in the answers
    found += [file_of(model, task), file_of(model, task, secret=2)]
    path.write_text(replies + "x = 1")
    found.append(file_of(model, task))
    assert len(set(found)) == len(found)


MISTAKES = {  # the words, and what is named
    "nowhere/model even": "'nowhere/model'",
    "run/step_000003 evn": "tasks/evn.py",
    "run/step_000003 even EVAL_SPLIT=tests": "'tests'",
    "run/step_000003 even EVAL_QUESTIONS=0": "EVAL_QUESTIONS = 0",
    "run/step_000003 even MODEL=a": "MODEL=a",
    "run/step_000003 even LORA_RANK=4": "LORA_RANK=4",
    "run/step_000003 even SEEED=1": "SEED",
}


@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_is_named(model, monkeypatch, words):
    with pytest.raises(SystemExit, match=MISTAKES[words]):
        run(monkeypatch, *words.split())


@pytest.mark.long
def test_several_ranks_share_the_questions(model, monkeypatch, tmp_path):
    command = [sys.executable, evaluate.__file__, model, "arithmetic", "--out", "two"]
    output = launch(2, command, tmp_path / "log")
    (path,) = (tmp_path / "two").glob("*/*.jsonl")
    together = evaluate.read_answers(path)
    assert len(together) == 12 and output.count("questions  ") == 1
    monkeypatch.setattr(arithmetic, "SIZES", {"train": 9, "test": 500})
    run(monkeypatch, model, "arithmetic")
    assert together == evaluate.read_answers(lines()[0])
