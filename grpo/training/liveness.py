"""Nobody waits in silence for a process that is gone, and nobody is left behind by one.

with timely(seconds, text): ...          # a reward function gets so long, and is no silent wait
with announced(text): ...                # what may wait says so every 10 s
with stop.listening(): ...               # SIGINT and SIGTERM: stop.asked, and the block goes on
meet(text)                               # until all ranks are here, however far apart they are
watch_launcher()                         # a rank ends when deepspeed, which started it, does
Heartbeats(rank, world, limit)           # and when another rank is not heard of any more
"""

import os
import time

import psutil
import torch.distributed as dist
from torch.distributed import distributed_c10d

from grpo.log import SPEAK_SECONDS, in_background, tell
from grpo.stop import is_launcher, leave, stop

LOOK_SECONDS = 5  # between two looks at the others
LEFT_SECONDS = 120  # for the last step and its checkpoint, when deepspeed is gone


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


def watch_launcher():
    """Ends this process when one of the `deepspeed` processes above it is gone: it could not end
    what it had started. A trainer may finish its step, as after a signal."""
    above = [p for p in psutil.Process().parents() if is_launcher(p)]
    if above:
        in_background(end_with, above)
    elif "CROSS_RANK" in os.environ:  # deepspeed's launcher sets it, and was gone already
        leave("the deepspeed launcher is gone, so this rank ends")


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
