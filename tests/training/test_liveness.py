"""Signals, ranks that are not heard of, launchers that are gone."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from grpo import stop as stop_module
from grpo.training import liveness
from grpo.training.liveness import Heartbeats

# --- Signals -----------------------------------------------------------------------
ROOT = Path(__file__).parent.parent.parent

LISTENS = """
import hashlib, sys
from grpo import stop

stop.STOP_SECONDS, wait = 1, stop.Wait("the server", 600)
with stop.stop.listening():
    print("listening", flush=True)
    if sys.argv[1] == "compute":  # as in a collective: no handler in Python would run meanwhile
        hashlib.pbkdf2_hmac("sha256", b"", b"", 2 * 10**9)
    while True:
        wait.turn("it is down")
"""


@contextlib.contextmanager
def listener(doing):
    words = [sys.executable, "-c", LISTENS, doing]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(words, cwd=ROOT, text=True, **pipes) as process:
        try:
            assert process.stdout.readline() == "listening\n"
            yield process
        finally:
            process.kill()


def test_a_second_ctrl_c_ends_a_trainer_at_once_but_not_that_which_deepspeed_adds():
    with listener("compute") as process:
        process.send_signal(signal.SIGINT)
        assert "SIGINT: this step is finished and saved" in process.stdout.readline()
        for end in (signal.SIGINT, signal.SIGTERM):
            process.send_signal(end)
        time.sleep(stop_module.AGAIN_SECONDS + 0.5)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 1
        assert "a second SIGINT: ended" in process.stdout.read()


def test_a_trainer_that_is_asked_to_end_does_not_wait_for_a_server_that_is_down():
    with listener("wait") as process:
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 1
        assert "the step can't be finished without the server: it is down" in process.stdout.read()


# --- Ranks -------------------------------------------------------------------------
class Left(BaseException):
    pass


@pytest.fixture
def left(monkeypatch):
    """Leaving is an exception here, and nothing starts by itself."""

    def leave(text):
        raise Left(text)

    monkeypatch.setattr(liveness, "leave", leave)
    monkeypatch.setattr(liveness, "in_background", lambda *_: None)


class Store(dict):
    def add(self, key, number):
        self[key] = self.get(key, 0) + number
        return self[key]

    def clone(self):
        return self

    set = dict.__setitem__

    def check(self, keys):
        return all(key in self for key in keys)


def heartbeats(monkeypatch, store, rank=0, limit=600):
    monkeypatch.setattr(liveness.distributed_c10d, "_get_default_store", lambda: store)
    return Heartbeats(rank, 3, limit)


def test_a_rank_that_is_not_heard_from_is_named_and_ends_the_others(left, monkeypatch, capsys):
    store, now = Store(), [1000.0]
    monkeypatch.setattr(liveness.time, "monotonic", lambda: now[0])
    beats = heartbeats(monkeypatch, store)
    for second in range(0, 700, 5):
        now[0] = 1000.0 + second
        store["heartbeat/1"] = second
        if second < 50:
            store["heartbeat/2"] = second
        beats._listen(1)
        if second - 45 > 600:
            with pytest.raises(Left, match="rank 2 was not heard from for 600 s"):
                beats._listen(2)
            break
        beats._listen(2)
    assert second == 650
    said = capsys.readouterr().err.splitlines()
    assert (
        55 <= len(said) <= 61 and "waiting for rank 2, which was not heard from for 10 s" in said[0]
    )


def test_a_clock_that_is_set_ends_no_rank(monkeypatch):
    before = liveness.identity(os.getpid())
    monkeypatch.setattr(psutil.Process, "create_time", lambda self: 0.0)  # it follows the clock
    assert liveness.identity(os.getpid()) == before


def test_a_rank_that_never_came_counts_too(left, monkeypatch):
    beats = heartbeats(monkeypatch, Store(), limit=-1)
    with pytest.raises(Left, match="rank 1"):
        beats._listen(1)


def test_a_store_that_is_gone_ends_the_rank_unless_the_run_is_over(left, monkeypatch):
    class Gone(Store):
        def add(self, key, number):
            raise RuntimeError("Broken pipe")

    beats = heartbeats(monkeypatch, Gone(), rank=1)
    with pytest.raises(Left, match="rank 0, which keeps the ranks together, does not answer"):
        beats._run()
    beats.stop()
    beats._run()


@pytest.mark.parametrize("name", ["bin/deepspeed", "bin/torchrun", "torch.distributed.run"])
def test_a_launcher_is_known_by_its_name(name):
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", name]) as process:
        while name not in (psutil.Process(process.pid).cmdline() or [""])[-1]:
            time.sleep(0.01)  # the command line comes with exec
        assert liveness.is_launcher(psutil.Process(process.pid))
        process.kill()


def test_a_rank_ends_with_its_launcher(left):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    process = psutil.Process(child.pid)
    assert not liveness.is_launcher(process)
    child.kill()
    with pytest.raises(Left, match="launcher is gone"):
        liveness.end_with([process])  # also as long as it is a zombie
    child.wait()
    assert not liveness.is_launcher(process)
