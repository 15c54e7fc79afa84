"""How a process speaks, and how it waits aloud."""

import contextlib
import os
import select
import sys
import threading
import time

from tqdm import tqdm

SPEAK_SECONDS = 10  # between two words of what waits


@contextlib.contextmanager
def announced(what):
    """Says every 10 s that the block is waiting, and for what."""
    over, began = threading.Event(), time.monotonic()

    def speak():
        while not over.wait(SPEAK_SECONDS):
            tell(f"waiting for {what} since {time.monotonic() - began:.0f} s")

    in_background(speak)
    try:
        yield
    finally:
        over.set()


def in_background(function, *arguments):
    thread = threading.Thread(target=function, args=arguments, daemon=True)
    thread.start()
    return thread


def tell(text):
    rank = f"rank {os.environ['RANK']}: " if "RANK" in os.environ else ""
    with contextlib.suppress(OSError):  # whoever read it may be gone, by the same Ctrl-C
        print(f"{time.strftime('%H:%M:%S')} {rank}{text}", file=sys.stderr, flush=True)


def say(text):
    """Prints on rank 0, above the progress bar."""
    if int(os.environ.get("RANK", "0")) == 0:
        outlive_readers()
        tqdm.write(f"{time.strftime('%H:%M:%S')} {text}")
        sys.stdout.flush()


def outlive_readers():
    """Output goes nowhere from when what read it is gone: a `tee`, by the Ctrl-C that has us save
    the run."""
    for descriptor in (1, 2):
        output = select.poll()
        output.register(descriptor, 0)
        if output.poll(0):  # an error, or the other end is closed
            with open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), descriptor)
