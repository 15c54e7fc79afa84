"""The rewards of the tasks of earlier projects (docs/ancestors.md)."""

import pytest

from grpo.task import is_chat
from tasks import from_scratch, tldr


@pytest.mark.parametrize("text, correctness, tags", [
    ("<think>a</think><answer> 70,000 </answer>", 2.0, 4), ("<answer>70000</answer>", 1.5, 2),
    ("It is 70,000.", 1.5, 0), ("<answer>$70,000</answer>", 1.5, 2), ("<answer>7", 0.0, 1),
    ("<answer>70,000</answer> no, <answer>7</answer>", 0.0, 2), ("", 0.0, 0),
    ("<think><think></think>", 0.0, 2),
])  # fmt: skip
def test_from_scratch_rewards_the_golds_own_text_most_and_each_tag_once(text, correctness, tags):
    found = from_scratch.rewards({"answer": "35 * 2000\n#### 70,000"}, text)
    assert found == {"correctness": correctness, "format": pytest.approx(0.2 * tags)}


@pytest.mark.parametrize("text, length, near", [
    ("x" * 20, 0, True), ("x" * 25, -5, True), ("x" * 14, -6, False), ("", -20, False),
])  # fmt: skip
def test_tldr_rewards_the_length_of_a_summary(text, length, near):
    assert tldr.rewards({"prompt": "..."}, text) == {"length": length, "near": near}


@pytest.mark.parametrize("task", [from_scratch, tldr])
def test_their_prompts_are_chats(task):
    assert is_chat(task.messages({"question": "1 + 1?", "prompt": "A long post.", "answer": "2"}))
