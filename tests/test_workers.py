"""Trainer and workers as processes: workers come and go, and sample the live policy."""

import re
import statistics
import time
from contextlib import contextmanager

from processes import (
    QUICK,
    command_of,
    free_port,
    kill,
    records,
    start,
    start_ranks,
    wait_for_step,
)

from grpo.proof import MISMATCH


@contextmanager
def worker(folder, name, preset):
    """Runs a worker while the block runs; -> (process, its log's path)."""
    path = folder / f"{name}.log"
    process = start(command_of("grpo_ref_split:worker", preset), path, OMP_NUM_THREADS="1")
    try:
        yield process, path
    finally:
        kill(process)


def wait_for(path, pattern, seconds=60):
    deadline = time.monotonic() + seconds
    while not re.search(pattern, path.read_text()):
        assert time.monotonic() < deadline, path.read_text()[-2000:]
        time.sleep(0.1)


def preset_of(tiny, folder, **changes):
    own = {"MODEL": str(tiny), "TASK": "even", "REF_SERVER": None, "PUBLISH_STEPS": 1}
    own |= {"TRAINER": f"http://127.0.0.1:{free_port()}", "TRAINER_SAMPLES": False}
    own |= {"RUN_DIR": str(folder / "run"), "MAX_PROMPT_TOKENS": 128, "EVAL_STEPS": 0}
    return QUICK | own | changes


def steps_of(folder):
    return [r for r in records(folder / "run") if "loss" in r]


def test_workers_come_and_go_and_find_a_trainer_that_resumes(tiny, tmp_path):
    """kill -9 of the first worker, with groups in hand, and of the trainer, a step after its
    checkpoint. A worker is fast here, and its groups are of the policy before the newest."""
    preset = preset_of(tiny, tmp_path, STEPS=16, SAVE_STEPS=4, REFERENCE_REFRESH_STEPS=3)
    log, command = tmp_path / "trainer.log", command_of("grpo_ref_split", preset)
    with (
        worker(tmp_path, "first", preset) as (first, first_log),
        worker(tmp_path, "other", preset | {"GROUP_SIZE": 3}) as (misfit, misfit_log),
    ):
        (trainer,) = start_ranks(1, command, log)
        try:
            wait_for(first_log, r"policy [1-9]: \d+ groups")
            with worker(tmp_path, "second", preset) as (second, second_log):
                wait_for(second_log, r"policy \d+: \d+ groups")
                kill(first)
                wait_for_step(tmp_path / "run", 9, trainer, log)
                kill(trainer)
                before = len(steps_of(tmp_path))
                (trainer,) = start_ranks(1, command, log)
                assert trainer.wait(120) == 0, log.read_text()[-3000:]
                assert second.poll() is None, second_log.read_text()
            assert misfit.wait(5) == 1 and "GROUP_SIZE" in misfit_log.read_text()
        finally:
            kill(trainer)
    steps = steps_of(tmp_path)
    assert before >= 9 and [r["step"] for r in steps] == list(range(1, 17))
    assert steps[0][MISMATCH] < 1e-5 and steps[0]["kl"] < 1e-6
    old = [r for r in steps if r["staleness_max"] > 0]  # sampled by a policy before the newest
    assert any(r["sampler_ratio"] != 1 and r["sampler_ratio_max"] > 1 for r in old)
    # alone, the second worker may have waited with groups of a step that was undone
    assert max(r["staleness_max"] for r in steps) <= 4
    assert 0 < statistics.mean(r["staleness"] for r in steps) < 1.5
    proofs = re.findall(r"log-probs differ from the trainer's by (\S+)", second_log.read_text())
    assert proofs and all(float(gap) < 1e-5 for gap in proofs)
    samplers = {r["sampler"] for r in records(tmp_path / "run", "samples.jsonl")}
    assert samplers and "trainer" not in samplers
    assert not (tmp_path / "run/.policy").exists()
