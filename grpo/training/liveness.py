"""Ranks wait for each other, name who is missing, and end when a rank or their launcher is gone."""

import contextlib
import functools
import json
import os
import time
from pathlib import Path

import psutil
import torch.distributed as dist
from torch.distributed import distributed_c10d

from grpo.log import SPEAK_SECONDS, in_background, tell
from grpo.stop import leave, stop

LOOK_SECONDS = 5  # between two looks at the other ranks
LEFT_SECONDS = 120  # for the last step and its checkpoint, when the launcher is gone


@functools.lru_cache(maxsize=1)  # a process group that is initialised anew has another store
def own_connection(store):
    """Returns the main thread's own connection to the process group's key-value store."""
    return store.clone()


def meet(what):
    """Collective: returns when all ranks have called it; says every 10 s which are missing.

    It precedes a collective that ranks reach at different times, where `what` may take long: one
    that still samples or waits for a slow worker would exceed the process group's time limit. Here
    a rank that is alive is waited for without limit; Heartbeats end the wait for one that is gone.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    if world == 1:
        return
    store = own_connection(distributed_c10d._get_default_store())
    began = said = time.monotonic()
    meeting = store.add(f"meeting/{rank}", 1)  # its number: no rank leaves one before all are here
    store.add("meeting/arrivals", 1)
    while store.add("meeting/arrivals", 0) < meeting * world:  # wait() would log each time-out
        now = time.monotonic()
        if now - said >= SPEAK_SECONDS:
            said = now
            late = [str(r) for r in range(world) if store.add(f"meeting/{r}", 0) < meeting]
            since = f"since {now - began:.0f} s"
            tell(f"waiting for {what} {since}: not here yet is rank {', '.join(late)}")
        time.sleep(min(0.05, 0.0005 + (now - began) / 20))


def gathered(value, what):
    """Collective: returns every rank's `value`, by rank, once all are here; `what` as for meet."""
    meet(what)
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


@contextlib.contextmanager
def explained():
    """Raises RuntimeError, with what to do, where a collective in the block fails because another
    rank is gone: torch's own error says "connection reset" or worse."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and "gloo" not in str(error):
            raise
        raise RuntimeError(
            "another rank has ended, and its output says why, or its machine does not answer; start"
            f" all ranks again to resume: {error}"
        ) from error


# --- The launcher -------------------------------------------------------------------
def watch_launcher():
    """Ends this process when a deepspeed or torchrun process above it is gone, and so can't end the
    processes that it started. A trainer may finish its step, as after a signal."""
    above = [p for p in psutil.Process().parents() if is_launcher(p)]
    if above:
        in_background(end_with, above)
    elif "CROSS_RANK" in os.environ:  # set by deepspeed's launcher, which is gone already
        leave("the launcher is gone, so this rank ends")


def is_launcher(process):
    with contextlib.suppress(psutil.Error):
        words = " ".join(process.cmdline()[:4])
        return any(name in words for name in ("deepspeed", "torchrun", "torch.distributed.run"))
    return False


def end_with(processes):
    """Ends this process when one of `processes` has ended."""
    while all(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes):
        time.sleep(1)
    if stop.listens:
        stop.ask("the end of the launcher")
        time.sleep(LEFT_SECONDS)
    leave("the launcher is gone, so this rank ends")


# --- The other ranks ----------------------------------------------------------------
class Heartbeats:
    """Tells the other ranks that this one is alive, and ends it when one of them is not.

    Beats go through the process group's key-value store, in a thread: a rank may work as long as it
    likes, but a process that is stopped or a machine that is gone sends none. Rank 0 keeps the
    store, without which a request blocks for ever, so a second thread watches the first. A process
    of this machine that has ended is noticed at once, with no launcher to end the others, too.
    """

    def __init__(self, rank, world, limit_seconds):
        self.rank, self.limit = rank, limit_seconds
        self.pause = min(LOOK_SECONDS, limit_seconds / 10)
        self.answered = now = time.monotonic()  # when the store last did
        self.heard = {r: (0, now) for r in range(world) if r != rank}  # beats, since when so many
        self.said, self.over = 0.0, False
        if world > 1:
            # A connection of its own: collectives may hold the other for long
            self.store = distributed_c10d._get_default_store().clone()
            self.store.set(f"process/{rank}", json.dumps([this_machine(), *identity(os.getpid())]))
            in_background(self._run)
            in_background(self._watch_store)

    def stop(self):
        """The run is over: the other ranks may leave."""
        self.over = True

    def _run(self):
        while not self.over:
            try:
                self.store.add(f"heartbeat/{self.rank}", 1)
                for rank in self.heard:
                    self._listen(rank)
                self.answered = time.monotonic()
            except Exception as error:  # noqa: BLE001 (said, and the process ends)
                if not self.over:
                    leave(f"rank 0, which keeps the ranks together, does not answer: {error!r}")
            time.sleep(self.pause)

    def _watch_store(self):
        while not self.over:
            silent = time.monotonic() - self.answered
            if silent > self.limit:
                leave(f"rank 0 did not answer for {silent:.0f} s: its process or machine is gone")
            if silent >= SPEAK_SECONDS + LOOK_SECONDS:
                tell(f"waiting for rank 0, which has not answered for {silent:.0f} s")
            time.sleep(self.pause)

    def _listen(self, rank):
        beats, (known, since) = self.store.add(f"heartbeat/{rank}", 0), self.heard[rank]
        now = time.monotonic()
        if beats != known:
            self.heard[rank] = beats, now
        elif self._has_ended(rank) and not self.over:  # in this order: it may leave after the end
            leave(f"the process of rank {rank} has ended, so this rank ends")
        elif now - since > self.limit:
            silent = f"rank {rank} was not heard from for {self.limit} s"
            leave(f"{silent}: its process or machine is gone")
        elif now - since >= SPEAK_SECONDS <= now - self.said:
            self.said = now
            tell(f"waiting for rank {rank}, which was not heard from for {now - since:.0f} s")

    def _has_ended(self, rank):
        if not self.store.check([f"process/{rank}"]):  # it has just begun
            return False
        machine, *process = json.loads(self.store.get(f"process/{rank}"))
        return machine == this_machine() and identity(process[0]) != process


@functools.cache
def this_machine():
    """Returns what two processes have in common if they see one another's process ids."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    return boot.strip() + os.readlink("/proc/self/ns/pid")


def identity(pid):
    """Returns [pid, its start in ticks since boot], as another process may get the id; [pid, None]
    if it has ended, perhaps without its parent's notice."""
    with contextlib.suppress(OSError):
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
        if state != "Z":
            return [pid, int(fields[18])]  # psutil's time moves when the clock is set
    return [pid, None]
