"""A time limit for rewards: `with timely(seconds, text): ...`"""

import contextlib
import faulthandler
import math
import signal
import sys
import threading
import time

from grpo.log import SPEAK_SECONDS, in_background, tell

ALARM_LOOK_SECONDS = 0.1  # between two looks at the clock: a limit may be exceeded by that much


class TooSlow(BaseException):
    """Not an Exception: a task that catches those must not make a reward of it."""


@contextlib.contextmanager
def timely(seconds, what):
    """Raises TooSlow in the block after `seconds`, and says every 10 s spent in such blocks what is
    waited for. Code that never returns to Python can't be interrupted: 10 s later the process ends
    with its traceback. Does nothing outside the main thread; blocks do not nest. The signal is not
    SIGALRM, which math-verify uses itself."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    assert alarm.time == math.inf, "timely() within timely()"
    error, fired, over = TooSlow(f"{what} took more than {seconds} s"), False, False

    def interrupt(*_):
        nonlocal fired
        fired = True
        if not over:
            raise error

    before = signal.signal(signal.SIGUSR2, interrupt)
    try:  # twice, as the signal may come at the very end of the inner one
        try:
            # from a thread of C, which also runs while others hold the interpreter
            faulthandler.dump_traceback_later(seconds + 10, exit=True, file=sys.__stderr__)
            alarm.set(time.monotonic() + seconds, what)
            yield
        finally:
            over = True
            alarm.set(math.inf)  # so that it does not interrupt what comes after the block
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.signal(signal.SIGUSR2, before)
    if fired:  # and the block has caught it
        raise error


class Alarm:
    """Sends the main thread SIGUSR2 at a time that may be moved, and says what that thread is busy
    with. One thread for all blocks: each new one would wait 5 ms and more for the interpreter while
    the uploading thread is busy."""

    def __init__(self):
        self.lock, self.thread = threading.Lock(), None
        self.time, self.what = math.inf, ""

    def set(self, at, what=""):
        with self.lock:
            self.time, self.what = at, what
        if not self.thread:
            self.thread = in_background(self._look)

    def _look(self):
        main, looked = threading.main_thread().ident, time.monotonic()
        busy = spent = 0.0  # seconds in blocks: since it last spoke, and before
        while True:
            time.sleep(ALARM_LOOK_SECONDS)
            with self.lock:
                now, what = time.monotonic(), self.what
                if now > self.time:
                    self.time = math.inf
                    signal.pthread_kill(main, signal.SIGUSR2)
            # over all blocks, less the time between: an evaluation's are short, but many
            passed, looked = now - looked, now
            busy = busy + passed if what else max(0.0, busy - passed)
            spent = spent if busy else 0.0
            if what and busy >= SPEAK_SECONDS:
                spent, busy = spent + busy, 0.0
                tell(f"waiting for {what} {spent:.0f} s by now")


alarm = Alarm()
