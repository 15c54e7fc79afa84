"""The tasks beside GSM8K, and `python -m tasks`, which shows one."""

import asyncio
import importlib
import itertools
import json
import math
import re
import runpy
import shlex
import signal
import socket
import sys
import time
import types
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from fakes import a_recipe
from helpers import Replies, reply
from processes import PATIENCE, python

import grpo_ref_split as trainer
from grpo.checks import trainer_constants
from grpo.constants import command_line
from grpo.models import load_model
from grpo.prepare import prepare
from grpo.rewards import reward_texts
from grpo.sample import Question
from grpo.task import different, load_items, load_task
from tasks import arithmetic, data, gsm8k, judge
from tasks import math as math_task
from tasks import reasoning_gym as gym

ROOT = Path(__file__).parent.parent


def lines_at(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return str(path)


# --- Judge ---------------------------------------------------------------------------
def verdict(text):
    return reply(200, json.dumps({"choices": [{"message": {"content": text}}]}).encode())


@pytest.fixture
def judged(monkeypatch):
    """Returns a function: the rewards of an answer that a judge with these replies gives, and the
    requests that it got."""

    def run(*replies):
        server = Replies(*replies)
        monkeypatch.setattr(judge, "URL", f"{server.url}/v1/chat/completions")
        rewards = asyncio.run(judge.rewards({"question": "Why?"}, "Because."))
        return rewards, server.requests

    return run


@pytest.mark.parametrize("text, points, good", [
    ("7", 0.7, True), ("10", 1.0, True), ("Rating: 6/10.", 0.6, False), ("0", 0.0, False),
    ("**9**", 0.9, True), ("8.5", 0.85, True), ("8 out of 10", 0.8, True), ("**8**/10", 0.8, True),
    ("10.0", 1.0, True), ("7.", 0.7, True), ("I rate it 6.5/10!", 0.65, False),
    ("0.5", 0.05, False), ("8 / 10.", 0.8, True), ("Score: `7`", 0.7, True),
])  # fmt: skip
def test_a_judges_number_is_the_reward(text, points, good, judged):
    found, requests = judged(verdict(text))
    assert found == {"points": points, "good": good} and len(requests) == 1


@pytest.mark.parametrize("text", [
    "good", "7 or 8", "", "11", None, "-3", "\u22123", "10.5", "8/5", "8/100", "7,5", "100", "1e1",
    "9 out of 5", "Score: -2",
])  # fmt: skip
def test_another_text_of_a_judge_is_no_reward(text, judged):
    assert judged(verdict(text))[0] is None


def test_where_a_judge_fails_the_reward_does_not_apply(judged, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "secret")
    _, (request,) = judged(verdict("8"))
    head, brace, body = request.partition(b"{")
    assert b"Authorization: Bearer secret" in head
    assert "Because." in json.loads(brace + body)["messages"][0]["content"]
    for body in (b"<html>", b"", b'{"choices": []}', b"[]"):
        assert judged(reply(200, body))[0] is None
    with socket.create_server(("127.0.0.1", 0)) as silent, monkeypatch.context() as patch:
        patch.setattr(judge, "LIMIT_SECONDS", 0.3)
        patch.setattr(judge, "URL", f"http://127.0.0.1:{silent.getsockname()[1]}/")
        assert judge.points("Why?") is None  # it accepts, and never answers
    recipe = a_recipe(task=judge, REWARD_WEIGHTS=judge.REWARD_WEIGHTS, TASK="judge")
    monkeypatch.setattr(judge, "URL", "http://127.0.0.1:1/")
    (rewards,) = reward_texts(recipe, {"question": "?"}, ["x"])
    assert all(map(math.isnan, rewards.values()))


def test_the_example_with_a_pool_of_processes(tmp_path):
    file = tmp_path / "adds_slowly.py"
    text = (ROOT / "docs/tasks.md").read_text()
    (example,) = re.findall(r"```python\n(import.*?)```", text, re.DOTALL)
    file.write_text(example + "def load(split): return []\ndef messages(item): return []\n")
    recipe = a_recipe(task=load_task(str(file)), TASK=str(file), REWARD_WEIGHTS={"reward": 1})
    recipe = recipe.others(REWARD_TIMEOUT_SECONDS=PATIENCE)  # its processes start
    with recipe.task.POOL:
        found = reward_texts(recipe, {"answer": 3}, ["1 2", "1 3"] * 8)
    assert [rewards["reward"] for rewards in found] == [1.0, 0.0] * 8


# --- Reasoning Gym --------------------------------------------------------------------
@pytest.fixture
def fake_gym(monkeypatch):
    """In place of the package: a data set whose verifier gives junk 0.01 and raises on "boom"."""

    def score(answer, item):
        return {item["answer"]: 1.0, "boom": None}.get(answer, 0.01) + 0

    made = types.ModuleType("reasoning_gym")
    item = lambda n: {"question": f"{n} + 1?", "answer": str(n + 1), "metadata": {}}
    made.create_dataset = lambda name, size, seed: map(item, range(seed, seed + size))
    made.get_score_answer_fn = lambda name: score
    monkeypatch.setitem(sys.modules, "reasoning_gym", made)
    gym.verifier.cache_clear()
    yield made
    gym.verifier.cache_clear()


def test_reasoning_gym_is_right_above_a_score_of_99_percent(fake_gym, monkeypatch):
    item = gym.load("train")[1]
    assert item["answer"] == "2" and gym.messages(item)[1]["content"] == "1 + 1?"
    for answer, right, score in (("2", True, 1.0), ("3", False, 0.01), (" 2 ", True, 1.0)):
        found = gym.rewards(item, f"<think></think><answer>{answer}</answer>")
        assert found == {"correctness": right, "score": score, "format": True}
    assert gym.rewards(item, "2") == {"correctness": False, "score": 0.0, "format": False}
    assert gym.rewards(item, gym.gold(item))["correctness"]
    assert gym.gold(item | {"answer": None}) is None
    junk = "<answer>boom</answer>"
    with pytest.raises(TypeError):  # a verifier that is not known to raise has a bug
        gym.rewards(item, junk)
    monkeypatch.setattr(gym, "NAME", "prime_factorization")
    assert gym.rewards(item, junk)["correctness"] is False
    monkeypatch.setattr(gym, "NAME", "game_of_life_halting")
    with pytest.raises(ValueError, match="accepts junk as right"):
        gym.load("train")


def test_no_question_of_reasoning_gym_is_both_trained_and_tested(fake_gym, monkeypatch):
    """The package draws item i of a data set with its seed + i."""
    monkeypatch.setattr(gym, "NAME", "countdown")  # with more problems than items
    found = [{item["question"] for item in gym.load(split)} for split in gym.SIZES]
    assert [len(questions) for questions in found] == list(gym.SIZES.values())
    assert all(one.isdisjoint(other) for one, other in itertools.combinations(found, 2))


# --- Mathematics --------------------------------------------------------------------
SAME = [
    ("0.5", r"\frac{1}{2}"), (r"\dfrac12", r"\frac{1}{2}"), ("1+x", "x+1"),
    (r"x^2+2x+1", r"(x+1)^2"), (r"\left(3, \frac{1}{2}\pi\right)", r"(3,\frac{\pi}{2})"),
    (r"\frac{1}{\sqrt{3}}", r"\frac{\sqrt{3}}{3}"), ("x=5", "5"), (r"\{2, 1\}", r"\{1,2\}"),
    ("90", r"90^\circ"), ("10", r"10\%"), (r"\text{(C)}", r"\text{(C)}"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
    (r"\begin{pmatrix}1 \\ -2\end{pmatrix}", r"\begin{pmatrix}1\\-2\end{pmatrix}"),
    ("Evelyn", r"\text{Evelyn}"), (r"\text{ Evelyn }", "Evelyn"), ("C", r"\text{(C)}"),
    ("(C)", r"\textbf{(C)}"), (r"\text{C}", "(C)"), ("12", r"12\text{ inches}"),
    (r"12\text{ inches}", "12"), (r"12\,\text{cm}^2", r"12 \mbox{ square cm}"),
    (r"\frac{1}{2}\,\mathrm{m/s}^{-2}", "0.5"), (r"37^\circ\text{C}", "37"), (r"\textbf{7}", "7"),
    (r"\mathbf{7}", r"\mathrm{7}"), (r"\cfrac{3}{4}", "0.75"), ("\u22127", "-7"), ("n=5", "5"),
    ("32,349", "32349"), (r"32,\!349", "32349"), ("32,  349", "32, 349"),
    ("(100, 200)", "(100,200)"),
    ("5", "n = 5"), ("y=2x+1", "2x+1"), ("y = 1 + 2x", "y=2x+1"), (r"x \in [1,2]", "[1,2]"),
    (r"\leftarrow", r"\leftarrow"), ("a^9+b^9+c^9", "a^9 + b^9 + c^9"), ("1{,}000", "10^3"),
    (r"1.2 \times 10^{-5}", "0.000012"), ("2^{10}", "1024"), ("3^5x", "243x"),
]  # fmt: skip
OTHER = [  # 5! is not even tried
    *((r, "32349") for r in ("32, 349", "$32,  349$", "32,\n349", "32, 349.")), ("5, 100", "5100"),
    ("1, 234, 567", "1234567"), ("32,349", "32, 349"), ("100, 200, 300", "100200300"),
    ("", "5"), ("6", "5"), ("5, 6", "5"), ("x", "y"), ("x=3", "y=3"), ("x", "x=3"), ("2x=5", "25"),
    ("A", r"\text{(B)}"), (r"5\text{ or 6}", "5"), (r"5\text{ million}", "5"),
    (r"5\text{ p.m.}", r"5\text{ a.m.}"), (r"2\mathrm{i}", "2"), (r"x\text{ cm}", "x"),
    (r"\text{ cm}", ""), (r"\leftarrow", r"\rightarrow"),
    (r"\begin{pmatrix}12\end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"), ("(2,1)", "(1,2)"),
    ("[0,1]", "[0,1)"), ("2", r"\frac{1}{2}"), ("5!", "120"), (r"5\text{ trillion}", "5"),
    (r"5\text{ lakh}", "5"), ("5万", "5"), ("5½", "5"), ("10²", "10"), ("2^{10}", "210"),
]  # fmt: skip


def test_answers_in_latex_are_compared_by_value():
    for answer, gold in SAME:
        completion = rf"So \boxed{{1}}, no: $\boxed{{{answer}}}$."
        assert math_task.rewards({"answer": gold}, completion) == {"correctness": True}, answer
    for answer, gold in OTHER:
        completion = rf"\boxed{{{answer}}}"
        assert math_task.rewards({"answer": gold}, completion) == {"correctness": False}, answer
    for space in ("", " ", "  ", "\n", "\t"):
        assert (
            math_task.boxed(rf"\boxed{{1}}, no: \boxed{space}{{\frac{{1}}{{2}}}}.")
            == r"\frac{1}{2}"
        )
    for text in ("5", r"\boxed{5", r"\boxed{5} or \boxed{6}", ""):
        assert math_task.rewards({"answer": "5"}, text) == {"correctness": False}


SLOW = [  # math-verify, or its parser, takes from seconds to for ever
    "9^{9^9}", "9^4^4^4", "(a+b+c+d)^4/(e+f+g+h)^4", "((((a+b)^4+c)^4+d)^4)", "(((a+b)^4+a)^4+b)^4",
    "x^9+y^9=2", "((((((((((1))))))))))", "{{{{{{{{{1}}}}}}}}}", r"\sqrt{2+\sqrt{3+\sqrt{5}}}",
    r"\frac{1}{\frac{1}{\frac{1}{\frac{1}{x}}}}", r"\sqrt{12345678901234567}", r"\sum_{k=1}^{99}k",
    "x" * 61 + "^2", "9^9^9", "9^{9}^9", "{9^9}^9", "(9^9)^9", "9^{999}", "9!", "10^{99}^4",
]  # fmt: skip


@pytest.mark.parametrize("latex", SLOW)
def test_math_verify_does_not_see_what_it_can_hang_on(latex, monkeypatch):
    monkeypatch.setattr(math_task, "is_equal_latex", lambda *_: pytest.fail("it was asked"))
    assert not math_task.is_right(latex, "5") and not math_task.is_right("5", latex)
    assert math_task.is_right(latex, latex)


def test_math_verify_works_in_a_thread_and_leaves_the_alarm_alone():
    """Its timeout is SIGALRM: it raises off the main thread, and ends others' alarms."""
    signal.alarm(100)
    assert math_task.is_right(r"\sqrt{49}", "7") and signal.alarm(0) > 0
    with ThreadPoolExecutor() as pool:
        assert pool.submit(math_task.is_right, r"\sqrt{49}", "7").result()


def test_a_long_answer_is_read_in_linear_time():
    for part in (r"\text{", r"1\text{a", r"\text{a}", "1\\\\ ", " ", "$", r"^\circ", "{"):
        start = time.process_time()
        assert not math_task.is_right(part * 10_000, "5")
        assert time.process_time() - start < 1, part  # 0.02 s each


def test_math_reads_answers_from_solutions(tmp_path, monkeypatch):
    records = [{"problem": f"{n}?", "solution": rf"It is $\boxed{{{n}}}$."} for n in range(11)]
    records[1] = {"problem": "1?", "solution": "A proof."}
    records[2] = {"problem": "2?", "solution": r"\boxed{9}", "answer": 2}
    records[3] = {"problem": "3?", "solution": None, "answer": 0}
    records[4] = {"problem": "4?", "solution": None}
    lines_at(tmp_path / "train.jsonl", records)
    monkeypatch.setattr(math_task, "DATA", tmp_path)
    train = math_task.load("train")
    assert [item["answer"] for item in train] == ["0", "2", "0", *map(str, range(5, 11))]
    assert math_task.rewards(train[1], math_task.gold(train[1])) == {"correctness": True}
    assert math_task.messages(train[1])[1] == {"role": "user", "content": "2?"}


def test_the_task_math_does_not_shadow_pythons_own(monkeypatch):
    """Nor if the folder tasks itself is on the path, as for a task that is given by its path."""
    assert load_task("math") is math_task and math.pi > 3
    monkeypatch.setattr(sys, "path", list(sys.path))
    task = load_task(str(Path(arithmetic.__file__)))  # imports random, and that math
    assert importlib.import_module("math") is math
    assert task.rewards({"answer": "5"}, "<answer>5</answer>") == {
        "correctness": 1.0,
        "format": -1.0,
    }


# --- Data ---------------------------------------------------------------------------
def test_records_come_from_a_file_a_folder_or_the_hub(tmp_path, monkeypatch):
    records = [{"prompt": str(n), "subject": n % 10} for n in range(500)]
    path = lines_at(tmp_path / "train.jsonl", records)
    found = {split: data.records(path, split) for split in ("train", "validation", "test")}
    assert sorted(itertools.chain(*found.values()), key=records.index) == records
    for split, least in (("train", 350), ("validation", 30), ("test", 30)):  # a regular order
        assert len(found[split]) > least and {x["subject"] for x in found[split]} == {*range(10)}
    lines_at(tmp_path / "train.jsonl", [{"prompt": "more"}, *reversed(records)])
    assert all(x in data.records(path, "test") for x in found["test"])
    lines_at(tmp_path / "train.jsonl", records)
    for name in ("tset", "valid", "train[:10]", "Train", ""):
        with pytest.raises(ValueError, match=r"train.jsonl has \('train', 'validation', 'test'\)"):
            data.records(path, name)
    assert data.records(str(tmp_path), "train") == records
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"prompt": 1}\n\n{prompt: 2}\n')
    with pytest.raises(
        ValueError, match="line 3 of .*bad.jsonl is not JSON in UTF-8.*load_dataset"
    ):
        data.records(bad, "train")
    bad.write_bytes('{"prompt": 1}\n{"prompt": "é"}\n'.encode("latin-1"))
    with pytest.raises(ValueError, match="line 2 of .*bad.jsonl is not JSON in UTF-8"):
        data.records(bad, "train")
    bad.write_text('\ufeff{"prompt": "a\u2028b\x85c"}\r\n{"prompt": "d"}', encoding="utf-8")
    assert {"prompt": "a\u2028b\x85c"} in data.lines(bad)
    load_dataset = lambda name, config, split: iter(records)
    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    assert data.records("some/set", "train") == records
    monkeypatch.setattr(gsm8k, "DATA", "none.jsonl")
    with pytest.raises(SystemExit, match=r"tasks/gsm8k.py: load.*FileNotFoundError.*none.jsonl"):
        load_items("gsm8k", gsm8k, "train")


def test_a_json_array_is_read_and_other_shapes_are_refused_with_the_line(tmp_path):
    """On one line it was one record, the test's, and training had "no items"."""
    path, records = tmp_path / "data.json", [{"n": n} for n in range(11)]
    for indent in (None, 2):
        path.write_text(json.dumps(records, indent=indent), encoding="utf-8-sig")
        assert data.lines(path) == records
    for text, why in (
        ('{"n": 0}', "data.json has no record for 'train': add some, or make a folder"),
        ("\n", "data.json has no records"),
        ("[]", "data.json has no records"),
        ('{"n": 1}\n5\n', "line 2 of .*data.json: 5 is no object"),
        ('[{"n": 1}, "two"]', "data.json: 'two' is no object"),
    ):
        path.write_text(text)
        with pytest.raises((ValueError, TypeError), match=why):
            data.records(path, "train")
    (tmp_path / "test.jsonl").write_text('{"n": 1}')
    assert data.records(tmp_path, "test") == records[1:2]  # of a folder one is enough


# --- python -m tasks ------------------------------------------------------------------
def run(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["tasks", *words])
    runpy.run_module("tasks", run_name="__main__")


@pytest.mark.parametrize("name", ["", "gsm9k"])
def test_a_list_of_tasks_and_a_wrong_name_come_at_once(name):
    """They need no torch, which takes seconds to import."""
    code = f"import runpy, sys\nsys.argv[1:] = {name.split()}\n"
    code += "try: runpy.run_module('tasks', run_name='__main__')\n"
    code += "finally: print({'torch', 'transformers', 'deepspeed'} & set(sys.modules))"
    shown = python("-c", code)
    assert shown.stdout.endswith("set()\n") and ("did you mean gsm8k" in shown.stderr) == bool(name)
    for task in ("arithmetic", "gsm8k", "math"):
        assert bool(re.search(rf"(?m)^    {task} +\w", shown.stdout)) != bool(name)
    assert not re.search("(?m)^    (answers|data|__main__)", shown.stdout)


def test_a_task_that_is_made_here_is_shown_with_gold_that_is_right(tiny, monkeypatch, capsys):
    monkeypatch.setattr(arithmetic, "SIZES", dict.fromkeys(arithmetic.SIZES, 20))
    run(monkeypatch, "shuffled", f"MODEL={tiny}", "MAX_PROMPT_TOKENS=999")
    assert capsys.readouterr().out.count("rewards of the gold answer '<think>") == 3


def test_a_task_is_shown_as_a_run_would_see_it(tiny, tmp_path, monkeypatch, capsys):
    source = 'ITEMS = [{"city": c} for c in ("Rome", "Oslo", "Bern", "Lima")]\n'
    source += "def load(split): return ITEMS\ndef rewards(item, completion): return None\n"
    source += 'def messages(item): return [{"role": "user", "content": item["city"]}]\n'
    (tmp_path / "own.py").write_text(source)
    run(monkeypatch, str(tmp_path / "own.py"), f"MODEL={tiny}")
    shown = capsys.readouterr().out
    assert all(f"<|im_start|>user\n{city}<|im_end|>" in shown for city in ("Rome", "Oslo", "Bern"))
    assert "Lima" not in shown and shown.count("empty completion: reward does not apply") == 3
    assert "own.py/train: 4 questions, 0 left out" in shown and "own.py/test: 4 ques" in shown


LABELS = """
from tasks.arithmetic import load as load_all

def load(split):
    return load_all(split)[:30]

def messages(item):
    return [{"role": "system", "content": "Plus or minus?"}, *asked(item)]

def asked(item):
    return [{"role": "user", "content": item["question"]}]

def rewards(item, completion):
    return completion == item["answer"]
"""


def test_a_tiny_model_of_any_task_is_made_and_its_command_runs(tmp_path, monkeypatch, capsys):
    """Without a hub: the command that is printed trains it."""
    import tasks.__main__ as module

    monkeypatch.setattr(module, "WARM_STEPS", 2)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(LABELS)
    (tmp_path / "presets").symlink_to(ROOT / "presets")
    monkeypatch.setattr(sys, "argv", ["tasks", "OUT=runs/own"])
    module.main("own.py")
    shown = capsys.readouterr().out
    assert "rewards of the gold answer" in shown
    (command,) = re.findall(
        r"^    python (grpo_ref_split.py presets/demo.py .*)$", shown, re.MULTILINE
    )
    monkeypatch.setattr(sys, "argv", command.split())
    _, given = command_line(trainer.DEFAULTS, trainer.__doc__)
    c = trainer_constants(trainer.DEFAULTS, given)
    tokenizer, recipe, _ = prepare(c, needs_server=False)
    assert len(recipe.prompts) == 30
    assert load_model(c.MODEL, "float32", len(tokenizer))[0].config.max_position_embeddings == 256


def test_the_task_with_a_tool_in_the_docs_gets_a_model_that_its_command_trains(
    tmp_path, monkeypatch, capsys
):
    """The file and both commands are those of docs/tasks.md."""
    import tasks.__main__ as module

    page = (ROOT / "docs/tasks.md").read_text()
    *_, source = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    commands = re.findall(r"^    python (.*?)(?:  #.*)?$", page, re.MULTILINE)
    made, trained = map(shlex.split, commands)
    (tmp_path / "my").mkdir()
    (tmp_path / made[2]).write_text(source)
    monkeypatch.setattr(module, "WARM_STEPS", 2)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["tasks", *made[3:]])
    module.main(made[2])
    shown = capsys.readouterr().out
    assert shown.count("reply() inside that turn: '") == 3
    assert (
        len(
            re.findall(
                r"rewards of the gold answer .*: reward 1; it counts as right$", shown, re.MULTILINE
            )
        )
        == 3
    )
    assert shlex.split(shown.splitlines()[-1])[1:] == trained


def test_a_task_without_right_answers_has_no_tiny_model(tmp_path, monkeypatch):
    (tmp_path / "own.py").write_text(LABELS.replace("[:30]", "and [{'question': 'a'}]"))
    with pytest.raises(SystemExit, match="own.py: gold.*'answer'"):
        run(monkeypatch, str(tmp_path / "own.py"), f"OUT={tmp_path / 'model'}")
    two = LABELS.replace("completion ==", "{'a': 1, 'b': 0}  #").replace("[:30]", "")
    two = two.replace("def rewards", "async def rewards")
    (tmp_path / "two.py").write_text(two)
    with pytest.raises(SystemExit, match=r"two.py: OUTCOME.*\['a', 'b'\]"):
        run(monkeypatch, str(tmp_path / "two.py"), f"OUT={tmp_path / 'model'}")
    assert not (tmp_path / "model").exists()
    (tmp_path / "slow.py").write_text(f"{LABELS}\nimport time\ndef reply(*_): time.sleep(60)")
    with pytest.raises(SystemExit, match=r"slow.py: reply\(.* took too long"):
        words = f"OUT={tmp_path / 'model'}", "REWARD_TIMEOUT_SECONDS=1"
        run(monkeypatch, str(tmp_path / "slow.py"), *words)
    with pytest.raises(SystemExit, match=f"{tmp_path} exists already"):
        run(monkeypatch, str(tmp_path / "own.py"), f"OUT={tmp_path}")


@pytest.mark.parametrize("falls, steps", [(0.01, 200), (0.03, 400)])
def test_a_tiny_model_learns_until_its_loss_is_flat(falls, steps, monkeypatch, tmp_path, capsys):
    from grpo.commands import tiny_model

    made, loss = [], lambda n: (1 - falls) ** (min(n, 250) // 100)
    fake = lambda model, _: made.append(0) or 0 * model.lm_head.weight.sum() + loss(len(made) - 1)
    monkeypatch.setattr(tiny_model, "next_token_loss", fake)
    tiny_model.warm_start(tmp_path, load_task("guess"), 0, 500, lambda *_: "5", flat=0.02)
    assert len(made) == steps and "s left" in capsys.readouterr().out


@pytest.mark.parametrize("order", [lambda i: i // 50, lambda i: i % 10])  # sorted, or in turn
def test_an_evaluation_takes_questions_from_all_of_a_split(order):
    questions = [Question(i, {"subject": order(i)}, [i]) for i in range(500)]
    chosen = different(questions, 50)
    assert chosen == different(questions, 50)
    assert [question.index // 10 for question in chosen] == list(range(50))
    counts = Counter(question.item["subject"] for question in chosen)
    assert len(counts) == 10 and (order(9) or set(counts.values()) == {5})
    assert different(questions, 500) == different(questions, 999) == questions


LONG = [
    lambda n: np.arange(5000) == n + 2000, lambda n: torch.arange(5000) == n + 2000,
    lambda n: [0] * 5000 + [n], lambda n: [{"x": np.eye(99) * n}], lambda n: "x" * 5000 + str(n),
    lambda n: (0,) * 5000 + (n,), lambda n: {str(k): k * n for k in range(5000)}, lambda n: n / 7,
    lambda n: {(n, 1): 0}, lambda n: Fraction(n, 7), np.float64, lambda n: b"x" * 5000 + bytes([n]),
]  # fmt: skip


@pytest.mark.parametrize("of", LONG)
def test_questions_that_differ_anywhere_in_their_items_differ(of):
    questions = [Question(i, {"data": of(i % 5)}, [5, 6]) for i in range(10)]
    assert [question.index for question in different(questions)] == [0, 1, 2, 3, 4]


def test_gsm8ks_gold_is_right_with_and_without_work():
    for answer in ("9 * 2 = <<9*2=18>>18\n#### 18", "18"):
        item = {"question": "9 * 2?", "answer": answer}
        found = gsm8k.rewards(item, gsm8k.gold(item))
        assert found == {"correctness": 1.0, "format": 1.25, "looks_again": False}
