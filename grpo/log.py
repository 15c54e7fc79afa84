"""What a process prints: about the run, itself, and what it waits for (see also stop.Wait)."""

import contextlib
import os
import select
import sys
import threading
import time

from tqdm import tqdm

SPEAK_SECONDS = 10  # between two lines about the same wait, or the steps made


def say(text):
    """Prints a line about the run: rank 0 alone, on stdout, above the progress bar."""
    if os.environ.get("RANK", "0") == "0":
        outlive_readers()
        tqdm.write(f"{time.strftime('%H:%M:%S')} {text}")
        sys.stdout.flush()


def progress_bar(step, steps):
    """Returns rank 0's bar, on stderr, as tqdm's; where that is no terminal but a file, a bar that
    draws nothing (`disable`)."""
    hidden = os.environ.get("RANK", "0") != "0" or not sys.stderr.isatty()
    return tqdm(total=steps, initial=step, unit="step", disable=hidden)


def tell(text):
    """Prints a line about this process: any rank and thread, on stderr."""
    rank = f"rank {os.environ['RANK']}: " if "RANK" in os.environ else ""
    with contextlib.suppress(OSError):  # Ctrl-C may have ended the reader, a `tee`, as well
        print(f"{time.strftime('%H:%M:%S')} {rank}{text}", file=sys.stderr, flush=True)


def outlive_readers():
    """Redirects stdout and stderr to /dev/null once their reader is gone: the Ctrl-C that asks us
    to save the run also ends a `tee`."""
    for descriptor in (1, 2):
        output = select.poll()
        output.register(descriptor, 0)
        if output.poll(0):  # an error, or the other end is closed
            with open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), descriptor)


class Lasting:
    """A text stream that survives its reader, also where that goes in the middle of a write."""

    def __init__(self, stream):
        self.stream = stream

    def __getattr__(self, name):
        return getattr(self.stream, name)

    def write(self, text):
        return self._try(self.stream.write, text)

    def flush(self):
        return self._try(self.stream.flush)

    def _try(self, call, *arguments):
        try:
            return call(*arguments)
        except BrokenPipeError:
            outlive_readers()


@contextlib.contextmanager
def lasting_output():
    """In the block nothing that is printed, by whatever library, ends a run that is to be saved."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = map(Lasting, before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


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
