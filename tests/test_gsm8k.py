"""tasks/gsm8k.py: the format that is rewarded, its prompt and its loader."""

import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

from tasks import arithmetic, gsm8k
from tasks.gsm8k import CORRECT, FORMATTED, UNFORMATTED, WRONG, rewards

# --- Format ------------------------------------------------------------------------
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


def trained(item, completion):
    """-> the rewards that are trained on."""
    return {k: v for k, v in rewards(item, completion).items() if k in arithmetic.REWARD_WEIGHTS}


def test_the_two_rewards_are_apart():
    item = {"question": "9 * 2?", "answer": "#### 18"}
    good, bad = "<think>a</think><answer>18</answer>", "<think>a</think><answer>17</answer>"
    assert trained(item, good) == {"correctness": CORRECT, "format": FORMATTED}
    assert trained(item, bad) == {"correctness": WRONG, "format": FORMATTED}
    assert trained(item, "18") == {"correctness": CORRECT, "format": UNFORMATTED}
    assert trained(item, "17") == {"correctness": WRONG, "format": UNFORMATTED}
    assert (CORRECT, WRONG, FORMATTED, UNFORMATTED) == (1.0, -1.0, 1.25, -1.0)


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


# --- Data, and the file itself -----------------------------------------------------
def test_load_reads_the_hubs_main_data(monkeypatch):
    def load_dataset(name, config, split):
        assert (name, config, split) == ("openai/gsm8k", "main", "train")
        return iter([{"question": "9 * 2?"}])

    fake = types.SimpleNamespace(load_dataset=load_dataset)
    monkeypatch.setitem(sys.modules, "datasets", fake)
    monkeypatch.setattr(gsm8k, "DATA", "openai/gsm8k")
    assert gsm8k.load("train") == [{"question": "9 * 2?"}]


def test_messages_ask_for_the_format_that_is_rewarded():
    system, user = gsm8k.messages({"question": "9 * 2?"})
    assert user == {"role": "user", "content": "9 * 2?"}
    assert re.findall(r"</?\w+>", system["content"])[:4] == [
        "<think>",
        "</think>",
        "<answer>",
        "</answer>",
    ]


def test_importing_a_task_imports_neither_torch_nor_datasets_nor_sympy():
    code = "import sys, tasks.gsm8k, tasks.arithmetic, tasks.math;"
    code += "print({'torch', 'datasets', 'sympy'} & set(sys.modules))"
    root = Path(gsm8k.__file__).resolve().parents[1]
    shown = subprocess.run(
        [sys.executable, "-c", code], cwd=root, check=True, stdout=subprocess.PIPE
    )
    assert shown.stdout.strip() == b"set()"


@pytest.mark.skipif(not GSM8K.is_dir(), reason="the GSM8K folder is not beside the repository")
def test_every_gold_solution_of_gsm8k_is_right_and_its_neighbour_wrong(monkeypatch):
    monkeypatch.setattr(gsm8k, "DATA", str(GSM8K))
    items = gsm8k.load("train") + gsm8k.load("test")
    assert len(items) == 8792
    for item in items[::10]:
        assert trained(item, gsm8k.gold(item)) == {"correctness": CORRECT, "format": FORMATTED}
    for item in items:
        gold = item["answer"].rsplit("####", 1)[1].strip()
        other = int(gold.replace(",", "")) + 1
        tagged = {n: f"<think>a</think>\n<answer>{n}</answer>" for n in (gold, other)}
        right = {"correctness": CORRECT, "format": FORMATTED}
        assert rewards(item, item["answer"])["correctness"] == CORRECT, item
        assert trained(item, tagged[gold]) == right, item
        assert rewards(item, tagged[other])["correctness"] == WRONG, item
        assert rewards(item, f"#### {other}")["correctness"] == WRONG, item
