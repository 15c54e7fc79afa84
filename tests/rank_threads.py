"""Ranks as threads of one process, for the tests of what ranks do together."""

import functools
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist

PLACES = ("get_rank", "get_world_size", "all_gather_object", "all_reduce", "barrier")
REDUCE = {dist.ReduceOp.SUM: torch.add, dist.ReduceOp.MAX: torch.maximum}


class Ranks:
    """A process group of threads, in the place of torch.distributed. Where they do not call the
    same collectives, all end with an error."""

    def __init__(self, monkeypatch, number=2, seconds=60):
        self.local, self.meeting = threading.local(), threading.Barrier(number, timeout=seconds)
        self.called, self.values = [None] * number, [None] * number
        for name in PLACES:
            monkeypatch.setattr(dist, name, getattr(self, name))

    # --- In the place of torch.distributed ----------------------------------------------
    def get_rank(self):
        return getattr(self.local, "rank", 0)

    def get_world_size(self):
        return len(self.values)

    def barrier(self):
        self.meet("barrier")

    def all_gather_object(self, everyone, mine):
        self.values[self.get_rank()] = pickle.dumps(mine)
        self.meet("gather")
        everyone[:] = map(pickle.loads, self.values)
        self.meet("gather's end")

    def all_reduce(self, tensor, op=dist.ReduceOp.SUM):
        self.values[self.get_rank()] = tensor.clone()
        self.meet(f"reduce {tuple(tensor.shape)} by {op}")
        tensor.copy_(functools.reduce(REDUCE[op], self.values))
        self.meet("reduce's end")

    def meet(self, what):
        """All ranks must call the same; so a backward pass does under ZeRO-2."""
        self.called[self.get_rank()] = what
        self.meeting.wait()
        assert len(set(self.called)) == 1, self.called
        self.meeting.wait()

    # --- The tests' side ------------------------------------------------------------------
    def run(self, function):
        """-> what function(rank) returns on each; raises what the first to fail has raised."""
        errors = []

        def of_rank(rank):
            self.local.rank = rank
            try:
                return function(rank)
            except BaseException as error:
                errors.append(error)
                self.meeting.abort()  # the others need not wait
                raise

        with ThreadPoolExecutor(len(self.called)) as pool:
            futures = [pool.submit(of_rank, rank) for rank in range(len(self.called))]
        if errors:
            raise errors[0]
        return [future.result() for future in futures]
