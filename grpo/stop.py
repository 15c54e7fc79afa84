"""Ends a process: after a signal, with its launcher, or when a wait takes too long."""

import contextlib
import ctypes
import math
import os
import signal
import sys
import time

from grpo.log import SPEAK_SECONDS, tell

PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>
AGAIN_SECONDS = 2  # before it a second Ctrl-C does not count, as deepspeed forwards the first
STOP_SECONDS = 15  # longest wait after a stop was requested; deepspeed kills the process after 30 s


class Stop:
    """A stop requested by SIGINT or SIGTERM: finish the step, save it, and end."""

    asked, at = "", math.inf  # name and time of the first signal

    @contextlib.contextmanager
    def listening(self):
        """In the block a signal only sets `asked`; a second Ctrl-C ends the process at once."""
        self.asked, self.at = "", math.inf
        ends = [s for s in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(s) != signal.SIG_IGN]
        before = {number: signal.signal(number, self._hear) for number in ends}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _hear(self, number, _):
        by = signal.Signals(number).name
        if not self.asked:
            self.asked, self.at = by, time.monotonic()
            tell(f"{by}: the run ends once this step is saved; a second Ctrl-C ends it at once")
        elif number == signal.SIGINT and time.monotonic() - self.at > AGAIN_SECONDS:
            leave("second SIGINT: the run ends at once; steps since the last checkpoint are lost")


stop = Stop()


class TooLong(RuntimeError):
    """A wait has reached its limit."""


class Refused(RuntimeError):
    """The other side of a connection refuses a request, or is no longer the same."""


class Wait:
    """The wait in a polling loop. Logs every 10 s what it waits for. Raises TooLong at its limit,
    which counts from its creation or from moved()."""

    def __init__(self, what, limit_seconds=math.inf):
        self.what, self.limit = what, limit_seconds
        self.start = self.said = time.monotonic()

    def moved(self):
        self.start = time.monotonic()

    def sleep(self, why, pause=0.5):
        """Sleeps `pause` seconds; `why` is what is still missing. Raises TooLong at the limit, or
        STOP_SECONDS after a stop was requested."""
        now = time.monotonic()
        if now - self.start > self.limit:
            raise TooLong(f"waited {self.limit} s for {self.what}: {why}")
        if stop.asked and now - max(self.start, stop.at) > STOP_SECONDS:
            raise TooLong(f"{stop.asked}: the step can't be finished without {self.what}: {why}")
        if now - self.said > SPEAK_SECONDS:
            self.said = now
            tell(f"waited {now - self.start:.0f} s so far for {self.what}: {why}")
        time.sleep(pause)


def leave(text):
    """Ends this process at once; deepspeed ends the other ranks of the machine."""
    tell(text)
    os._exit(1)


def end_with_parent(number):
    """Makes the kernel send this process a signal when its parent ends, even by SIGKILL and while C
    code runs. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
