"""Nobody waits in silence for a process that is gone, and nobody is left behind by one.

with timely(seconds, text): ...          # a reward function gets so long, and is no silent wait
with announced(text): ...                # what may wait says so every 10 s
with stop.listening(): ...               # SIGINT and SIGTERM: stop.asked, and the block goes on
meet(text)                               # until all ranks are here, however far apart they are
watch_launcher()                         # a rank ends when deepspeed, which started it, does
Heartbeats(rank, world, limit)           # and when another rank is not heard of any more
"""

import contextlib
import faulthandler
import math
import os
import signal
import sys
import threading
import time

import psutil
import torch.distributed as dist
from torch.distributed import distributed_c10d

SPEAK_SECONDS = 10  # between two words of what waits
LOOK_SECONDS = 5  # between two looks at the others
AGAIN_SECONDS = 2  # between two Ctrl-C: deepspeed sends signals too, right after the first
LEFT_SECONDS = 120  # for the last step and its checkpoint, when deepspeed is gone
ALARM_LOOK_SECONDS = 0.1  # and at the clock, while rewards are computed: they get so much longer


class TooSlow(BaseException):
    """Not an Exception: a task that catches those must not make a reward of it."""


@contextlib.contextmanager
def timely(seconds, what):
    """Raises TooSlow in the block after `seconds`; every 10 s that such blocks take says so. Code
    that never returns to Python can't be interrupted: the process then ends a little later, with
    its traceback. Main thread only; in others it does nothing. Blocks do not nest. (Not SIGALRM,
    which math-verify uses itself.)"""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    assert alarm.time == math.inf, "timely() within timely()"
    error, fired, over = TooSlow(f"{what} took more than {seconds} s"), [], False

    def interrupt(*_):
        fired.append(True)
        if not over:
            raise error

    before = signal.signal(signal.SIGUSR2, interrupt)
    try:
        try:
            # from a thread of C, which also runs while others hold the interpreter
            faulthandler.dump_traceback_later(seconds + 10, exit=True, file=sys.__stderr__)
            alarm.set(time.monotonic() + seconds, what)
            yield
        finally:
            over = True
            alarm.set(math.inf)  # so that it does not interrupt what comes after the block
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.signal(signal.SIGUSR2, before)
    if fired:  # and it was caught all the same
        raise error


class Alarm:
    """Sends the main thread SIGUSR2 soon after a time that may be moved, and says what that thread
    is busy with. One thread looks at it all the while: one for each block would wait for the
    interpreter, 5 ms and more, with every group's rewards, while the thread that uploads is busy.
    """

    def __init__(self):
        self.lock, self.thread, self.time = threading.Lock(), None, math.inf
        self.what = ""

    def set(self, at, what=""):
        with self.lock:
            self.time, self.what = at, what
        if not self.thread:
            self.thread = in_background(self._look)

    def _look(self):
        main, looked = threading.main_thread().ident, time.monotonic()
        busy = spent = 0.0
        while True:
            time.sleep(ALARM_LOOK_SECONDS)
            with self.lock:
                now, what = time.monotonic(), self.what
                if now > self.time:
                    self.time = math.inf
                    signal.pthread_kill(main, signal.SIGUSR2)
            # Over all blocks, less the time between: an evaluation's are short, but many
            passed, looked = now - looked, now
            busy = busy + passed if what else max(0.0, busy - passed)
            spent = spent if busy else 0.0
            if what and busy >= SPEAK_SECONDS:
                spent += busy
                tell(f"waiting for {what} {spent:.0f} s by now")
                busy = 0.0


alarm = Alarm()
os.register_at_fork(after_in_child=alarm.__init__)  # its thread stays behind, perhaps with the lock


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


class Meetings:
    """The process group's key-value store, this thread's own connection to it, and how many
    meetings there were."""

    group = store = None
    number = 0


def meet(what):
    """Returns when all ranks have called it; says every 10 s which are missing. For `what` may take
    long: a collective gives up after the process group's limit, also where all is well and one rank
    still samples or waits for a slow worker. A rank that is gone ends the others: Heartbeats; for
    one that lives there is no limit.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    if world == 1:
        return
    if Meetings.group is not distributed_c10d._get_default_store():  # another one than before
        Meetings.group, Meetings.number = distributed_c10d._get_default_store(), 0
        Meetings.store = Meetings.group.clone()
    Meetings.number += 1
    store, number, began = Meetings.store, Meetings.number, time.monotonic()
    said = began
    store.set(f"meeting/{rank}", str(number))
    if store.add("meeting/arrivals", 1) == number * world:
        store.set(f"meeting/over/{number}", "")
        store.delete_key(f"meeting/over/{number - 1}")
    while not store.check([f"meeting/over/{number}"]):  # store.wait() would log each time-out
        now = time.monotonic()
        if now - said >= 10:
            said = now
            keys = {r: f"meeting/{r}" for r in range(world)}
            there = [r for r, k in keys.items() if store.check([k]) and int(store.get(k)) >= number]
            missing = ", ".join(str(r) for r in keys if r not in there)
            tell(f"waiting for {what} since {now - began:.0f} s: not here yet is rank {missing}")
        time.sleep(min(0.05, 0.0005 + (now - began) / 20))


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


def watch_launcher():
    """Ends this process when one of the `deepspeed` processes above it is gone: it could not end
    what it had started. A trainer may finish its step, as after a signal."""
    above = [p for p in psutil.Process().parents() if is_launcher(p)]
    if above:
        in_background(end_with, above)
    elif "CROSS_RANK" in os.environ:  # deepspeed's launcher sets it, and was gone already
        leave("the deepspeed launcher is gone, so this rank ends")


def is_launcher(process):
    with contextlib.suppress(psutil.Error):
        return any("deepspeed" in word for word in process.cmdline()[:4])
    return False


def end_with(processes):
    while all(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes):
        time.sleep(1)
    if stop.listens:
        stop.ask("the end of deepspeed")
        time.sleep(LEFT_SECONDS)
    leave("the deepspeed launcher is gone, so this rank ends")


class Heartbeats:
    """Tells the other ranks that this one is alive, and ends it when one of them is not.

    They tell each other through the process group's key-value store. What a rank is busy with may
    take as long as it likes, if the others wait by meet(); a process that is stopped, or a machine
    that is gone, sends no beat. Rank 0 keeps the store: what asks it then waits for ever, so that a
    second thread looks after the one that asks.
    """

    def __init__(self, rank, world, limit_seconds):
        self.rank, self.world, self.limit = rank, world, limit_seconds
        self.heard = {r: (None, time.monotonic()) for r in range(world) if r != rank}
        self.said, self.over, self.answered = 0.0, False, time.monotonic()
        if world > 1:
            # a connection of its own: collectives may hold the other for long
            self.store = distributed_c10d._get_default_store().clone()
            in_background(self._run)
            in_background(self._look_after)

    def stop(self):
        """The run is over: the others may leave."""
        self.over = True

    def _run(self):
        beat = 0
        while not self.over:
            beat += 1
            try:
                self.store.set(f"heartbeat/{self.rank}", str(beat))
                for rank in self.heard:
                    self._listen(rank)
                self.answered = time.monotonic()
            except Exception as error:  # noqa: BLE001 (said, and the process ends)
                if not self.over:
                    leave(f"rank 0, which keeps the ranks together, does not answer: {error!r}")
            time.sleep(min(LOOK_SECONDS, self.limit / 10))

    def _look_after(self):
        while not self.over:
            silent = time.monotonic() - self.answered
            if silent > self.limit:
                leave(f"rank 0 did not answer for {silent:.0f} s: its process or machine is gone")
            if silent >= 10 + LOOK_SECONDS:
                tell(f"waiting for rank 0, which has not answered for {silent:.0f} s")
            time.sleep(min(LOOK_SECONDS, self.limit / 10))

    def _listen(self, rank):
        key = f"heartbeat/{rank}"
        beat = self.store.get(key) if self.store.check([key]) else None
        now, (last, since) = time.monotonic(), self.heard[rank]
        if beat != last:
            self.heard[rank] = beat, now
        elif now - since > self.limit:
            leave(
                f"rank {rank} was not heard of for {self.limit} s: its process or machine is gone"
            )
        elif now - since >= SPEAK_SECONDS and now - self.said >= SPEAK_SECONDS:
            self.said = now
            tell(f"waiting for rank {rank}, which was not heard of for {now - since:.0f} s")


def in_background(function, *arguments):
    thread = threading.Thread(target=function, args=arguments, daemon=True)
    thread.start()
    return thread


def tell(text):
    rank = f"rank {os.environ['RANK']}: " if "RANK" in os.environ else ""
    with contextlib.suppress(OSError):  # whoever read it may be gone, by the same Ctrl-C
        print(f"{time.strftime('%H:%M:%S')} {rank}{text}", file=sys.stderr, flush=True)


def leave(text):
    """Ends this process at once; deepspeed ends the other ranks of the machine."""
    tell(text)
    os._exit(1)
