"""What the benchmarks of this folder share: processes that train, peak memory, and the facts that
stand with a number."""

import ctypes
import importlib.metadata
import multiprocessing
import os
import platform
import re
import resource
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from grpo.devices import accelerator, is_out_of_memory
from grpo.report import commit

ROOT = Path(__file__).resolve().parent.parent
CORES = len(os.sched_getaffinity(0))
DEVICE = accelerator() or "cpu"
KIND = "cpu" if DEVICE == "cpu" else "gpu"  # by which sizes are chosen


def facts(*packages):
    """-> with which command, on what, with which versions and commit."""
    versions = [f"Python {platform.python_version()}"]
    for package in packages:
        try:
            versions.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            versions.append(f"{package} not installed")
    command = " ".join([f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])
    return f"`python {command}`: {machine()}, {', '.join(versions)}, {commit()}."


def machine():
    """-> what the benchmark runs on: the GPU's name, or the cores."""
    if KIND == "gpu":
        return torch.get_device_module(DEVICE).get_device_name()
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())[1]
    return f"{CORES} cores of {cpu}"


@contextmanager
def trained(logs, others, trainer, ranks=1, threads=1):
    """Starts the commands `others`, by name, and the `trainer`, a script and its arguments; with
    several `ranks` deepspeed starts it. When the trainer has ended without an error the block runs,
    with the peak of that process's memory in bytes; then all processes are ended. Each prints into
    a file: `logs`, its name, ".log". `threads` are those of a process outside forward and
    backward."""
    from demo import free_port, start

    launcher = [sys.executable]
    if ranks > 1:
        launcher = [str(Path(sys.executable).with_name("deepspeed")), "--num_gpus", str(ranks)]
        launcher += ["--no_local_rank", "--master_port", free_port(), "--log_level", "warning"]
    processes = []
    try:
        for name, command in (others | {"trainer": [*launcher, *trainer]}).items():
            with open(f"{logs}{name}.log", "w") as log:
                environment = {"OMP_NUM_THREADS": str(threads)}
                processes.append(start(command, log, threads=environment))
        peak = 0
        while processes[-1].poll() is None:
            with suppress(OSError, TypeError):  # it has ended meanwhile
                peak = in_bytes(f"/proc/{processes[-1].pid}/status", "VmHWM")
            time.sleep(0.2)
        if processes[-1].returncode:
            tail = Path(f"{logs}trainer.log").read_text()[-2000:]
            raise SystemExit(f"the trainer failed: {tail}")
        yield peak
    finally:
        for process in reversed(processes):
            process.terminate()
            process.wait()


def apart(function, *args, threads=CORES):
    """-> function(*args), on a CPU in a process forked for it; None if it failed, for memory."""
    if KIND == "gpu":
        try:
            return function(*args)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            return None
    receiver, sender = multiprocessing.Pipe(duplex=False)

    def child():
        torch.set_num_threads(threads)  # the parent has one: threads would not survive the fork
        sender.send(function(*args))

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    sender.close()  # so that recv ends when the child does
    try:
        return receiver.recv()
    except EOFError:
        return None
    finally:
        process.join()


def peak_bytes(run, warm_up):
    """-> the peak memory of run() beyond what is allocated before it. CUDA: of torch's allocator;
    CPU: the high-water mark of resident memory. warm_up() allocates what is allocated only once."""
    if KIND == "gpu":
        warm_up()
        torch.accelerator.empty_cache()
        torch.accelerator.reset_peak_memory_stats()
        before = torch.accelerator.memory_allocated()
        run()
        return torch.accelerator.max_memory_allocated() - before
    libc = ctypes.CDLL(None)
    libc.mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD: what is freed goes back at once
    warm_up()
    libc.malloc_trim(0)  # so does what the heap kept from before: used again, it would not count
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    before = in_bytes("/proc/self/status", "VmRSS")
    room = in_bytes("/proc/self/status", "VmSize") + in_bytes("/proc/meminfo", "MemAvailable")
    resource.setrlimit(resource.RLIMIT_AS, (room, room))
    run()
    return in_bytes("/proc/self/status", "VmHWM") - before


def in_bytes(path, key):
    return 1024 * int(re.search(rf"^{key}:\s+(\d+) kB", Path(path).read_text(), re.MULTILINE)[1])
