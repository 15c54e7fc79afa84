"""A task whose rewards do what a completion's text names."""

import ctypes
import os
import signal
import sys
import time
from pathlib import Path


def load(split):
    return [{"question": "?"}]


def messages(item):
    return [{"role": "user", "content": item["question"]}]


def rewards(item, text):
    word, _, rest = text.partition(" ")
    return {"correctness": DONE[word](rest) or 0.0, "format": float(len(text))}


def group_rewards(item, texts):
    return [{"longest": float(len(text) == max(map(len, texts)))} for text in texts]


def look(_):
    """-> whether nothing here knows of a GPU."""
    return "torch" not in sys.modules and os.environ["CUDA_VISIBLE_DEVICES"] == ""


def meet(folder):
    """Waits until another process is here as well."""
    Path(folder, str(os.getpid())).touch()
    while len(os.listdir(folder)) < 2:
        time.sleep(0.01)


def hang(_):
    """In C, where no signal of Python's is handled, and holding the interpreter."""
    ctypes.pythonapi.PyThread_acquire_lock.restype = ctypes.c_int
    allocate = ctypes.pythonapi.PyThread_allocate_lock
    allocate.restype = ctypes.c_void_p
    lock = ctypes.c_void_p(allocate())
    while True:
        ctypes.pythonapi.PyThread_acquire_lock(lock, 1)


def fail(_):
    raise KeyError("answer")


DONE = {
    "": lambda _: 0.0,
    "look": look,
    "meet": meet,
    "hang": hang,
    "fail": fail,
    "sleep": lambda seconds: time.sleep(float(seconds)),
    "exit": lambda code: os._exit(int(code)),
    "crash": lambda _: os.kill(os.getpid(), signal.SIGSEGV),
    "pid": lambda _: os.getpid(),
    "odd": lambda _: sys.modules,  # which can't be pickled
}
