"""Log lines of a process: about the run, about itself, and about what it waits for."""

import contextlib
import os
import sys
import threading
import time

from tqdm import tqdm

SPEAK_SECONDS = 10  # between two log lines about the same wait, or about the progress


def say(text):
    """Logs a line about the run. Only rank 0 prints it, on stdout, above the progress bar."""
    if os.environ.get("RANK", "0") == "0":
        with contextlib.suppress(OSError, ValueError):  # a `| tee` may end before the run
            tqdm.write(f"{time.strftime('%H:%M:%S')} {text}")
            sys.stdout.flush()


def tell(text):
    """Logs a line about this process, on stderr. Any rank and thread may call it."""
    rank = f"rank {os.environ['RANK']}: " if "RANK" in os.environ else ""
    # The reader has gone, or a signal handler prints while the main thread does
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        print(f"{time.strftime('%H:%M:%S')} {rank}{text}", file=sys.stderr, flush=True)


def in_background(function, *arguments):
    """Runs the function in a daemon thread, which it returns."""
    thread = threading.Thread(target=function, args=arguments, daemon=True)
    thread.start()
    return thread


@contextlib.contextmanager
def announced(what):
    """Logs every 10 s that the block is waiting for `what`, and for how long."""
    over, start = threading.Event(), time.monotonic()

    def speak():
        while not over.wait(SPEAK_SECONDS):
            tell(f"waited {time.monotonic() - start:.0f} s so far for {what}")

    in_background(speak)
    try:
        yield
    finally:
        over.set()
