"""tasks/gsm8k.py: the format that is rewarded, its prompt and its loader."""

import json
import re
from pathlib import Path

import pytest
from processes import python

from grpo.task import load_task
from tasks import gsm8k
from tasks.gsm8k import CORRECT, FORMATTED, WRONG, rewards

PAGE = Path(__file__).parents[1].joinpath("docs/tasks.md").read_text()
GSM8K = Path(__file__).resolve().parents[2] / "shared/data/gsm8k"


def formatted(completion):
    return rewards({"answer": "18"}, completion)["format"] == FORMATTED


FORMAT_RIGHT = [
    "<think>9 * 2</think><answer>18</answer>", "<think>9 * 2</think>\n\n<answer>18</answer>",
    "\n <think>\n9\n* 2\n</think> <answer>\n18\n</answer>\n",
    "<think>a < b > c</think><answer>18</answer>",
]  # fmt: skip


FORMAT_WRONG = [
    "", "18", "<answer>18</answer>", "<think>a</think>", "<think>a</think>18",
    "<think>a</think><answer>18", "<think>a<answer>18</answer>",
    "<answer>18</answer><think>a</think>", "<think>a<answer>18</answer></think>",
    "<think>a</think><answer><think>b</think>18</answer>",
    "<think>a</think><answer>18</answer><answer>18</answer>",
    "<think>a</think><answer>1</answer>2</answer>",
    "<think>a</think><think>b</think><answer>18</answer>",
    "<think>a</think> so <answer>18</answer>", "Sure! <think>a</think><answer>18</answer>",
    "<think>a</think><answer>18</answer> done", "<think>a</think><|im_end|><answer>18</answer>",
    "<THINK>a</THINK><answer>18</answer>",
]  # fmt: skip


def test_the_format_is_one_thought_and_one_answer():
    for completion in FORMAT_RIGHT + FORMAT_WRONG:
        assert formatted(completion) == (completion in FORMAT_RIGHT), completion


@pytest.mark.parametrize("text, again", [
    ("21 - 28 = -7. However, this makes no sense.", True), ("Wait, that is not 7.", True),
    ("= 7\nwait no", True), ("But wait: 7 is odd", True), ("Let me double-check it.", True),
    ("等等，不对，应该是 8", True), ("让我重新检查一遍", True),
    ("", False), ("He has to wait for 14 years.", False), ("The wait, in hours, is 7.", False),
    ("Let me check in", True), ("Waiting costs 5.", False), ("对", False),
])  # fmt: skip
def test_an_answer_that_looks_again_is_counted_and_not_rewarded(text, again):
    assert rewards({"answer": "18"}, text)["looks_again"] is again
    assert gsm8k.REWARD_WEIGHTS["looks_again"] == 0


def test_a_short_file_names_other_data_and_examples(monkeypatch, tmp_path):
    for name in ("DATA", "EXAMPLES"):
        monkeypatch.setattr(gsm8k, name, getattr(gsm8k, name))  # put back what the file sets
    (text,) = re.findall(r"```python\n(from tasks import gsm8k\n.*?)```", PAGE, re.DOTALL)
    item = {"question": "6 * 3?", "answer": "#### 18"}
    Path(tmp_path, "train.jsonl").write_text(json.dumps(item))
    Path(tmp_path, "mine.py").write_text(text.replace("my/gsm8k", str(tmp_path)))
    task = load_task(str(tmp_path / "mine.py"))
    assert task.load("train") == [item]
    (question, answer), *_ = gsm8k.EXAMPLES
    roles, texts = zip(*(turn.values() for turn in task.messages(item)), strict=True)
    assert roles == ("system", "user", "assistant", "user")
    assert texts == (gsm8k.SYSTEM_PROMPT, question, answer, "6 * 3?")
    right = {"correctness": CORRECT, "format": FORMATTED}
    assert right.items() <= task.rewards({"answer": "36"}, answer).items()


def test_importing_a_task_imports_neither_torch_nor_datasets_nor_sympy():
    code = "import sys, tasks.gsm8k, tasks.arithmetic, tasks.math;"
    code += "print({'torch', 'datasets', 'sympy'} & set(sys.modules))"
    assert python("-c", code).stdout.strip() == "set()"


@pytest.mark.skipif(not GSM8K.is_dir(), reason="the GSM8K folder is not beside the repository")
def test_every_gold_solution_of_gsm8k_is_right_and_its_neighbour_wrong(monkeypatch):
    monkeypatch.setattr(gsm8k, "DATA", str(GSM8K))
    items = gsm8k.load("train") + gsm8k.load("test")
    assert len(items) == 8792
    right = {"correctness": CORRECT, "format": FORMATTED}
    for item in items:
        assert rewards(item, item["answer"])["correctness"] == CORRECT, item
    for item in items[::50]:
        gold = item["answer"].rsplit("####", 1)[1].strip()
        other = int(gold.replace(",", "")) + 1
        tagged = {n: f"<think>a</think>\n<answer>{n}</answer>" for n in (gold, other)}
        assert right.items() <= rewards(item, tagged[gold]).items(), item
        assert rewards(item, tagged[other])["correctness"] == WRONG, item
        assert rewards(item, f"#### {other}")["correctness"] == WRONG, item
