"""A process that deepspeed or torchrun has started ends with its launcher, and rank 0 logs which
ranks are behind."""

import contextlib
import json
import os
import select
import signal
import time

import psutil
import torch.distributed as dist
from torch.distributed import distributed_c10d

from grpo.log import in_background, tell

LAUNCHERS = ("deepspeed", "torchrun", "torch.distributed.run")
BEHIND_SECONDS = 30  # between two lines about which rank is behind


def end_with_launchers():
    """Stops this process once its launcher, deepspeed or torchrun, has ended: a launcher that was
    killed can't stop the processes that it started. On Linux only."""

    def is_launcher(process):
        with contextlib.suppress(psutil.Error):
            return any(name in " ".join(process.cmdline()[:4]) for name in LAUNCHERS)

    def watch(launchers):
        select.select(launchers, [], [])  # until one has ended
        tell("the launcher has ended, so this rank ends")
        os.kill(os.getpid(), signal.SIGTERM)

    above = [process.pid for process in psutil.Process().parents() if is_launcher(process)]
    if above and hasattr(os, "pidfd_open"):
        in_background(watch, list(map(os.pidfd_open, above)))


class RollCall:
    """Each rank counts the parts of the run and the collectives that it has reached. While rank 0
    stays at one of them, it logs every 30 s which ranks have not reached it, and their part."""

    def __init__(self):
        """Collective: each rank makes one."""
        # New connections, as a collective may block the process group's connection for long
        store = distributed_c10d._get_default_store()
        self.store, watching = store.clone(), store.clone()
        self.number, self.part = 0, ""
        self.come("the start")
        dist.barrier()  # collective
        if dist.get_rank() == 0:
            in_background(self._watch, watching)

    def come(self, part=None):
        self.number, self.part = self.number + 1, part or self.part
        self.store.set(f"at/{dist.get_rank()}", json.dumps([self.number, self.part]))

    def _watch(self, store):
        number, looks = 0, 0
        with contextlib.suppress(dist.DistError):  # the others have left
            while True:
                time.sleep(BEHIND_SECONDS)
                number, looks = self.number, looks + 1 if self.number == number else 0
                places = [json.loads(store.get(f"at/{r}")) for r in range(dist.get_world_size())]
                behind = [f"{r} ({part})" for r, (n, part) in enumerate(places) if n < number]
                if looks and behind:
                    tell(f"waited {looks * BEHIND_SECONDS} s so far for rank {', '.join(behind)}")
