"""Rewards in processes of their own, beside the sampling: REWARD_PROCESSES.

    submit = start_processes(task, number=4, limit_seconds=60)
    submit("rewards", item, text).result()    # what the task's function returns

A process imports the task's file, and neither torch nor anything that knows of a GPU. A call that
takes too long, in C code too, is killed, with all that it has started; after that, or when one dies
by itself, the run ends. They end with the process that started them, whatever ends that.
"""

import ctypes
import importlib.util
import math
import multiprocessing
import os
import pickle
import queue
import signal
import subprocess
import sys
import traceback
from concurrent.futures import Future
from dataclasses import replace
from multiprocessing.connection import Connection
from types import SimpleNamespace

from grpo.log import in_background, lasting_output
from grpo.sampling.reward_timeout import TooSlow

IMPORT_SECONDS = 600  # for the task's import, which may load a judge
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}


class Died(Exception):
    """A process that computes rewards has ended by itself."""


class Remote(Exception):
    """What the task raised in its process: that by name, and the traceback there as text."""

    def __init__(self, said, trace):
        super().__init__(f"in the process that computes rewards:\n{trace}")
        self.said = said

    def __repr__(self):
        return self.said


# --- Here ---------------------------------------------------------------------------
def begin_rewards(recipe, item, texts):
    """Returns (recipe, futures): what reward_group is to be given for these completions, and what
    it then waits for. Without processes that is the recipe itself, and nothing."""
    submit, task, functions, futures = recipe.reward_processes, recipe.task, {}, []
    if not submit:
        return recipe, futures
    if hasattr(task, "rewards"):
        each = [submit("rewards", item, text) for text in texts]
        results = iter(each)
        functions["rewards"] = lambda item, text: next(results).result()
        futures += each
    if hasattr(task, "group_rewards"):
        whole = submit("group_rewards", item, texts)
        functions["group_rewards"] = lambda item, texts: whole.result()
        futures.append(whole)
    # The processes have the time limit, so that waiting for a turn does not count
    waiting = recipe.others(REWARD_TIMEOUT_SECONDS=math.inf)
    return replace(waiting, task=SimpleNamespace(**functions)), futures


def start_processes(task, number, limit_seconds):
    """Returns submit(function, *arguments): it returns the Future of that function of the task in
    the next of `number` processes that is free. To be called in the main thread, with whose end
    they end. The Future raises Remote, TooSlow or Died."""
    jobs = queue.SimpleQueue()
    for _ in range(number):
        in_background(serve, *start_process(task), jobs, limit_seconds)

    def submit(*job):
        future = Future()
        jobs.put((future, job))
        return future

    return submit


def start_process(task):
    """Returns (process, connection)."""
    here, there = multiprocessing.Pipe()
    command = [sys.executable, "-m", "grpo.sampling.reward_processes", str(there.fileno())]
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    process = subprocess.Popen(
        [*command, str(os.getpid()), task.__name__, task.__file__],
        env={"OMP_NUM_THREADS": "1"} | os.environ | {"PYTHONPATH": paths, **NO_GPU},
        pass_fds=[there.fileno()],
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # no Ctrl-C reaches it; it is killed with what it has started
    )
    there.close()
    return process, here


def serve(process, connection, jobs, limit_seconds):
    """Gives a process one job after another. Once it has ended, each job gets its error."""
    ready = None
    while True:
        future, job = jobs.get()
        try:
            ready = ready or ask(process, connection, max(limit_seconds, IMPORT_SECONDS))
            future.set_result(ask(process, connection, limit_seconds, job)["value"])
        except BaseException as error:  # noqa: BLE001 (raised where the result is read)
            future.set_exception(error)
            while not ready or process.returncode is not None:  # the run ends: nothing waits on
                jobs.get()[0].set_exception(error)


def ask(process, connection, seconds, job=None):
    """Returns the process's answer, {"value": ...}. Raises what start_processes says."""
    try:
        if job:
            connection.send_bytes(pickle.dumps(job))
        answer = connection.recv_bytes() if connection.poll(seconds) else None
    except (EOFError, OSError):
        end(process)
        raise Died(how_it_ended(process.returncode)) from None
    if answer is None:
        end(process)
        raise TooSlow(f"it took more than {seconds} s, and its process was killed")
    answer = pickle.loads(answer)
    if "value" not in answer:
        raise Remote(**answer)
    return answer


def end(process):
    os.killpg(process.pid, signal.SIGKILL)  # changes nothing where it is ending by itself
    process.wait()


def how_it_ended(code):
    if code >= 0:
        return f"its process has ended itself, with exit code {code}"
    memory = ", perhaps because memory ran out" if code == -signal.SIGKILL else ""
    return f"its process was ended by {signal.Signals(-code).name}{memory}"


# --- In the process -----------------------------------------------------------------
def main():
    """Answers one call after another, until the process that started this one has ended."""
    descriptor, parent, name, file = sys.argv[1:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: also in C code
    if os.getppid() != int(parent):
        return
    for number in (signal.SIGINT, signal.SIGTERM):  # a run that is asked to end finishes its step
        signal.signal(number, lambda *_: None)  # SIG_IGN would be that of what rewards start
    connection, call, arguments = Connection(int(descriptor)), import_file, (name, file)
    with lasting_output():
        while True:
            answer = attempt(call, *arguments)
            try:
                connection.send_bytes(answer)
                function, *arguments = pickle.loads(connection.recv_bytes())
            except (EOFError, ConnectionError):
                return
            call = getattr(sys.modules[name], function)


def import_file(name, file):
    spec = importlib.util.spec_from_file_location(name, file)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


def attempt(call, *arguments):
    """Returns {"value": what the call returns}, pickled, or what it raised, and where."""
    try:
        return pickle.dumps({"value": call(*arguments)})
    except BaseException as error:  # noqa: BLE001 (raised where the rewards are awaited)
        return pickle.dumps({"said": repr(error), "trace": traceback.format_exc()})


if __name__ == "__main__":
    main()
