"""The scripts as processes, as the tests start them. Ranks are started as the deepspeed launcher
does it, by the environment, for the launcher itself takes ten seconds; test_demo.py and
test_recovery.py use the real one."""

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil

from demo import free_port

PRESET = Path(__file__).with_name("preset.py")


def command_of(role, *presets):
    """-> the command for a script, or one of its functions, with other constants."""
    return [sys.executable, str(PRESET), role, json.dumps(presets)]


def start(command, log, **environment):
    """Starts a process in a session of its own; its output goes to the end of the file `log`."""
    with open(log, "a") as output:
        return subprocess.Popen(
            [str(word) for word in command],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | environment,
            start_new_session=True,
        )


def start_ranks(ranks, command, log):
    """Starts the ranks of a process group; -> their processes."""
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": str(ranks)}
    group |= {"LOCAL_SIZE": str(ranks), "OMP_NUM_THREADS": "1"}  # as deepspeed calls it
    return [start(command, log, RANK=str(r), LOCAL_RANK=str(r), **group) for r in range(ranks)]


def start_launcher(ranks, command, log):
    """Starts the ranks by the deepspeed launcher; -> its process."""
    deepspeed = [Path(sys.executable).with_name("deepspeed"), "--num_gpus", ranks]
    deepspeed += ["--no_local_rank", "--master_port", free_port()]
    return start([*deepspeed, *command[1:]], log)


def launch(ranks, command, log, timeout=200):
    """Runs ranks to their end; -> their output. Fails with it if one fails."""
    processes, deadline = start_ranks(ranks, command, log), time.monotonic() + timeout
    try:
        while any(p.poll() is None for p in processes):
            failed = any(p.poll() for p in processes) or time.monotonic() > deadline
            assert not failed, Path(log).read_text()[-4000:]
            time.sleep(0.05)
    finally:
        kill(*processes)
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
        process.wait(10)


def ranks_of(launcher):
    """-> the processes that train, below the launcher's own."""
    family = psutil.Process(launcher.pid).children(recursive=True)
    found = []
    for process in family:
        with contextlib.suppress(psutil.Error):
            if "RANK" in process.environ() and PRESET.name in " ".join(process.cmdline()):
                found.append(process)
    return [p for p in found if "launch" not in " ".join(p.cmdline())]
