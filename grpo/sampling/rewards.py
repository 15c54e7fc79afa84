"""Calls a task's functions: a mistake is a TaskError. Its rewards have a time limit, here or in
processes (REWARD_PROCESSES).

    with timely(60, "the rewards"): task.rewards(item, text)
    submit = start_processes(task, number=4, limit_seconds=60)
    submit("rewards", item, text).result()    # what the task's function returns

A process imports the task's file alone, without torch and with no GPU in sight. A call that takes
too long is killed, in C code too, with all that it has started; then, or if a process dies, the run
ends. The processes end with the one that started them, whatever ends that. (Those of
multiprocessing would import the trainer's script: 0.4 GB and 3 s for each.)
"""

import contextlib
import faulthandler
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

IMPORT_SECONDS = 600  # for the task's import, which may load a judge


# --- A task's mistakes -----------------------------------------------------------------
class TaskError(SystemExit):
    """Ends the program with a sentence about a task's file."""

    def __init__(self, name, function, got, must):
        super().__init__(f"{task_file(name)}: {function} {got}: it must {must}")


def called(name, function, must, call, holds=lambda got: True):
    """Returns what `call` of a task's function returns. TaskError if it raises, with the line, or
    if `holds` is not true of what it returns."""
    try:
        got = call()
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [f.lineno for f in frames if Path(f.filename).name == Path(task_file(name)).name]
        lines += [error.lineno] if isinstance(error, SyntaxError) else []
        at = f", line {lines[-1]}" if lines else ""
        raise TaskError(name, function, f"failed with {error!r}{at}", must) from error
    if not holds(got):
        raise TaskError(name, function, f"returned {got!r:.500}", must)
    return got


def task_file(name):
    """Returns the path by which errors name a task's file.

    >>> task_file("gsm8k"), task_file("my/task.py")
    ('tasks/gsm8k.py', 'my/task.py')
    """
    return name if name.endswith(".py") else f"tasks/{name}.py"


class TooSlow(BaseException):
    """Not an Exception: a task that catches those must not make a reward of it."""


class Remote(Exception):
    """What a task raised in its process: its repr is the one there, its text the traceback."""

    def __init__(self, said, trace):
        super().__init__(trace)
        self.said = said

    def __repr__(self):
        return self.said


# --- In place -------------------------------------------------------------------------
@contextlib.contextmanager
def timely(seconds, what):
    """Raises TooSlow in the block after `seconds`, and prints every 10 s what it waits for. 10 s
    after the limit the process ends with its traceback, if the code never returns to Python, or
    sets an alarm of its own, as math-verify's time limits do. Does nothing outside the main thread;
    blocks do not nest."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    began = time.monotonic()

    def look(*_):
        spent = time.monotonic() - began
        if spent >= seconds:
            raise TooSlow(f"{what} took more than {seconds} s")
        log.tell(f"waiting for {what} since {spent:.0f} s")
        signal.setitimer(signal.ITIMER_REAL, min(log.SPEAK_SECONDS, seconds - spent))

    before = signal.signal(signal.SIGALRM, look)
    # from a thread of C, which also runs while other threads hold the interpreter
    faulthandler.dump_traceback_later(seconds + 10, exit=True, file=sys.__stderr__)
    signal.setitimer(signal.ITIMER_REAL, min(log.SPEAK_SECONDS, seconds))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.cancel_dump_traceback_later()
        signal.signal(signal.SIGALRM, before)


# --- In processes ---------------------------------------------------------------------
def start_processes(task, number, limit_seconds):
    """Returns submit(function, *arguments), which returns the Future of a call of the task's
    function, in the next of `number` processes that is free. The Future raises Remote, TooSlow, or
    RuntimeError if the process died. Call this in the main thread: the processes end with it."""
    jobs = queue.SimpleQueue()
    for _ in range(number):
        log.in_background(serve, *start_process(task), jobs, limit_seconds)

    def submit(*job):
        future = Future()
        jobs.put((future, job))
        return future

    return submit


def start_process(task):
    """Returns (process, connection). Its first answer says that it has imported the task."""
    here, there = multiprocessing.Pipe()
    command = [sys.executable, "-m", "grpo.sampling.rewards", str(there.fileno()), str(os.getpid())]
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    own = {"PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.Popen(
        [*command, task.__name__, task.__file__],
        env={"OMP_NUM_THREADS": "1"} | os.environ | own,
        pass_fds=[there.fileno()],
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # no Ctrl-C reaches it; it is killed with what it has started
    )
    there.close()
    return process, here


def serve(process, connection, jobs, limit_seconds):
    """Gives a process one job after another. Once it has ended, each job gets its error."""
    future, job, seconds = Future(), None, max(limit_seconds, IMPORT_SECONDS)  # of the import
    while True:
        try:
            future.set_result(ask(process, connection, seconds, job))
        except BaseException as error:  # noqa: BLE001 (raised where the result is read)
            future.set_exception(error)
            while job is None or process.returncode is not None:  # the run ends: nothing waits on
                jobs.get()[0].set_exception(error)
        (future, job), seconds = jobs.get(), limit_seconds


def ask(process, connection, seconds, job=None):
    """Returns the process's answer. Raises what start_processes says."""
    try:
        if job:
            connection.send(job)
        if not connection.poll(seconds):
            end(process)
            raise TooSlow(f"it took more than {seconds} s, and its process was killed")
        value, trace = connection.recv()
    except (EOFError, OSError):
        raise RuntimeError(f"its process has ended: {end(process)}") from None
    if trace:
        raise Remote(value, trace)
    return value


def end(process):
    """Kills a process, with what it has started; returns how it has ended."""
    os.killpg(process.pid, signal.SIGKILL)  # changes nothing if it is ending by itself
    code = process.wait()
    memory = ", perhaps because memory ran out" if code == -signal.SIGKILL else ""
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name + memory


def main():
    """In a process: imports the task's file, then answers calls until the parent has ended."""
    descriptor, parent, name, file = sys.argv[1:]
    end_with_parent(signal.SIGKILL)
    if os.getppid() != int(parent):
        return
    for number in (signal.SIGINT, signal.SIGTERM):  # a run that is stopped finishes its step
        signal.signal(number, lambda *_: None)  # what rewards start would inherit SIG_IGN
    connection, call, arguments = Connection(int(descriptor)), import_file, (name, file)
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            try:
                connection.send((call(*arguments), None))
            except BaseException as error:  # noqa: BLE001 (raised where the rewards are awaited)
                connection.send((repr(error), traceback.format_exc()))
            function, *arguments = connection.recv()
            call = getattr(sys.modules[name], function)


def import_file(name, file):
    spec = importlib.util.spec_from_file_location(name, file)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


if __name__ == "__main__":
    main()
