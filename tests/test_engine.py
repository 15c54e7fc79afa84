"""The engine's set-up: cores of each rank, and a process that is the only rank."""

import os
from types import SimpleNamespace

import pytest
import torch

from grpo import engine, ranks


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


def test_a_process_without_a_rank_is_the_only_one(monkeypatch):
    for before in ({"RANK": "1"}, {}):
        monkeypatch.setattr(os, "environ", environment := dict(before))
        ranks.stand_alone()
        assert environment["RANK"] == before.get("RANK", "0")
        assert ("MASTER_ADDR" in environment) == (not before)


def rates(*steps, **changes):
    c = {"LEARNING_RATE": 2.0, "WARMUP_STEPS": 4, "STEPS": 14, "FINAL_LR": 0.5}
    c = SimpleNamespace(**c | changes)
    return [engine.learning_rate(c, step) for step in steps]


def test_learning_rate_warms_up_and_decays():
    assert rates(1, 2, 4, 6.5, 9, 14) == [0.5, 1.0, 2.0, 1.75, 1.5, 1.0]
    assert rates(1, WARMUP_STEPS=0)[0] <= 2.0
