"""The engine's set-up: cores of each rank, and a process that is the only rank."""

import os
from types import SimpleNamespace

import pytest
import torch
from deepspeed.accelerator import cuda_accelerator

from grpo import engine, ranks
from grpo.options.gpu.nvidia import forget_pynvml


@pytest.mark.parametrize("environment, threads", [
    ({}, 4),
    ({"LOCAL_SIZE": "2"}, 2),  # deepspeed
    ({"LOCAL_WORLD_SIZE": "2"}, 2),  # torchrun
    ({"LOCAL_SIZE": "8"}, 1),
    ({"LOCAL_SIZE": "2", "OMP_NUM_THREADS": "1"}, 2),
    ({"LOCAL_SIZE": "2", "OMP_NUM_THREADS": "3"}, 3),  # as torch has read it
])  # fmt: skip
def test_ranks_share_the_cores(environment, threads, monkeypatch):
    for name in ("LOCAL_SIZE", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "sched_getaffinity", {0: range(4)}.get)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert engine.training_threads() == threads


SEVERAL = {"SLURM_STEP_NUM_TASKS": "2"}, {"OMPI_COMM_WORLD_SIZE": "2"}, {"PMI_SIZE": "2"}


@pytest.mark.parametrize("launched", [{"RANK": "1"}, *SEVERAL])
def test_only_a_process_that_nobody_launched_takes_itself_for_the_only_rank(monkeypatch, launched):
    """One of several that does not know its rank ends, unless mpi4py knows it."""
    whole = dict.fromkeys(ranks.NEEDED, "0") | launched
    for environment in (dict(whole), {"SLURM_STEP_NUM_TASKS": "1"}):
        monkeypatch.setattr(os, "environ", environment)
        ranks.stand_alone()
        assert environment == whole or environment["RANK"] == "0"
    monkeypatch.setattr(os, "environ", dict(launched))
    monkeypatch.setattr(ranks.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT: "):
        ranks.stand_alone()
    monkeypatch.setattr(ranks.importlib.util, "find_spec", {"mpi4py": "installed"}.get)
    ranks.stand_alone()
    assert os.environ == launched


@pytest.mark.parametrize("visible, free", [("0", 7), ("GPU-8932f937", 6), ("MIG-GPU-1/1/0", 6)])
def test_deepspeed_does_not_take_the_names_of_gpus_for_numbers(visible, free, monkeypatch):
    """int("GPU-8932f937") would fail in deepspeed.initialize, after the trials."""
    calls = {"nvmlDeviceGetMemoryInfo": lambda gpu: SimpleNamespace(free=7)}
    calls["nvmlDeviceGetHandleByIndex"] = lambda gpu: gpu
    monkeypatch.setattr(cuda_accelerator, "pynvml", SimpleNamespace(**calls))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    forget_pynvml(visible)
    cuda = cuda_accelerator.CUDA_Accelerator
    gpu = SimpleNamespace(total_memory=lambda _: 8, memory_allocated=lambda _: 2)
    gpu._get_nvml_gpu_id = lambda number: cuda._get_nvml_gpu_id(gpu, number)
    assert cuda.available_memory(gpu, 0) == free


def rates(schedule, steps, **changes):
    c = {"LEARNING_RATE": 2.0, "WARMUP_STEPS": 4, "STEPS": 14, "FINAL_LR": 0.5}
    c = SimpleNamespace(LR_SCHEDULE=schedule, **c | changes)
    return [engine.learning_rate(c, step) for step in steps]


def test_learning_rate_warms_up_and_decays():
    assert rates("linear", (1, 2, 4, 9, 14)) == [0.5, 1.0, 2.0, 1.5, 1.0]
    assert rates("linear", [1], WARMUP_STEPS=0)[0] <= 2.0
    cosine = rates("cosine", (1, 2, 4, 9, 14))
    assert cosine == pytest.approx([0.5, 1.0, 2.0, 1.5, 1.0])  # half of the way at the same step
    # Half of 1 - cos(45 degrees) of the way from 2 to 1 at a quarter of the decay
    assert rates("cosine", [6.5]) == pytest.approx([2 - (1 - 0.5**0.5) / 2])
    assert rates("linear", [6.5]) == [1.75]
