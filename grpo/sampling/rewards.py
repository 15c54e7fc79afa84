"""Calls a task's functions with a time limit, in this process or in others (REWARD_PROCESSES). A
mistake in the task raises TaskError.

    with timely(60, "the rewards"): task.rewards(item, text)
    submit = start_processes(task, number=4, limit_seconds=60)
    submit("rewards", item, text).result()    # what the task's function returns

A reward process imports only the task's file: no torch, and it sees no GPU. If a call takes too
long, its process is killed with all its children, even within C code, and the run ends; the run
also ends if a process dies. Reward processes always end with the process that started them.
(multiprocessing would import the trainer's script in each process: 0.4 GB and 3 s.)
"""

import contextlib
import ctypes
import faulthandler
import functools
import importlib.util
import multiprocessing
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import traceback
from concurrent.futures import Future
from multiprocessing.connection import Connection
from pathlib import Path

from grpo import log
from grpo.stop import end_with_parent

ROOT = Path(__file__).parents[2]
IMPORT_SECONDS = 600  # time limit of the task's import, which may load a judge model
GRACE_SECONDS = 10  # from the time limit until code that does not stop is ended with its process


# --- A task's mistakes -----------------------------------------------------------------
class TaskError(SystemExit):
    """Ends the program with a message about a mistake in a task's file."""

    def __init__(self, name, function, got, must):
        super().__init__(f"{task_file(name)}: {function} {got}: it must {must}")


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
        file = Path(name) if name.endswith(".py") else ROOT / task_file(name)
        frames = traceback.extract_tb(error.__traceback__)
        lines = [f.lineno for f in frames if Path(f.filename).resolve() == file.resolve()]
        lines += [error.lineno] if isinstance(error, SyntaxError) else []
        at = f", line {lines[-1]}" if lines else ""
        why = f"failed with {type(error).__name__}{at}: {error}"
        raise TaskError(name, function, why, must) from error
    if not holds(got):
        raise TaskError(name, function, f"returned {got!r:.500}", must)
    return got


def task_file(name):
    """Returns the path of a task's file as error texts show it.

    >>> task_file("gsm8k"), task_file("my/task.py")
    ('tasks/gsm8k.py', 'my/task.py')
    """
    return name if name.endswith(".py") else f"tasks/{name}.py"


class TooSlow(BaseException):
    """A call took too long. Not an Exception: a task that catches those must not hide it."""

    def __init__(self, what, seconds):
        super().__init__(f"{what} took more than {seconds} s")
        self.seconds = seconds


# --- In place -------------------------------------------------------------------------
@contextlib.contextmanager
def timely(seconds, what):
    """Raises TooSlow in the block after `seconds`, and logs every 10 s what it waits for. If the
    code never returns to Python, or sets its own alarm as math-verify's time limits do, the process
    ends with its traceback GRACE_SECONDS after the limit (Linux). Sets no limit outside the main
    thread; blocks do not nest."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    start, set_watchdog = time.monotonic(), watchdog()

    def ring(*_):
        waited = time.monotonic() - start
        if waited > seconds - 0.01:
            raise TooSlow(what, seconds)
        log.tell(f"waited {waited:.0f} s so far for {what}")
        signal.setitimer(signal.ITIMER_REAL, min(log.SPEAK_SECONDS, seconds - waited))

    before = signal.signal(signal.SIGALRM, ring)
    set_watchdog(seconds + GRACE_SECONDS)
    signal.setitimer(signal.ITIMER_REAL, min(log.SPEAK_SECONDS, seconds))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        set_watchdog(0)
        signal.signal(signal.SIGALRM, before)


@functools.cache
def watchdog():
    """Returns set_watchdog(seconds): after so many (0: never) this process prints the traceback of
    all threads and dies of SIGVTALRM, even if C code holds the interpreter. It is one timer of the
    kernel. faulthandler's own is a thread for each call: to start and join it took four times as
    long as to reward a group of the demo."""
    if sys.platform != "linux":
        return lambda seconds: None
    faulthandler.register(signal.SIGVTALRM, sys.__stderr__, chain=True)
    library, timer = ctypes.CDLL("librt.so.1"), ctypes.c_void_p()
    event = (ctypes.c_int * 16)(0, 0, signal.SIGVTALRM)  # struct sigevent
    library.timer_create(time.CLOCK_MONOTONIC, event, ctypes.byref(timer))

    def set_watchdog(seconds):
        times = (ctypes.c_long * 4)(0, 0, int(seconds), int(seconds % 1 * 1e9))  # itimerspec
        library.timer_settime(timer, 0, times, None)

    return set_watchdog


# --- In processes ---------------------------------------------------------------------
def start_processes(task, number, limit_seconds):
    """Starts `number` processes. Returns submit(function, *arguments), which calls the task's
    function in the next free process and returns a Future. The Future raises TooSlow, or
    RuntimeError if the function raised or the process died. Call this in the main thread: the
    processes end with it."""
    jobs = queue.SimpleQueue()
    for _ in range(number):
        log.in_background(serve, *start_process(task), jobs, limit_seconds)

    def submit(*job):
        future = Future()
        jobs.put((future, job))
        return future

    return submit


def start_process(task):
    """Returns (process, connection). Its first answer confirms that it has imported the task."""
    here, there = multiprocessing.Pipe()
    command = [sys.executable, "-m", "grpo.sampling.rewards", str(there.fileno()), str(os.getpid())]
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    own = {"PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.Popen(
        [*command, task.__name__, task.__file__],
        env={"OMP_NUM_THREADS": "1"} | os.environ | own,
        pass_fds=[there.fileno()],
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C does not reach it; it is killed with its children
    )
    there.close()
    return process, here


def serve(process, connection, jobs, limit_seconds):
    """Sends jobs to a process, one by one. Once it has ended, each further job gets its error."""
    future, job, seconds = Future(), None, max(limit_seconds, IMPORT_SECONDS)  # first: import
    while True:
        try:
            future.set_result(ask(process, connection, seconds, job))
        except BaseException as error:  # noqa: BLE001 (raised where the result is read)
            future.set_exception(error)
            while job is None or process.returncode is not None:  # the run ends: no job may wait
                jobs.get()[0].set_exception(error)
        (future, job), seconds = jobs.get(), limit_seconds


def ask(process, connection, seconds, job=None):
    """Returns the process's answer. Raises the errors that start_processes lists."""
    try:
        if job:
            connection.send(job)
        if not connection.poll(seconds):
            end(process)
            raise TooSlow("its process, which was killed,", seconds)
        value, error = connection.recv()
    except (EOFError, OSError):
        raise RuntimeError(f"its process has ended: {end(process)}") from None
    if error:
        raise RuntimeError(error)
    return value


def end(process):
    """Kills a process with its children; returns how it ended."""
    os.killpg(process.pid, signal.SIGKILL)  # no effect if it is ending by itself
    code = process.wait()
    memory = ", perhaps because memory ran out" if code == -signal.SIGKILL else ""
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name + memory


def main():
    """In a reward process: imports the task's file, then answers calls until the parent ends."""
    descriptor, parent, name, file = sys.argv[1:]
    end_with_parent(signal.SIGKILL)
    if os.getppid() != int(parent):
        return
    for number in (signal.SIGINT, signal.SIGTERM):  # a run that is stopped finishes its step
        signal.signal(number, lambda *_: None)  # children would inherit SIG_IGN
    connection, call, arguments = Connection(int(descriptor)), import_file, (name, file)
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            try:
                connection.send((call(*arguments), None))
            except BaseException as error:  # noqa: BLE001 (raised where the rewards are awaited)
                traceback.print_exc()
                connection.send((None, repr(error)))
            function, *arguments = connection.recv()
            call = getattr(sys.modules[name], function)


def import_file(name, file):
    spec = importlib.util.spec_from_file_location(name, file)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


if __name__ == "__main__":
    main()
