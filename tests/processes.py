"""The scripts as processes, as the tests start them. Ranks are started as the deepspeed launcher
does it, by the environment, for the launcher takes ten seconds; test_recovery.py uses the real one.
Python scripts are forked from a process that has imported what they need, which takes each of them
seven seconds."""

import contextlib
import json
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from demo import free_port

STARTED = []  # see end_all
# Seconds for what must end. A test that hangs needs them; on a machine of CI's that others share, a
# start of 10 s may take 200
PATIENCE = 900
PRESET = Path(__file__).with_name("preset.py")
NURSERY = multiprocessing.get_context("forkserver")
IMPORTED = "ref_server grpo_ref_split deepspeed transformers.models.qwen2"
IMPORTED += " grpo.options.workers.worker"
NURSERY.set_forkserver_preload(IMPORTED.split())


def python(*words, **environment):
    """-> the ended process of a Python with these arguments, whose output is text."""
    options = {"cwd": PRESET.parent.parent, "env": os.environ | environment, "timeout": PATIENCE}
    command = [sys.executable, *map(str, words)]
    return subprocess.run(command, check=False, capture_output=True, text=True, **options)


def command_of(role, *presets):
    """-> the command for a script, or one of its functions, with other constants."""
    return [sys.executable, str(PRESET), role, json.dumps(presets)]


class Forked(NURSERY.Process):
    """A script that runs in a process forked from one that has the imports. As a Popen."""

    def __init__(self, argv, log, environment):
        arguments = (argv, str(log), os.environ | environment)
        super().__init__(target=become, args=arguments, daemon=True)
        self.start()

    def poll(self):
        return self.exitcode

    returncode = property(poll)

    def wait(self, timeout=None):
        self.join(timeout)
        if self.exitcode is None:
            raise subprocess.TimeoutExpired(self.name, timeout)
        return self.exitcode

    def send_signal(self, number):
        os.kill(self.pid, number)


def become(argv, log, environment):
    """What a new process does: runs a script as if Python had been started with it."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # forkserver's parent may ignore it
    with open(log, "a") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(environment.get("WORKING_FOLDER", "."))
    sys.argv[:] = argv
    sys.path[0] = os.path.dirname(argv[0])
    runpy.run_path(argv[0], run_name="__main__")


def start(command, log, **environment):
    """Starts a process in a new session; its output goes to the end of the file `log`."""
    command = [str(word) for word in command]
    Path(log).touch()
    if command[0] == sys.executable:
        process = Forked(command[1:], log, environment)
    else:
        with open(log, "a") as output:
            streams = {"stdout": output, "stderr": subprocess.STDOUT}
            own = {"env": os.environ | environment, "start_new_session": True}
            process = subprocess.Popen(command, **streams, **own)
    STARTED.append(process)
    return process


def end_all():
    """kill -9 of all that was started and still runs, after each test (conftest.py)."""
    kill(*(process for process in STARTED if process.poll() is None))
    STARTED.clear()


def start_ranks(ranks, command, log):
    """Starts the ranks of a process group; -> their processes."""
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": str(ranks)}
    group |= {"LOCAL_SIZE": str(ranks), "OMP_NUM_THREADS": "1"}  # as deepspeed calls it
    own = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
    return [start(command, log, **group, **environment) for environment in own]


def start_launcher(ranks, command, log):
    """Starts the ranks by the deepspeed launcher; -> its process."""
    deepspeed = [Path(sys.executable).with_name("deepspeed"), "--num_gpus", ranks]
    deepspeed += ["--master_port", free_port()]
    return start([*deepspeed, *command[1:]], log)


def launch(ranks, command, log):
    """Runs ranks to their end; -> their output. Fails with it if one fails."""
    processes, deadline = start_ranks(ranks, command, log), time.monotonic() + PATIENCE
    while any(p.poll() is None for p in processes) and not any(p.poll() for p in processes):
        assert time.monotonic() < deadline, Path(log).read_text()[-4000:]
        time.sleep(0.05)
    output = Path(log).read_text()
    assert not any(p.returncode for p in processes), output[-4000:]
    return output


def kill(*processes):
    """kill -9 of processes and of all that they started."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in [*psutil.Process(process.pid).children(recursive=True), process]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
        process.wait(PATIENCE)


def ranks_of(launcher):
    """-> the processes that train, below the launcher's."""
    found = []
    for process in psutil.Process(launcher.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            words = " ".join(process.cmdline())
            if "RANK" in process.environ() and PRESET.name in words and "launch" not in words:
                found.append(process)
    return found


def records(folder, name="metrics.jsonl"):
    """-> the records of a run's file, without one that is being written; [] if there is none."""
    path = Path(folder, name)
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


TIMES = ("time", "seconds", "tokens_per_second")


def learned(folder):
    """-> a run's metrics of steps, without times: the same whenever it learns the same."""
    steps = [r for r in records(folder) if "loss" in r]
    return [{k: v for k, v in r.items() if not k.startswith(TIMES)} for r in steps]


def wait_for_step(folder, step, process, log):
    """Returns when metrics.jsonl has the step; fails with the log if the process ends before."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        if any(r["step"] >= step for r in records(folder) if "loss" in r):
            return
        assert process.poll() is None, Path(log).read_text()[-3000:]
        time.sleep(0.02)
    raise AssertionError(Path(log).read_text()[-3000:])


QUICK = {
    "PROMPTS_PER_STEP": 4, "GROUP_SIZE": 4, "SAMPLE_BATCH": 8, "MAX_COMPLETION_TOKENS": 12,
    "MAX_PROMPT_TOKENS": 1024, "MICRO_BATCH_TOKENS": 2048, "LEARNING_RATE": 1e-3,
    "WARMUP_STEPS": 1, "STEPS": 3, "EVAL_QUESTIONS": 8,
    "SKIP_FLAT_GROUPS": False,  # a random model is never right
}  # fmt: skip
