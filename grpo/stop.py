"""A run is asked to end, by a signal or by the end of what started it."""

import contextlib
import math
import os
import signal
import time

import psutil

from grpo.log import in_background, tell

AGAIN_SECONDS = 2  # between two Ctrl-C: deepspeed sends signals too, right after the first


class Stop:
    """What SIGINT and SIGTERM ask of the trainer: to finish its step, save it, and end. A thread
    hears them: a handler would wait while the main thread is in a collective."""

    def __init__(self):
        self.asked, self.at, self.listens = "", math.inf, False  # by what, and when

    @contextlib.contextmanager
    def listening(self):
        """In the block the signals do no more than that, but for a second Ctrl-C: it ends this
        process at once."""
        self.__init__()
        read, write = os.pipe()
        os.set_blocking(write, False)
        ends = (signal.SIGINT, signal.SIGTERM)
        before = {end: signal.getsignal(end) for end in ends}
        heard = [end for end in ends if before[end] != signal.SIG_IGN]
        in_background(self._hear, read, heard)
        wakeup = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        for end in heard:
            signal.signal(end, lambda *_: None)
        self.listens = True
        try:
            yield
        finally:
            self.listens = False
            for end in heard:
                signal.signal(end, before[end])
            signal.set_wakeup_fd(wakeup)
            os.close(write)

    def _hear(self, read, heard):
        while signals := os.read(read, 64):
            for number in signals:
                if number in heard:
                    self.ask(signal.Signals(number).name)
        os.close(read)

    def ask(self, by):
        now = time.monotonic()
        if by == "SIGTERM" and another_rank_ended():
            leave("another rank has ended, so this one does")
        if not self.asked:
            self.asked, self.at = by, now
            tell(f"{by}: this step is finished and saved, then the run ends; Ctrl-C again: at once")
        elif by == "SIGINT" and now - self.at > AGAIN_SECONDS:
            leave("a second SIGINT: ended without a checkpoint of the last steps")


stop = Stop()


def another_rank_ended():
    """Whether deepspeed, which then ends the others, has fewer processes than it started."""
    with contextlib.suppress(psutil.Error):
        launcher, ranks = psutil.Process().parent(), int(os.environ.get("LOCAL_SIZE", "0"))
        return is_launcher(launcher) and len(launcher.children()) < ranks
    return False


def is_launcher(process):
    with contextlib.suppress(psutil.Error):
        return any("deepspeed" in word for word in process.cmdline()[:4])
    return False


def leave(text):
    """Ends this process at once; deepspeed ends the other ranks of the machine."""
    tell(text)
    os._exit(1)
