"""What the tests share: one thread, no network, and a tiny model in Hugging Face format."""

import os
import time
from types import SimpleNamespace

os.environ["OMP_NUM_THREADS"] = "1"  # before torch; the processes that tests start inherit both
os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
from tiny import make_tiny

torch.set_num_threads(1)
# so that their asserts, too, say what the values were
pytest.register_assert_rewrite("documents", "fakes", "families", "helpers", "oracle")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    return make_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def no_pause(monkeypatch):
    """Of waits alone: other threads sleep, too."""
    from grpo import stop as stop_module

    fake = SimpleNamespace(sleep=lambda seconds: None, monotonic=time.monotonic)
    monkeypatch.setattr(stop_module, "time", fake)


@pytest.fixture
def store(tmp_path):
    from grpo.serving.store import Store

    store = Store(tmp_path / "store.sqlite", max_bytes=100_000)
    yield store
    store.db.close()


@pytest.fixture
def alone(monkeypatch):
    """One rank, and constants of a small run."""
    from fakes import GSIZE

    import grpo_ref_split as trainer
    from grpo.training import exchange as exchange_module
    from grpo.training import liveness as watch

    gather = {"all_gather_object": lambda everyone, mine: everyone.__setitem__(0, mine)}
    dist = {"get_rank": lambda: 0, "get_world_size": lambda: 1, "all_reduce": lambda *_, **__: None}
    monkeypatch.setattr(exchange_module, "meet", lambda what: None)
    monkeypatch.setattr(watch, "meet", lambda what: None)
    for name, function in {
        **dist,
        **gather,
        "broadcast_object_list": lambda box, src: None,
    }.items():
        monkeypatch.setattr(trainer.dist, name, function)
    constants = {"PROMPTS_PER_STEP": 3, "GROUP_SIZE": GSIZE, "WAIT_LIMIT_SECONDS": 1}
    for name, value in constants.items():
        monkeypatch.setattr(trainer, name, value)


@pytest.fixture
def server(tmp_path):
    """-> a client of the real store and routes; every upload is scored at once."""
    from helpers import FakeReference, InProcess

    from grpo.serving.policies import Policies
    from grpo.serving.store import Store
    from grpo.training import metrics as report
    from grpo.training.exchange import Inbox, ReferenceLogps
    from grpo.wire import pack_group, unpack_group
    from ref_server import make_app

    store = Store(tmp_path / "store.sqlite", 10**6)
    hub = Policies(store, tmp_path / "policies", 10**6)
    settings = {"token": None, "max_body_bytes": 10**6, "lease_seconds": 60, "lease_wait": 0}
    app = make_app(store, hub, FakeReference(), **settings)

    def score():
        for seq, body in store.waiting(99, 0):
            group = unpack_group(body)
            group.ref_logps = -torch.ones(len(group.completion_ids))
            store.scored({seq: pack_group(group)})

    client = InProcess(app, limit=1, after=score)
    client.store, client.hub = store, hub
    client.inbox = Inbox(client, "run", 1)
    client.reference = ReferenceLogps(client.inbox, report.Clock())
    yield client
    store.db.close()
