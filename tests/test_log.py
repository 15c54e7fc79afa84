"""Output to a pipe that nobody reads any more."""

import sys

from grpo import log
from grpo.stop import Wait


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
