"""main() in separate processes: two in one process, and a run that ends by an error."""

import json
import os
from pathlib import Path

import pytest
from fakes import tiny_policy
from processes import PATIENCE, QUICK, command_of, launch, learned, records, start_ranks

import grpo_ref_split as trainer
from grpo.report import as_json

SMALL = QUICK | {"MAX_PROMPT_TOKENS": 64, "EVAL_STEPS": 0, "REF_SERVER": None}
TASK = "from tasks.even import load, messages\n"
WEIGHED = """
REWARD_WEIGHTS = {"a": 2.0, "b": 1.0}
OUTCOME = "b"

def rewards(item, completion):
    return {"a": len(completion) % 2, "b": 1.0}
"""
PLAIN = """
def rewards(item, completion):
    return len(completion) % 2
"""
BROKEN = """
import os
from pathlib import Path

calls = 0

def rewards(item, completion):
    global calls
    calls += 1
    here = os.environ.get("RANK", "0") == "0"
    if calls > LIMIT and here and not Path(__file__).with_name("mended").exists():
        raise ZeroDivisionError("the judge is broken")
    return float(len(completion) % 2)
"""


def task_of(folder, name, text):
    path = folder / f"{name}.py"
    path.write_text(TASK + text)
    return str(path)


def test_a_second_main_in_a_process_has_nothing_of_the_first(tiny, tmp_path):
    """It had the first one's REWARD_WEIGHTS, OUTCOME, sizes and preset."""
    shared = {k: v for k, v in SMALL.items() if k not in ("SAMPLE_BATCH", "MICRO_BATCH_TOKENS")}
    shared |= {"MODEL": str(tiny), "STEPS": 1, "PROMPTS_PER_STEP": 1}
    first = {"GROUP_SIZE": 80, "SAMPLE_BATCH": 80, "KL_BETA": 0, "TEMPERATURE": 0.9, "LORA_RANK": 4}
    presets = [
        shared | {"TASK": task_of(tmp_path, name, text), "RUN_DIR": str(tmp_path / name)} | own
        for name, text, own in (("weighed", WEIGHED, first), ("plain", PLAIN, {}))
    ]
    unsaved = presets[1] | {"SAVE_STEPS": 0, "RUN_DIR": str(tmp_path / "unsaved")}
    launch(1, command_of("grpo_ref_split", *presets, unsaved), tmp_path / "log")
    kept = {path.name for path in (tmp_path / "unsaved").iterdir()}
    assert kept == {".lock", ".stopped", "run.json", "metrics.jsonl", "samples.jsonl"}
    uses = [
        json.loads(Path(preset["RUN_DIR"], "run.json").read_text())["uses"] for preset in presets
    ]
    threads = len(os.sched_getaffinity(0))
    assert uses[1] == {
        "ranks": 1,
        "device": f"cpu, {threads} CPU threads a rank",
        "dtype": "float32",
        "sampler": "torch, CachedDecoder",
        "attention": "packed, in buckets",
        "loss": "in chunks, by torch",
        "reference": "a copy of MODEL",
    }
    assert uses[0] == uses[1] | {"reference": "none", "dtype": "float32, LoRA of rank 4"}
    line = "; ".join(f"{name}: {what}" for name, what in uses[1].items())
    assert line in (tmp_path / "log").read_text()
    task = {"REWARD_WEIGHTS": {"a": 2.0, "b": 1.0}, "OUTCOME": "b"}
    none = {"REWARD_WEIGHTS": {"reward": 1.0}, "OUTCOME": "reward"}
    for preset, own in zip(presets, (task, none), strict=True):
        state = json.loads(Path(preset["RUN_DIR"], "final/trainer/state.json").read_text())
        assert state["constants"] == as_json(trainer.DEFAULTS | preset | own)
    (step,) = learned(tmp_path / "plain")
    assert "rewards/reward/mean" in step and "rewards/a/mean" not in step and "kl" in step


def test_a_teacher_alone_teaches_without_rewards_and_groups(tiny, tmp_path):
    """On-policy distillation in one process; its KL falls, and the outcome is evaluated."""
    teacher = tiny_policy(tiny, drift=0.1)
    teacher.save(tmp_path / "teacher")
    preset = SMALL | {"MODEL": str(tiny), "TASK": "even", "RUN_DIR": str(tmp_path / "run")}
    preset |= {"REFERENCE": str(tmp_path / "teacher"), "REWARD_WEIGHTS": {}, "GROUP_SIZE": 1}
    preset |= {"KL_BETA": 1.0, "UNBIASED_KL": True, "LOSS_TYPE": "dapo", "LEARNING_RATE": 5e-3}
    preset |= {"PROMPTS_PER_STEP": 32, "SAMPLE_BATCH": 32, "STEPS": 16, "EVAL_STEPS": 16}
    log = tmp_path / "log"
    launch(1, command_of("grpo_ref_split", preset), log)
    text = log.read_text()
    assert "a teacher, not MODEL: " in text and "the first update agree" in text
    steps = learned(tmp_path / "run")
    assert all(r["reward"] == 0 and "accuracy" in r and "rewards/format/mean" in r for r in steps)
    first, last = (sum(r["teacher_kl"] for r in part) for part in (steps[:4], steps[-4:]))
    assert 0 < last < 0.9 * first  # measured: 0.85
    assert "eval_accuracy" in [r for r in records(tmp_path / "run") if "loss" not in r][-1]


@pytest.mark.long
def test_an_error_on_one_of_two_ranks_ends_both_and_both_save_and_resume(tiny, tmp_path):
    """Only rank 0's judge breaks, after the empty completion, the gold answer and two steps of 8
    completions: the other rank has nothing to raise, and takes part."""
    log, folder = tmp_path / "log", tmp_path / "run"
    task = task_of(tmp_path, "task", BROKEN.replace("LIMIT", str(2 + 2 * 8 + 5)))
    preset = SMALL | {"MODEL": str(tiny), "TASK": task, "RUN_DIR": str(folder), "STEPS": 4}
    command = command_of("grpo_ref_split", preset)
    ranks = start_ranks(2, command, log)
    assert [rank.wait(PATIENCE) for rank in ranks] == [1, 1]
    assert "ZeroDivisionError" in log.read_text()
    assert [path.name for path in folder.glob("step_*")] == ["step_000002"]
    assert not os.path.lexists(folder / "final")
    trainer_folder = folder / "step_000002/trainer"
    assert {"optimizer_0.pt", "optimizer_1.pt"} < {path.name for path in trainer_folder.iterdir()}
    (tmp_path / "mended").touch()
    whole = preset | {"RUN_DIR": str(tmp_path / "whole")}
    launch(2, command_of("grpo_ref_split", preset, whole), tmp_path / "log_2")
    assert os.readlink(folder / "final") == "step_000004"
    assert [r["step"] for r in records(folder) if "loss" in r] == [1, 2, 3, 4]
    # The step that failed is made again, as if nothing had happened
    assert learned(folder) == learned(tmp_path / "whole")
