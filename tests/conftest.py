"""What the tests share: one thread, no network, and a tiny model in Hugging Face format."""

import gc
import itertools
import os
import sys
import time
from types import SimpleNamespace

os.environ["OMP_NUM_THREADS"] = "1"  # before torch; the processes that tests start inherit both
os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
from tiny import make_tiny
from transformers import AutoTokenizer

torch.set_num_threads(1)
# so that their asserts, too, show the values
HELPERS = "documents fakes families helpers oracle rank_threads trainer_side"
pytest.register_assert_rewrite(*HELPERS.split())


@pytest.hookimpl(trylast=True)  # after -m and -k
def pytest_collection_modifyitems(items):
    """Deals the long tests out, as xdist gives each worker a part of the list, in order."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    long = [item for item in items if item.get_closest_marker("long")]
    rest = [item for item in items if not item.get_closest_marker("long")]
    size = -(-len(rest) // workers)
    parts = [long[i::workers] + rest[i * size : (i + 1) * size] for i in range(workers)]
    items[:] = itertools.chain(*parts)


def pytest_collection_finish():
    """Leaves the imported libraries out of the collections that `measured` and others make, each
    half a second."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish():
    gc.unfreeze()  # or extensions report leaks as Python ends


@pytest.fixture(autouse=True)
def no_process_is_left():
    """Of those that a test has started by processes.py."""
    yield
    if processes := sys.modules.get("processes"):
        processes.end_all()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    return make_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def tokenizer(tiny):
    """-> the tiny model's, a new one, which may be changed."""
    return AutoTokenizer.from_pretrained(tiny)


@pytest.fixture(scope="module")
def model_of():
    """-> a family's name -> its tiny model, made once."""
    from families import tiny_model

    made = {}
    return lambda family: made.setdefault(family, tiny_model(family))


@pytest.fixture
def no_pause(monkeypatch):
    """Of waits alone: other threads sleep, too."""
    fake = SimpleNamespace(sleep=lambda seconds: None, monotonic=time.monotonic)
    monkeypatch.setattr("grpo.client.time", fake)


@pytest.fixture
def alone(monkeypatch):
    gather = {"all_gather_object": lambda everyone, mine: everyone.__setitem__(0, mine)}
    dist = {"get_rank": lambda: 0, "get_world_size": lambda: 1, "all_reduce": lambda *_, **__: None}
    for name, function in {**dist, **gather, "barrier": lambda: None}.items():
        monkeypatch.setattr(torch.distributed, name, function)
