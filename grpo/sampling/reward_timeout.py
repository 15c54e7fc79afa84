"""A time limit for rewards: `with timely(seconds, text): ...`"""

import contextlib
import faulthandler
import math
import signal
import sys
import threading
import time

from grpo.log import SPEAK_SECONDS, tell


class TooSlow(BaseException):
    """Not an Exception: a task that catches those must not make a reward of it."""


@contextlib.contextmanager
def timely(seconds, what):
    """Raises TooSlow in the block after `seconds`, and says every 10 s what is waited for.

    10 s later the process ends with its traceback: where code never returns to Python, or sets an
    alarm of its own, as math-verify's time limits do. Does nothing outside the main thread; blocks
    do not nest.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    began = time.monotonic()

    def look(*_):
        spent = time.monotonic() - began
        if spent >= seconds:
            raise TooSlow(f"{what} took more than {seconds} s")
        tell(f"waiting for {what} since {spent:.0f} s")
        signal.setitimer(signal.ITIMER_REAL, min(SPEAK_SECONDS, seconds - spent))

    before = signal.signal(signal.SIGALRM, look)
    if seconds < math.inf:
        # from a thread of C, which also runs while others hold the interpreter
        faulthandler.dump_traceback_later(seconds + 10, exit=True, file=sys.__stderr__)
    signal.setitimer(signal.ITIMER_REAL, min(SPEAK_SECONDS, seconds))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.cancel_dump_traceback_later()
        signal.signal(signal.SIGALRM, before)
