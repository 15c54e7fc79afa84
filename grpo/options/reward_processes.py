"""REWARD_PROCESSES: calls a task's functions in other processes, in parallel with sampling.

    submit = start_processes(task, number=4, limit_seconds=60)
    submit("rewards", item, text).result()    # what the task's function returns

A reward process imports only the task's file: no torch, and it sees no GPU. If a call takes too
long, its process is killed with all its children, even within C code, and the run ends; the run
also ends if a process dies. Reward processes always end with the process that started them.
(multiprocessing would import the trainer's script in each process: 0.4 GB and 3 s.)
"""

import contextlib
import multiprocessing
import os
import queue
import signal
import subprocess
import sys
import traceback
from concurrent.futures import Future
from multiprocessing.connection import Connection

from grpo import log
from grpo.rewards import TooSlow, import_file
from grpo.stop import end_with_parent

IMPORT_SECONDS = 600  # time limit of the task's import, which may load a judge model


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

    submit.takes, submit.limit = lambda function: True, None  # processes have separate limits
    return submit


def start_process(task):
    """Returns (process, connection). Its first answer confirms that it has imported the task."""
    here, there = multiprocessing.Pipe()
    module, parent = "grpo.options.reward_processes", str(os.getpid())
    command = [sys.executable, "-m", module, str(there.fileno()), parent]
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    environment = {"PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.Popen(
        [*command, task.__name__, task.__file__],
        env={"OMP_NUM_THREADS": "1"} | os.environ | environment,
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


if __name__ == "__main__":
    main()
