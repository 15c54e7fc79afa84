"""The tasks of earlier projects (docs/ancestors.md): their rewards, and that they train."""

import json

import pytest
from processes import QUICK, command_of, launch, learned

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


TASK = """
from tasks import gsm8k, tldr

gsm8k.DATA = tldr.DATA = {data!r}
from tasks.{name} import *
"""


def test_each_task_trains_two_steps(tiny, tmp_path):
    items = [{"prompt": f"{n}. TL;DR:", "question": f"{n} + 1?", "answer": f"#### {n + 1}"}
             for n in range(8)]  # fmt: skip
    for split in ("train", "test"):
        lines = "".join(json.dumps(item) + "\n" for item in items)
        (tmp_path / f"{split}.jsonl").write_text(lines)
    shared = QUICK | {"MODEL": str(tiny), "REF_SERVER": None, "KL_BETA": 0, "STEPS": 2}
    shared |= {"MAX_PROMPT_TOKENS": 200, "EVAL_STEPS": 0, "CPU_THREADS": 1}
    simple_grpo = {"REWARD_WEIGHTS": {"correctness": 1, "format": 1, "looks_again": 0}}
    presets = {}
    for name, own in {"tldr": {}, "from_scratch": {}, "gsm8k": simple_grpo}.items():
        task = tmp_path / f"{name}.py"
        task.write_text(TASK.format(data=str(tmp_path), name=name))
        presets[name] = shared | {"TASK": str(task), "RUN_DIR": str(tmp_path / name)} | own
    launch(1, command_of("grpo_ref_split", *presets.values()), tmp_path / "log")
    rewards = {"tldr": "length", "from_scratch": "format", "gsm8k": "looks_again"}
    for name, reward in rewards.items():
        steps = learned(tmp_path / name)
        assert [r["step"] for r in steps] == [1, 2], name
        assert f"rewards/{reward}/mean" in steps[0], name
    assert all(r["grad_norm"] > 0 for r in learned(tmp_path / "tldr"))  # lengths differ by chance
