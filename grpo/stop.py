"""What ends a process: a signal, the end of its launcher, a wait that takes too long."""

import contextlib
import math
import os
import signal
import time

from grpo.log import SPEAK_SECONDS, in_background, tell

AGAIN_SECONDS = 2  # between two Ctrl-C: deepspeed sends signals too, right after the first
STOP_SECONDS = 15  # a wait, once this process was asked to end; deepspeed kills it after 30


class Stop:
    """A request, by SIGINT or SIGTERM, to finish the step, save it, and end.

    A thread receives the signals: a handler in Python would not run while the main thread is in a
    collective. A second Ctrl-C ends the process at once.
    """

    asked, at = "", math.inf  # the first signal's name, and when it came

    @contextlib.contextmanager
    def listening(self):
        """In the block a signal only sets `asked`."""
        self.asked, self.at = "", math.inf
        read, write = os.pipe()
        os.set_blocking(write, False)
        ends = [s for s in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(s) != signal.SIG_IGN]
        in_background(self._receive, read, ends)
        wakeup = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        before = {number: signal.signal(number, lambda *_: None) for number in ends}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(wakeup)
            os.close(write)

    def _receive(self, read, ends):
        while numbers := os.read(read, 64):
            for number in numbers:
                if number in ends:
                    self.ask(signal.Signals(number).name)
        os.close(read)

    def ask(self, by):
        if not self.asked:
            self.asked, self.at = by, time.monotonic()
            tell(f"{by}: the run ends once this step is saved; a second Ctrl-C ends it at once")
        elif by == "SIGINT" and time.monotonic() - self.at > AGAIN_SECONDS:
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
