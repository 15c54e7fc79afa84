"""Calls a task's functions with a time limit. A mistake in the task raises TaskError.

with timely(60, "the rewards"): task.rewards(item, text)
"""

import contextlib
import copy
import faulthandler
import functools
import importlib.util
import math
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

from grpo import log

ROOT = Path(__file__).parents[1]
GRACE_SECONDS = 10  # from the time limit until code that does not stop is ended with its process


# --- A task's mistakes -----------------------------------------------------------------
class TaskError(SystemExit):
    """Ends the program with a message about a mistake in a task's file."""

    def __init__(self, name, function, got, must):
        super().__init__(f"{task_file(name)}: {function} {got}: it must {must}")


HELPER = "import a file of its folder by its name, as in `import helper`, and choose a name that"
HELPER += " no module of Python's or of grpo-split has"
SOONER = "answer within REWARD_TIMEOUT_SECONDS; raise that constant if it needs longer"


def called(name, function, must, call, holds=lambda got: True):
    """Returns the result of `call`, which calls a task's function. Raises TaskError with the line
    if it fails, if holds(result) is false, or if timely() around it ends it."""
    try:
        got = call()
    except TooSlow as error:
        raise TaskError(name, function, f"took more than {error.seconds} s", SOONER) from None
    except TaskError:  # of a call within this one
        raise
    except (Exception, SystemExit) as error:
        file = Path(name).expanduser() if name.endswith(".py") else ROOT / task_file(name)
        frames = traceback.extract_tb(error.__traceback__)
        lines = [f.lineno for f in frames if Path(f.filename).resolve() == file.resolve()]
        lines += [error.lineno] if isinstance(error, SyntaxError) else []
        at = f", line {lines[-1]}" if lines else ""
        why = f"failed with {type(error).__name__}{at}: {error}"
        at_path = name.endswith(".py")
        must = HELPER if at_path and is_of_helper(error, file.resolve().parent) else must
        raise TaskError(name, function, why, must) from error
    if not holds(got):
        raise TaskError(name, function, f"returned {got!r:.500}", must)
    return got


def is_of_helper(error, folder):
    """Returns whether a task could not import a file of its folder: the import is relative, or
    Python has another module of that name."""
    module = getattr(error, "obj", None)  # an AttributeError's, else the name is an ImportError's
    name = getattr(module, "__name__", str(getattr(error, "name", None))).partition(".")[0]
    is_there = (folder / f"{name}.py").exists() or (folder / name).is_dir()
    found = Path(getattr(sys.modules.get(name), "__file__", None) or "/").resolve()
    is_other = name in sys.modules and folder not in found.parents
    return "relative import" in str(error) or (is_there and is_other)


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


def own(name, item):
    """Returns a copy of a question for one call: what the task changes in it stays there."""
    must = "have nothing that copy.deepcopy refuses: keep a connection or a lock in the module"
    return called(name, f"the question {item!r:.200}", must, lambda: copy.deepcopy(item))


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
        signal.setitimer(signal.ITIMER_REAL, 0)
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


def import_file(name, file):
    spec = importlib.util.spec_from_file_location(name, file)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
