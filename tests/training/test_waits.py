"""Ranks that wait for one another: while something moves, and not for ever for one that is gone."""

import os
import signal
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from processes import NURSERY

import grpo_ref_split as trainer
from demo import free_port
from grpo.training import exchange, liveness

LIMIT = 2  # seconds of WAIT_LIMIT_SECONDS here; the process group's own limit is the same


def join(rank, port):
    os.environ["RANK"] = str(rank)
    store = dist.TCPStore("127.0.0.1", int(port), 2, rank == 0, timeout=timedelta(seconds=60))
    store.set(f"here/{rank}", "")
    store.wait(["here/0", "here/1"])  # to start may take one longer than the limit
    group = {"store": store, "rank": rank, "world_size": 2}
    dist.init_process_group("gloo", timeout=timedelta(seconds=LIMIT), **group)


def run(function, *arguments):
    """-> the exit codes of two ranks that ran function(rank, *arguments), and how long it took."""
    began, port = time.monotonic(), free_port()
    ranks = [
        NURSERY.Process(target=function, args=(rank, port, *arguments), daemon=True)
        for rank in range(2)
    ]
    try:
        for process in ranks:
            process.start()
        while time.monotonic() < began + 60 and all(p.exitcode is None for p in ranks):
            time.sleep(0.05)  # until one has ended
        seconds = time.monotonic() - began
        for process in ranks:
            process.join(2 * LIMIT)
        return [process.exitcode for process in ranks], seconds
    finally:
        for process in ranks:
            process.kill()


def from_a_slow_worker(rank, port):
    """A group every LIMIT / 2 seconds, four of them: rank 0 never waits LIMIT for one."""
    join(rank, port)
    server = SimpleNamespace(url="http://server", stats=dict)
    inbox = exchange.Inbox(server, "run", LIMIT) if rank == 0 else None

    def fetch(number, patience):
        time.sleep(LIMIT / 2)
        inbox.groups[f"{len(inbox.groups)}-{time.monotonic()}"] = SimpleNamespace(policy_version=1)
        return True

    if inbox:
        inbox.fetch = fetch
    groups = exchange.take_workers_groups(inbox, 4, oldest=0, wait=True)
    assert len(groups) == 4


def by_one_rank_that_samples_long(rank, port):
    join(rank, port)
    liveness.Heartbeats(rank, 2, LIMIT)  # it lives, and so it is waited for
    time.sleep(2 * LIMIT * rank)
    assert exchange.gather_groups([]) == []


@pytest.mark.parametrize("wait", [from_a_slow_worker, by_one_rank_that_samples_long])
def test_a_wait_that_moves_outlives_the_limit_of_the_process_group(wait):
    codes, seconds = run(wait)
    assert codes == [0, 0] and seconds > 2 * LIMIT


def with_one_that_stops(rank, port, gone, log):
    """Like a machine that is gone: its connections stay open, and nothing answers."""
    with open(log, "a") as output:
        os.dup2(output.fileno(), 2)
    join(rank, port)
    liveness.Heartbeats(rank, 2, LIMIT)
    liveness.meet("both")
    if rank == gone:
        os.kill(os.getpid(), signal.SIGSTOP)
    liveness.meet("the other")


@pytest.mark.parametrize("gone", [0, 1])
def test_a_rank_that_is_gone_ends_the_one_that_waits_for_it(gone, tmp_path):
    codes, seconds = run(with_one_that_stops, gone, tmp_path / "log")
    assert codes[gone] is None and codes[1 - gone] == 1  # liveness.leave
    assert seconds < 10 * LIMIT
    assert f"rank {1 - gone}: rank {gone} " in (tmp_path / "log").read_text()


def with_one_that_is_killed(rank, port, gone, log):
    with open(log, "a") as output:
        os.dup2(output.fileno(), 2)
    join(rank, port)
    liveness.LOOK_SECONDS = 0.2
    liveness.Heartbeats(rank, 2, 600)  # the limit is for those of which nothing is known
    liveness.meet("both")
    if rank == gone:
        os.kill(os.getpid(), signal.SIGKILL)
    liveness.meet("the other")


@pytest.mark.parametrize("gone", [0, 1])
def test_a_rank_whose_process_has_ended_ends_the_other_without_a_launcher(gone, tmp_path):
    """In a meeting no connection breaks when it is rank 1 that ends."""
    codes, _ = run(with_one_that_is_killed, gone, tmp_path / "log")
    assert codes[gone] == -signal.SIGKILL and codes[1 - gone] == 1
    if gone == 1:  # without rank 0 there is no store to ask
        assert "the process of rank 1 has ended" in (tmp_path / "log").read_text()


def test_a_collective_that_fails_says_what_to_do_and_other_errors_stay_as_they_are():
    for lost in (dist.DistNetworkError("reset by peer"), RuntimeError("[gloo/pair.cc] closed")):
        with pytest.raises(RuntimeError, match="start all ranks again"), liveness.explained():
            raise lost
    with pytest.raises(RuntimeError, match="^out of memory$"), liveness.explained():
        raise RuntimeError("out of memory")


def test_a_wait_for_ranks_names_those_that_are_missing(monkeypatch, capsys):
    class Store(dict):
        __call__ = clone = lambda self: self
        __hash__ = object.__hash__

        def add(self, key, number):
            now[0] += 6 if (key, number) == ("meeting/arrivals", 0) else 0
            self[key] = self.get(key, 0) + number
            return 3 if now[0] > 60 else self[key]

    now = [0.0]
    monkeypatch.setattr(liveness.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(liveness.time, "sleep", lambda _: None)
    monkeypatch.setattr(liveness.distributed_c10d, "_get_default_store", Store({"meeting/2": 1}))
    monkeypatch.setattr(liveness.dist, "get_world_size", lambda: 3)
    monkeypatch.setattr(liveness.dist, "get_rank", lambda: 0)
    liveness.meet("the others' groups")
    assert "waiting for the others' groups since 12 s: not here yet is rank 1" in (
        capsys.readouterr().err
    )


def test_ranks_join_before_they_load_the_model_and_meet_before_the_end(monkeypatch, tmp_path):
    """A model may be here on one machine and be downloaded on another; and rank 0 may publish."""
    order = []

    def noted(name, result=None):
        return lambda *_, **__: order.append(name) or result

    run, lock = SimpleNamespace(inbox=None, laps=[]), SimpleNamespace(close=lambda: None)
    run.progress = SimpleNamespace(run="run", idle=0, step=1)
    run.constants = SimpleNamespace(IDLE_LIMIT=10, RUN_DIR=str(tmp_path))
    run.folder = SimpleNamespace(reporters=[])
    checkpoint = {"check_run_dir": noted("look"), "leads": noted("lead", True)}
    checkpoint["lock_run"] = noted("lock", lock)
    recipe = SimpleNamespace(task=None, prompts=[])
    fakes = {
        "RUN_DIR": str(tmp_path),
        "watch_launcher": noted("watch"),
        "prepare": noted("prepare", (None, recipe, None)),
        "load_questions": noted("questions", []),
        "join_ranks": noted("join"),
        "Heartbeats": noted("beat", SimpleNamespace(stop=noted("stop beating"))),
        "checkpoint": SimpleNamespace(**checkpoint),
        "start_run": noted("model", run),
        "train": noted("train", False),
        "meet": noted("meet"),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(trainer, name, fake)
    calls = {"get_rank": 0, "get_world_size": 1, "barrier": None, "destroy_process_group": None}
    for name, result in calls.items():
        monkeypatch.setattr(trainer.dist, name, noted(name, result))
    trainer.main()
    assert order.index("join") < order.index("beat") < order.index("model")
    end = ["train", "meet", "stop beating", "barrier", "destroy_process_group"]
    assert [name for name in order if name in end][-5:] == end
