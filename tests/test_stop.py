"""Signals that ask a trainer to end, and waits that have a limit."""

import itertools
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

from processes import PATIENCE, python

from grpo.stop import ANNOUNCE, stop

ROOT = Path(__file__).parent.parent
ANNOUNCED = signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU

LISTENS = """
import signal
from grpo import client, stop

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's `&` would ignore it
client.STOP_SECONDS, wait = 1, client.Wait("the server", 600)
with stop.stop.listening():
    print("listening", flush=True)
    while True:
        wait.sleep("it is down")
"""


TWICE = """
import signal
from grpo import stop

stop.AGAIN_SECONDS = 600  # and not 2: this process may be held up between two signals
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's `&` would ignore it
with stop.stop.listening():
    for number in (signal.SIGINT, signal.SIGINT, signal.SIGTERM):
        signal.raise_signal(number)
    print("goes on after", stop.stop.asked, flush=True)
    stop.stop.at -= 601
    signal.raise_signal(signal.SIGTERM)
    print("and after SIGTERM", flush=True)
    signal.raise_signal(signal.SIGINT)
    print("never printed", flush=True)
"""


def test_a_second_ctrl_c_ends_a_trainer_at_once_but_not_that_which_deepspeed_adds():
    done = python("-c", TWICE)
    assert done.returncode == 1 and "second SIGINT: the run ends at once" in done.stderr
    assert done.stdout == "goes on after SIGINT\nand after SIGTERM\n"


def test_a_trainer_that_is_asked_to_end_does_not_wait_for_a_server_that_is_down():
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    command = [sys.executable, "-c", LISTENS]
    with subprocess.Popen(command, cwd=ROOT, text=True, **pipes) as process:
        try:
            assert process.stdout.readline() == "listening\n"
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE) == 1  # the server is given up after 600 s
            why = "SIGTERM: the step can't be finished without the server: it is down"
            assert why in process.stdout.read()
        finally:
            process.kill()


def test_signals_that_announce_an_end_stop_a_trainer_unless_they_are_ignored_or_have_a_handler():
    """nohup ignores SIGHUP; submitit, which requeues jobs, has handlers of SIGUSR1 and SIGUSR2."""
    assert set(ANNOUNCED) == set(ANNOUNCE)
    heard = []
    handlers = {signal.SIG_DFL: True, signal.SIG_IGN: False, lambda *_: heard.append(1): False}
    for number, (handler, stops) in itertools.product(ANNOUNCED, handlers.items()):
        before = signal.signal(number, handler)
        try:
            with stop.listening():
                for again in (number, number, signal.SIGTERM):  # Slurm's may be followed by others
                    signal.raise_signal(again)
                assert stop.asked == (number.name if stops else "SIGTERM")
        finally:
            signal.signal(number, before)
    assert len(heard) == 2 * len(ANNOUNCED)
    with stop.listening():  # which forgets the last one, as other tests evaluate in this process
        assert not stop.asked


HANGS_UP = """
import sys, time
from pathlib import Path
from grpo.log import say, tell
from grpo.report import Bar
from grpo.stop import stop

bar = Bar(0, 9)
with stop.listening():
    say("listening")
    while not stop.asked:
        time.sleep(0.01)
    for step in range(2):  # no terminal is left to print to
        time.sleep(0.2)
        bar.show(step, {"seconds": 1.0})
        say("saved")
        tell("saved")
    bar.close()
    Path(sys.argv[1]).write_text(stop.asked)
"""


def test_a_trainer_saves_its_step_when_its_terminal_is_closed(tmp_path):
    """As when an ssh session ends: it gets SIGHUP, and what it prints is an error from then on."""
    child, terminal = pty.fork()  # a session with a terminal
    if child == 0:
        words = [sys.executable, "-c", HANGS_UP, str(tmp_path / "saved")]
        os.chdir(ROOT)
        os.execv(sys.executable, words)
    printed = b""
    while b"listening" not in printed:
        printed += os.read(terminal, 1000)
    os.close(terminal)
    os.waitpid(child, 0)
    assert (tmp_path / "saved").read_text() == "SIGHUP"
