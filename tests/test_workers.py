"""Trainer, server and workers as processes: workers come and go, and sample the live policy."""

import json
import os
import re
import signal
import time
import urllib.request
from contextlib import contextmanager

import pytest
from processes import QUICK, command_of, kill, launch, records, reference_server, start, start_ranks

from grpo.proof import MISMATCH


@contextmanager
def worker(folder, name, preset):
    """Runs a worker while the block runs; -> (process, its log's path)."""
    path = folder / f"{name}.log"
    process = start(command_of("grpo_ref_split:worker", preset), path)
    try:
        yield process, path
    finally:
        process.kill()
        process.wait(10)


def wait_for(path, pattern, seconds=60):
    deadline = time.monotonic() + seconds
    while not re.search(pattern, path.read_text()):
        assert time.monotonic() < deadline, path.read_text()[-2000:]
        time.sleep(0.1)


def preset_of(tiny, folder, url, **changes):
    return (
        QUICK
        | {"MODEL": str(tiny), "TASK": "arithmetic", "REF_SERVER": url, "STEPS": 8}
        | {"RUN_DIR": str(folder / "run"), "MAX_PROMPT_TOKENS": 128, "PUBLISH_STEPS": 1}
        | changes
    )


def test_workers_come_and_go_and_the_reference_follows(tiny, tmp_path):
    with reference_server(tmp_path, tiny) as url:
        preset = preset_of(tiny, tmp_path, url, TRAINER_SAMPLES=False, REFERENCE_REFRESH_STEPS=3)
        other = preset | {"GROUP_SIZE": 3}
        with (
            worker(tmp_path, "first", preset) as (first, first_log),
            worker(tmp_path, "other", other) as (misfit, misfit_log),
        ):
            command = command_of("grpo_ref_split", preset)
            (trainer,) = start_ranks(1, command, tmp_path / "trainer.log")
            try:
                wait_for(first_log, r"policy [1-9]: \d+ groups", 120)
                os.kill(first.pid, signal.SIGKILL)  # with groups in hand
                with worker(tmp_path, "second", preset) as (second, second_log):
                    assert trainer.wait(120) == 0, (tmp_path / "trainer.log").read_text()[-3000:]
                    assert second.poll() is None
                assert misfit.wait(5) == 1
            finally:
                kill(trainer)
        stats = json.load(urllib.request.urlopen(f"{url}/stats"))
        info = json.load(urllib.request.urlopen(f"{url}/info"))
    assert "GROUP_SIZE is 3 here, 4 there" in misfit_log.read_text()
    steps = [r for r in records(tmp_path / "run") if "loss" in r]
    assert [r["step"] for r in steps] == list(range(1, 9))
    # just what was trained is done: 8 steps of 4 groups, none of them twice
    assert stats["done"] == 32 and stats["leased"] == 0
    assert sum(w["groups"] for w in stats["workers"].values()) >= 32
    assert all(r["staleness_max"] <= 4 for r in steps) and steps[-1]["staleness_max"] > 0
    assert steps[0][MISMATCH] < 1e-5 and steps[0]["kl"] < 1e-6
    assert steps[-1]["sampler_ratio"] != 1 and steps[-1]["sampler_ratio_max"] > 1
    assert info["weights"].endswith("@6")  # the reference is the policy of step 6
    proofs = re.findall(r"log-probs differ from the trainer's by (\S+)", second_log.read_text())
    assert proofs and all(float(gap) < 1e-5 for gap in proofs)
    samplers = {r["sampler"] for r in records(tmp_path / "run", "samples.jsonl")}
    assert samplers and "trainer" not in samplers


@pytest.mark.long
def test_two_ranks_and_a_worker_share_the_sampling_of_adapters(tiny, tmp_path):
    changes = {"LORA_RANK": 2, "LEARNING_RATE": 1e-2, "STEPS": 24, "PROMPTS_PER_STEP": 6}
    with reference_server(tmp_path, tiny) as url:
        preset = preset_of(tiny, tmp_path, url, **changes)
        with worker(tmp_path, "worker", preset | {"SAMPLE_BATCH": 4}) as (process, log):
            launch(2, command_of("grpo_ref_split", preset), tmp_path / "trainer.log")
            assert process.poll() is None, log.read_text()
    text = log.read_text()
    whole = (tiny / "model.safetensors").stat().st_size / 1e6
    sizes = [float(size) for size in re.findall(r": ([\d.]+) MB in", text)]
    assert sizes and max(sizes) < whole / 2  # adapters alone travel
    steps = [r for r in records(tmp_path / "run") if "loss" in r]
    assert len(steps) == 24 and steps[-1]["grad_norm"] > 1e-4
    assert all(r["groups_sampled"] == 6 for r in steps)
    assert any(0 < r["staleness"] for r in steps)  # some groups were the worker's, and older
    assert any(r["seconds_sample"] > 0 for r in steps)
