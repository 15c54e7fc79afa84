"""What a process prints: about the run, about itself, and what it waits for (see stop.Wait)."""

import contextlib
import os
import sys
import threading
import time

from tqdm import tqdm

SPEAK_SECONDS = 10  # between two lines about the same wait, or the steps made


def say(text):
    """Prints a line about the run: rank 0 alone, on stdout, above the progress bar."""
    if os.environ.get("RANK", "0") == "0":
        with contextlib.suppress(BrokenPipeError):  # the Ctrl-C that ends a run ends its `| tee`
            tqdm.write(f"{time.strftime('%H:%M:%S')} {text}")
            sys.stdout.flush()


def tell(text):
    """Prints a line about this process: any rank and thread, on stderr."""
    rank = f"rank {os.environ['RANK']}: " if "RANK" in os.environ else ""
    # Nobody reads any more; or a signal's handler speaks while the main thread does
    with contextlib.suppress(OSError, RuntimeError):
        print(f"{time.strftime('%H:%M:%S')} {rank}{text}", file=sys.stderr, flush=True)


def progress_bar(step, steps):
    """Returns rank 0's bar, as tqdm's; it draws nothing (`disable`) if stderr is no terminal."""
    hidden = os.environ.get("RANK", "0") != "0" or not sys.stderr.isatty()
    return tqdm(total=steps, initial=step, unit="step", disable=hidden)


def in_background(function, *arguments):
    """Returns the thread that runs the function; it does not keep the process alive."""
    thread = threading.Thread(target=function, args=arguments, daemon=True)
    thread.start()
    return thread


@contextlib.contextmanager
def announced(what):
    """Says every 10 s that the block waits for `what`, and since when."""
    over, start = threading.Event(), time.monotonic()

    def speak():
        while not over.wait(SPEAK_SECONDS):
            tell(f"waiting for {what} since {time.monotonic() - start:.0f} s")

    in_background(speak)
    try:
        yield
    finally:
        over.set()
