"""Where metrics go: TensorBoard, W&B and functions, the lines in place of a bar."""

import importlib.util
import math
import re
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from fakes import a_recipe

import grpo_ref_split as trainer
from grpo import report
from grpo.bad_step import log_idle
from grpo.metrics import peak_gb
from grpo.options.reporters import REPORTERS
from grpo.report import Bar, RunFolder
from grpo.run import Progress


def report_steps(folder, to, steps, progress):
    """Logs a record for each step, and an evaluation, as a run does that begins at `progress`."""
    constants = {"RUN_DIR": str(folder), "SEED": 7}
    house = RunFolder(folder, [REPORTERS[name](constants, progress) for name in to])
    for step in steps:
        record = {"step": step, "rewards/a/mean": step / 4, "kl": math.nan, "note": "a text"}
        house.log("metrics.jsonl", record)
    house.log("metrics.jsonl", {"step": steps[-1], "eval_accuracy": 0.5})
    house.log("samples.jsonl", {"step": steps[-1], "completion": "no metric"})
    for reporter in house.reporters:
        reporter.close()


def test_tensorboard_reads_what_was_reported_without_the_steps_that_were_undone(tmp_path, alone):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    report_steps(tmp_path, ["tensorboard"], [1, 2, 3, 4], Progress("run"))
    report_steps(tmp_path, ["tensorboard"], [3], Progress("run", step=2, saved=2))
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert sorted(events.Tags()["scalars"]) == ["eval_accuracy", "rewards/a/mean"]
    found = [(e.step, e.value) for e in events.Scalars("rewards/a/mean")]
    assert found == [(1, 0.25), (2, 0.5), (3, 0.75)]
    assert [e.step for e in events.Scalars("eval_accuracy")] == [3]


def test_wandb_offline_has_the_runs_name_constants_and_metrics(tmp_path, alone, monkeypatch):
    """Of the file's format only texts are read: the next test has the steps."""
    own = {"MODE": "offline", "SILENT": "true", "ERROR_REPORTING": "false"}
    own |= {"_SERVICE_WAIT": "600", "INIT_TIMEOUT": "600"}  # 30 and 90 s, on a busy machine too few
    for name, value in own.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    report_steps(tmp_path, ["wandb"], [1, 2], Progress("my run-1"))
    expected = {"my-run-1", "my run-1", "SEED", "rewards/a/mean", "eval_accuracy"}
    end, found = time.monotonic() + 600, set()
    while found != expected and time.monotonic() < end:  # W&B's process writes the file
        time.sleep(0.05)
        for path in tmp_path.glob("wandb/offline-run-*/run-*.wandb"):
            found = {text for text in expected if text.encode() in path.read_bytes()}
    assert found == expected


def test_a_missing_package_is_refused_before_anything_starts(monkeypatch, tmp_path):
    own = {"RUN_DIR": str(tmp_path), "MODEL": str(tmp_path / "none")}  # would be loaded next
    monkeypatch.setattr(importlib.util, "find_spec", {}.get)
    with pytest.raises(SystemExit, match=r"REPORT_TO = \['tensorboard'\] must be \[\]"):
        trainer.main(REPORT_TO=["tensorboard"], **own)


# --- The bar ------------------------------------------------------------------------
STEP = {"reward": 0.5, "accuracy": 0.25, "completions/mean_length": 80.0, "seconds": 2.0}


def test_in_a_file_steps_are_lines_ten_seconds_apart_and_the_last(monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr(report.time, "monotonic", lambda: now[0])
    bar = Bar(2, 9)
    for step in range(3, 10):
        bar.show(step, STEP | {"kl": math.nan if step == 3 else 0.01})
        now[0] += 6.0
    printed = capsys.readouterr()
    lines = [line[9:] for line in printed.out.splitlines()]  # without the time
    assert [line[:6] for line in lines] == ["step 3", "step 5", "step 7", "step 9"]
    assert all(fact in lines[0] for fact in ("+0.50", "0.25", "80", "2.0 s"))
    assert "kl" not in lines[0] and "kl 0.010" in lines[1] and printed.err == ""


def test_the_minutes_left_are_those_of_all_steps_and_evaluations(monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr(report.time, "monotonic", lambda: now[0])
    bar = Bar(2, 9)
    for step, (seconds, between) in enumerate([(120, 0), (600, 0), (60, 180)], start=3):
        now[0] += seconds + between  # an evaluation before the last of the three
        bar.show(step, STEP | {"seconds": seconds})
    found = re.findall(r"(\d+)\.0 s a step, (\d+) minutes left", capsys.readouterr().out)
    assert found == [("120", "12"), ("600", "30"), ("60", "21")]  # 6 x 2; 5 x 6; 4 x 5.33


def test_rewards_that_take_most_of_the_first_step_are_said(capsys):
    for seconds in (0.8, 1.2):
        report.give_hints({"seconds": 2.0, "seconds_reward": seconds})
    assert capsys.readouterr().out.count("async def rewards") == 1


def test_in_a_terminal_the_bar_is_rank_0s(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    (bar := Bar(0, 3)).show(1, STEP | {"tokens_per_second": 70.0})
    bar.close()
    monkeypatch.setenv("RANK", "1")
    assert Bar(0, 3).disable
    printed = capsys.readouterr()
    assert "1/3" in printed.err and "70 tokens/s" in printed.err and printed.out == ""


def test_memory_is_the_peak_since_the_update_before(monkeypatch):
    peaks = [2.5e9, 1e9]
    monkeypatch.setattr(torch.accelerator, "max_memory_allocated", lambda: peaks[0])
    monkeypatch.setattr(torch.accelerator, "reset_peak_memory_stats", lambda: peaks.pop(0))
    assert [peak_gb("cpu"), peak_gb("cuda"), peak_gb("cuda:1")] == [[], [2.5], [1.0]]


# --- The end --------------------------------------------------------------------------
@pytest.mark.parametrize("truncated, kept, masks, hint", [
    (1.0, 0, True, True), (1.0, 0, False, False), (0.9, 0, True, False), (0.9, 2, True, True),
])  # fmt: skip
def test_steps_without_an_untruncated_completion_name_the_constant_that_trains_on_them(
    capsys, truncated, kept, masks, hint
):
    recipe = a_recipe(MASK_TRUNCATED=masks)
    run = SimpleNamespace(c=recipe.c, recipe=recipe, progress=Progress("run", idle=1))
    metrics = {"completions/clipped_ratio": truncated, "groups_sampled": 3}
    log_idle(run, metrics, [None] * kept)
    assert "no completion had a reward" not in run.progress.idle_reason
    log_idle(run, metrics | {"rewards/none": 1}, [None] * kept)
    assert "no completion had a reward: rewards() returned None" in run.progress.idle_reason
    assert ("train on them: MASK_TRUNCATED = False" in capsys.readouterr().out) == hint
