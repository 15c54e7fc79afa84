"""Calls a task's functions with a time limit. A mistake in the task raises TaskError.

    answers(60, "the rewards", calls, begin(60, calls))  # calls: [(task.rewards, item, text)]

Plain functions run in the main thread, one after another; `async` ones on an event loop, together.
"""

import contextlib
import faulthandler
import inspect
import os
import signal
import sys
import threading
import time

from grpo import log

GRACE_SECONDS = 10  # after the time limit, for code that does not stop at once


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

    if isinstance(error, TaskError | KeyboardInterrupt):
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


def environment_rewards(task):
    """Returns whether the task's environments reward their completions themselves."""
    return hasattr(getattr(task, "Environment", None), "rewards")


class TooSlow(BaseException):
    """A call took too long. Not an Exception: a task that catches those must not hide it."""

    def __init__(self, what, seconds):
        super().__init__(f"{what} took more than {seconds} s")
        self.seconds = seconds


# --- Calls ----------------------------------------------------------------------------
def begin(seconds, calls):
    """Begins those of `calls`, [(function, *arguments)], whose function is async. Returns a list
    with the Future of each of them, and None for the others."""
    futures = [None] * len(calls)
    for number, call in enumerate(calls):
        if inspect.iscoroutinefunction(call[0]):
            from grpo.options.rewards.async_rewards import begin_async

            futures[number] = begin_async(seconds, *call)
    return futures


def answers(seconds, what, calls, futures, *, shared=True):
    """Returns what the calls return, in order, or the error that one has raised; TooSlow if it
    takes longer than `seconds`, which plain calls share unless `shared` is false. `futures` is
    begin's result."""
    found, left, end = [], seconds, time.monotonic() + seconds + GRACE_SECONDS  # of blocked loops
    with log.announced(what):
        for call, future in zip(calls, futures, strict=True):
            began = time.monotonic()
            try:
                if future:
                    found.append(future.result(max(0, end - began)))
                else:
                    found.append(answer(left if shared else seconds, what, call))
            except KeyboardInterrupt:  # the user's
                raise
            except BaseException as error:  # noqa: BLE001 (of any kind)
                is_late = future and isinstance(error, TimeoutError)  # it raises no other
                found.append(TooSlow(what, seconds) if is_late else error)
            left -= 0 if future else time.monotonic() - began
    return found


def answer(seconds, what, call):
    """Returns what a plain call returns. Raises TooSlow."""
    if seconds <= 0:  # others have used them
        raise TooSlow(what, seconds)
    (function, *arguments), began = call, time.monotonic()
    with timely(seconds, what):
        found = function(*arguments)
    if time.monotonic() - began > seconds:  # the function has caught TooSlow
        raise TooSlow(what, seconds)
    return found


@contextlib.contextmanager
def timely(seconds, what):
    """Raises TooSlow in the block after `seconds`. The line that runs then is printed, also of C
    code that does not return to Python. If such code computes, the process ends once it has used so
    many seconds, and GRACE_SECONDS, of all cores' time; if it sleeps, others log that they wait. A
    block that sets another alarm, as math-verify does, or catches TooSlow must look at the clock.
    Sets no limit outside the main thread; blocks do not nest."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(*_):
        raise TooSlow(what, seconds)

    before = signal.signal(signal.SIGALRM, ring)
    faulthandler.register(signal.SIGALRM, sys.__stderr__, all_threads=False, chain=True)
    # Threads of torch add to this time, so a single one may take as long as all cores together
    signal.setitimer(signal.ITIMER_VIRTUAL, os.cpu_count() * (seconds + GRACE_SECONDS))
    # Again and again, as Python drops what a handler raises within a hook of fork() or a __del__
    signal.setitimer(signal.ITIMER_REAL, seconds, GRACE_SECONDS)
    try:
        yield
    finally:
        try:
            signal.setitimer(signal.ITIMER_REAL, 0)
        finally:  # also if the alarm rings here
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            faulthandler.unregister(signal.SIGALRM)
            signal.signal(signal.SIGALRM, before)
