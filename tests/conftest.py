"""What the tests share: one thread, no network, and a tiny model in Hugging Face format."""

import os
import sys
import time
from types import SimpleNamespace

os.environ["OMP_NUM_THREADS"] = "1"  # before torch; the processes that tests start inherit both
os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
from tiny import make_tiny

from grpo import constants

torch.set_num_threads(1)
# so that their asserts, too, say what the values were
HELPERS = "documents fakes families helpers oracle rank_threads trainer_side"
pytest.register_assert_rewrite(*HELPERS.split())


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    return make_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(autouse=True)
def settled(monkeypatch):
    """Puts back what a main() in the test has set, before monkeypatch puts back its own."""
    yield
    for name in ("grpo_ref_split", "ref_server"):
        if script := sys.modules.get(name):
            vars(script).update(vars(script).pop(constants.UNDO, {}))


@pytest.fixture
def no_pause(monkeypatch):
    """Of waits alone: other threads sleep, too."""
    from grpo import stop as stop_module

    fake = SimpleNamespace(sleep=lambda seconds: None, monotonic=time.monotonic)
    monkeypatch.setattr(stop_module, "time", fake)


@pytest.fixture
def alone(monkeypatch):
    """One rank, and constants of a small run."""
    from fakes import GSIZE

    import grpo_ref_split as trainer

    gather = {"all_gather_object": lambda everyone, mine: everyone.__setitem__(0, mine)}
    dist = {"get_rank": lambda: 0, "get_world_size": lambda: 1, "all_reduce": lambda *_, **__: None}
    for name, function in {**dist, **gather, "barrier": lambda: None}.items():
        monkeypatch.setattr(trainer.dist, name, function)
    small = {"PROMPTS_PER_STEP": 3, "GROUP_SIZE": GSIZE, "WAIT_LIMIT_SECONDS": 1}
    for name, value in small.items():
        monkeypatch.setattr(trainer, name, value)
