"""Ends a process after a signal, or with its parent."""

import contextlib
import ctypes
import functools
import math
import os
import signal
import sys
import time

from grpo.log import tell

PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>
STOPS = signal.SIGINT, signal.SIGTERM
# Slurm, LSF or Grid Engine announce a job's end by these, and a shell that its terminal is gone
ANNOUNCE = signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU
AGAIN_SECONDS = 2  # before it a second Ctrl-C does not count, as deepspeed forwards the first


class Stop:
    """A stop requested by a signal: finish the step, save it, and end."""

    def __init__(self):
        self.asked, self.at = "", math.inf  # name and time of the first signal
        self.before = {}  # the handlers that were there, by signal, while this process listens

    @contextlib.contextmanager
    def listening(self, at_once=False):
        """In the block a signal only sets `asked`, unless it was ignored (nohup) or has a handler;
        a second Ctrl-C ends the process at once. `at_once`: a signal ends the block, as Ctrl-C."""
        self.asked, self.at = "", math.inf
        ends = [s for s in STOPS if signal.getsignal(s) != signal.SIG_IGN]
        ends += [s for s in ANNOUNCE if signal.getsignal(s) == signal.SIG_DFL]
        self._let_children_end()
        hear = signal.default_int_handler if at_once else self._hear
        self.before = {number: signal.signal(number, hear) for number in ends}
        try:
            yield
        finally:
            before, self.before = self.before, {}
            for number, handler in before.items():
                signal.signal(number, handler)

    @functools.cache  # noqa: B019 (once per process)
    def _let_children_end(self):
        """SIGTERM ends a child that a task forks, as Pool.terminate() expects. It is blocked until
        then: Python would lose one that comes before, and the parent would wait for ever."""
        block, unblock = (
            functools.partial(signal.pthread_sigmask, how, [signal.SIGTERM])
            for how in (signal.SIG_BLOCK, signal.SIG_UNBLOCK)
        )

        def begin():
            if self.before:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
            unblock()

        os.register_at_fork(before=block, after_in_parent=unblock, after_in_child=begin)

    def _hear(self, number, _):
        by = signal.Signals(number).name
        if not self.asked:
            self.asked, self.at = by, time.monotonic()
            tell(f"{by}: the run ends after this step; a second Ctrl-C ends it at once")
        elif number == signal.SIGINT and time.monotonic() - self.at > AGAIN_SECONDS:
            leave("second SIGINT: the run ends at once; steps since the last checkpoint are lost")


stop = Stop()


def leave(text):
    """Ends this process at once; deepspeed ends the other ranks of the machine."""
    tell(text)
    os._exit(1)


def end_with_parent(number):
    """Makes the kernel send this process a signal when its parent ends, even by SIGKILL and while C
    code runs. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
