"""Signals that ask a trainer to end, and waits that have a limit."""

import contextlib
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent

LISTENS = """
import sys
from grpo import stop, waits

waits.STOP_SECONDS, stop.AGAIN_SECONDS, wait = 1, 1, waits.Wait("the server", 600)
with stop.stop.listening():
    print("listening", flush=True)
    while True:
        stop.time.sleep(0.01) if sys.argv[1] == "compute" else wait.sleep("it is down")
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
        assert "SIGINT" in process.stdout.readline()
        for end in (signal.SIGINT, signal.SIGTERM):
            process.send_signal(end)
        time.sleep(1.2)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 1


def test_a_trainer_that_is_asked_to_end_does_not_wait_for_a_server_that_is_down():
    with listener("wait") as process:
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 1
        assert "the server: it is down" in process.stdout.read()
