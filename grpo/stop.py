"""What ends a process: a signal, the end of its launcher, a wait that takes too long."""

import contextlib
import ctypes
import math
import os
import signal
import sys
import time

from grpo.log import SPEAK_SECONDS, tell

PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>
AGAIN_SECONDS = 2  # between two Ctrl-C: deepspeed sends signals too, right after the first
STOP_SECONDS = 15  # a wait, once this process was asked to end; deepspeed kills it after 30


class Stop:
    """A request, by SIGINT or SIGTERM, to finish the step, save it, and end."""

    asked, at = "", math.inf  # the first signal's name, and when it came

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
            leave("a second SIGINT: the run ends without a checkpoint of the last steps")


stop = Stop()


class TooLong(RuntimeError):
    """A wait has reached its limit."""


class Wait:
    """A polling loop's wait. It says every 10 s what it is for, and raises at its limit, which
    counts from when it is made, or from moved()."""

    def __init__(self, what, limit_seconds=math.inf, speaks=True):
        self.what, self.limit, self.speaks = what, limit_seconds, speaks
        self.start = self.said = time.monotonic()

    def moved(self):
        self.start = time.monotonic()

    def sleep(self, why, pause=0.5):
        """Sleeps `pause` seconds; `why` says what is still missing. Raises TooLong at the limit,
        or STOP_SECONDS after this process was asked to end."""
        now = time.monotonic()
        if now - self.start > self.limit:
            raise TooLong(f"waited {self.limit} s for {self.what}: {why}")
        if stop.asked and now - max(self.start, stop.at) > STOP_SECONDS:
            raise TooLong(f"{stop.asked}: the step can't be finished without {self.what}: {why}")
        if self.speaks and now - self.said > SPEAK_SECONDS:
            self.said = now
            tell(f"waiting for {self.what} since {now - self.start:.0f} s: {why}")
        time.sleep(pause)


def leave(text):
    """Ends this process at once; deepspeed ends the other ranks of the machine."""
    tell(text)
    os._exit(1)


def end_with_parent(number):
    """Has the kernel send this process a signal when its parent ends, even by SIGKILL, and even in
    C code. Linux alone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
