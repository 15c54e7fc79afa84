"""A reward function gets so long: `with timely(seconds, text): ...`"""

import contextlib
import faulthandler
import math
import os
import signal
import sys
import threading
import time

from grpo.log import SPEAK_SECONDS, in_background, tell

ALARM_LOOK_SECONDS = 0.1  # and at the clock, while rewards are computed: they get so much longer


class TooSlow(BaseException):
    """Not an Exception: a task that catches those must not make a reward of it."""


@contextlib.contextmanager
def timely(seconds, what):
    """Raises TooSlow in the block after `seconds`; every 10 s that such blocks take says so. Code
    that never returns to Python can't be interrupted: the process then ends a little later, with
    its traceback. Main thread only; in others it does nothing. Blocks do not nest. (Not SIGALRM,
    which math-verify uses itself.)"""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    assert alarm.time == math.inf, "timely() within timely()"
    error, fired, over = TooSlow(f"{what} took more than {seconds} s"), [], False

    def interrupt(*_):
        fired.append(True)
        if not over:
            raise error

    before = signal.signal(signal.SIGUSR2, interrupt)
    try:
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
    if fired:  # and it was caught all the same
        raise error


class Alarm:
    """Sends the main thread SIGUSR2 soon after a time that may be moved, and says what that thread
    is busy with. One thread looks at it all the while: one for each block would wait for the
    interpreter, 5 ms and more, with every group's rewards, while the thread that uploads is busy.
    """

    def __init__(self):
        self.lock, self.thread, self.time = threading.Lock(), None, math.inf
        self.what = ""

    def set(self, at, what=""):
        with self.lock:
            self.time, self.what = at, what
        if not self.thread:
            self.thread = in_background(self._look)

    def _look(self):
        main, looked = threading.main_thread().ident, time.monotonic()
        busy = spent = 0.0
        while True:
            time.sleep(ALARM_LOOK_SECONDS)
            with self.lock:
                now, what = time.monotonic(), self.what
                if now > self.time:
                    self.time = math.inf
                    signal.pthread_kill(main, signal.SIGUSR2)
            # Over all blocks, less the time between: an evaluation's are short, but many
            passed, looked = now - looked, now
            busy = busy + passed if what else max(0.0, busy - passed)
            spent = spent if busy else 0.0
            if what and busy >= SPEAK_SECONDS:
                spent += busy
                tell(f"waiting for {what} {spent:.0f} s by now")
                busy = 0.0


alarm = Alarm()
os.register_at_fork(after_in_child=alarm.__init__)  # its thread stays behind, perhaps with the lock
