"""Output to a pipe that nobody reads any more."""

import subprocess
import sys
from pathlib import Path

from grpo import log
from grpo.stop import Wait

ROOT = Path(__file__).parent.parent


def test_who_reads_may_be_gone(monkeypatch):
    """`2>&1 | tee` ends by the same Ctrl-C; the thread that hears a second one must live on."""

    class Gone:
        def write(self, text):
            raise BrokenPipeError

        flush = write

    monkeypatch.setattr(sys, "stderr", Gone())
    monkeypatch.setattr(sys, "stdout", Gone())
    log.tell("SIGINT: this step is finished and saved")
    wait = Wait("the server", 600)
    wait.said -= 11
    wait.turn("no answer", pause=0)


GONE = """
import os, sys
from grpo.log import lasting_output
read, write = os.pipe()
kept = os.dup(1)
os.dup2(write, 1)
with lasting_output():
    print("heard", flush=True)
    os.close(read)  # the reader goes, unseen
    for _ in range(3):
        print("not heard" * 10_000, flush=True)
    os.write(kept, b"goes on")
"""


def test_a_reader_that_goes_in_the_middle_of_a_write_ends_nothing():
    """`| tee log`, which the Ctrl-C that asks for a checkpoint ends as well."""
    done = subprocess.run(
        [sys.executable, "-c", GONE], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "goes on", "")
