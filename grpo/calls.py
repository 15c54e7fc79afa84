"""Calls a task's functions with a time limit. A mistake in the task raises TaskError.

with timely(60, "the rewards"): task.rewards(item, text)
"""

import contextlib
import faulthandler
import functools
import math
import os
import signal
import sys
import threading
import time

from grpo import log

GRACE_SECONDS = 10  # from the time limit until code that does not stop is ended with its process


# --- A task's mistakes -----------------------------------------------------------------
class TaskError(SystemExit):
    """Ends the program with a message about a mistake in a task's file."""

    def __init__(self, name, function, got, must):
        super().__init__(f"{task_file(name)}: {function} {got}: it must {must}")


def called(name, function, must, call, holds=lambda got: True):
    """Returns the result of `call`, which calls a task's function. Raises TaskError with the line
    if it fails, if holds(result) is false, or if timely() around it ends it."""
    try:
        got = call()
    except BaseException as error:
        raise mistake(name, function, must, error=error) from error
    if not holds(got):
        raise mistake(name, function, must, got=got)
    return got


def mistake(name, function, must, given="", error=None, got=None):
    """Returns the TaskError of a task's function, called with the values `given`, that has raised
    `error` or else returned `got`. Raises an error that is no mistake: a TaskError of a call within
    this one, and the user's Ctrl-C."""
    from grpo.options.rewards import faults

    if isinstance(error, TaskError) or faults.is_ctrl_c(error):
        raise error
    if isinstance(error, TooSlow):
        why, must = f"took more than {error.seconds} s", faults.SOONER
    else:
        why, must = faults.described(task_file(name), must, error, got)
    return TaskError(name, function, why + given, must)


def task_file(name):
    """Returns the path of a task's file as error texts show it.

    >>> task_file("gsm8k"), task_file("my/task.py")
    ('tasks/gsm8k.py', 'my/task.py')
    """
    return name if name.endswith(".py") else f"tasks/{name}.py"


def has_turns(task):
    """Returns whether a completion may have several turns."""
    return hasattr(task, "reply") or hasattr(task, "Environment")


def environment_rewards(task):
    """Returns whether the task's environments reward their completions themselves."""
    return hasattr(getattr(task, "Environment", None), "rewards")


def by_name(rewards):
    return rewards if isinstance(rewards, dict) else {"reward": rewards}


class TooSlow(BaseException):
    """A call took too long. Not an Exception: a task that catches those must not hide it."""

    def __init__(self, what, seconds):
        super().__init__(f"{what} took more than {seconds} s")
        self.seconds = seconds


# --- In place -------------------------------------------------------------------------
@contextlib.contextmanager
def timely(seconds, what):
    """Raises TooSlow in the block after `seconds`, and logs every 10 s what it waits for. If the
    code never returns to Python, or sets another alarm as math-verify's time limits do, the process
    ends with its traceback GRACE_SECONDS after the limit. Sets no limit outside the main thread;
    blocks do not nest."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    start = time.monotonic()

    def ring(*_):
        waited = time.monotonic() - start
        if waited > seconds - 0.01:
            raise TooSlow(what, seconds)
        log.tell(f"waited {waited:.0f} s so far for {what}")
        signal.setitimer(signal.ITIMER_REAL, min(log.SPEAK_SECONDS, seconds - waited))

    before = signal.signal(signal.SIGALRM, ring)
    watchdog.start(seconds + GRACE_SECONDS)
    signal.setitimer(signal.ITIMER_REAL, min(log.SPEAK_SECONDS, seconds))
    try:
        yield
    finally:
        try:
            signal.setitimer(signal.ITIMER_REAL, 0)
        finally:  # also if the alarm rings here
            watchdog.stop()
            signal.signal(signal.SIGALRM, before)


class Watchdog:
    """Ends the process with its traceback at a time. A thread of C does it, which needs no
    interpreter; a forked child does not have it, and would wait for it for ever as it exits, so it
    is stopped while a task forks. Starting takes 0.2 ms."""

    ends = math.inf

    def start(self, seconds):
        self.ends = time.monotonic() + seconds
        self._leave_out_of_forks()
        self._go_on()

    def stop(self):
        self.ends = math.inf
        faulthandler.cancel_dump_traceback_later()

    def _go_on(self):
        if self.ends < math.inf:
            left = max(0.1, self.ends - time.monotonic())
            faulthandler.dump_traceback_later(left, exit=True, file=sys.__stderr__)

    @functools.cache  # noqa: B019 (once per process)
    def _leave_out_of_forks(self):
        stop = faulthandler.cancel_dump_traceback_later
        os.register_at_fork(before=stop, after_in_parent=self._go_on)


watchdog = Watchdog()
