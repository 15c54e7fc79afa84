"""The processes that train together: how one becomes a rank, and what ranks exchange.

A function marked "Collective" must be called by every rank; if one skips it, the others hang. If a
rank ends, the others' gloo collectives fail, and the launcher ends those in NCCL's. If one hangs,
the others wait until the group's time limit, which is logged at the start, or NCCL's watchdog.
"""

import contextlib
import itertools
import os
import signal
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist

from grpo.log import announced, say
from grpo.models import own_device
from grpo.stop import end_with_parent

LEAST_SECONDS = 1800  # the least time limit: a single rank may sample, evaluate or save for long


# --- A process becomes a rank ---------------------------------------------------------
def stand_alone():
    """Makes a process that no launcher has started the only rank; otherwise DeepSpeed would look
    for MPI."""
    if "RANK" in os.environ:
        return
    # MASTER_PORT 0: the system picks a free one
    only = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_SIZE": "1"}
    os.environ.update(only | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"})
    if (gpus := torch.accelerator.device_count()) > 1:
        say(f"this process trains on one of {gpus} GPUs; start it with `deepspeed` to use them all")


def join_ranks(wait_limit_seconds):
    """Collective: makes this process a rank with its own GPU, unless it is one. Call it before the
    model is loaded, because one machine may load for longer than a collective waits."""
    if dist.is_initialized():
        return
    if "RANK" in os.environ:
        end_with_parent(signal.SIGTERM)  # a launcher that was killed can't stop its ranks
    import deepspeed  # takes seconds, and tests of the trainer's functions do not need it

    if own_device() == "cpu":
        # DeepSpeed would compile an all-reduce for CPU inference, which training never calls. It
        # takes a minute, and a compiler that may be missing. Another version may compile it anyway
        getattr(deepspeed.ops, "__compatible_ops__", {})["deepspeed_shm_comm"] = False
    say("starting DeepSpeed; if it has to compile an op, that takes about a minute, but only once")
    stand_alone()
    # Longer than a rank waits for the server, as that error explains more
    limit = max(LEAST_SECONDS, wait_limit_seconds + 60)
    with announced("all ranks to start"):
        deepspeed.init_distributed(timeout=timedelta(seconds=limit))
    if (world := dist.get_world_size()) > 1:
        say(f"{world} ranks; the run ends if one of them does not answer for {limit} s")


# --- Between the ranks ----------------------------------------------------------------
def gathered(value):
    """Collective: returns every rank's `value`, by rank."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def gather_groups(mine):
    """Collective: returns copies of the groups of all ranks, by their ids, also if there is one
    rank: without their items, which may be anything, even what can't be sent."""
    shares = gathered([replace(group, item=None) for group in mine])
    return sorted(itertools.chain(*shares), key=lambda group: group.id)


def any_rank(holds):
    """Collective: returns whether `holds` is true on any rank."""
    return any(gathered(bool(holds)))


class RunFailed(Exception):
    """Raised by all ranks, between two updates, so that the run can be saved. On the rank that has
    failed its cause is the error, on the other ranks None."""


@contextlib.contextmanager
def all_or_none(waiting=None):
    """Collective: if the block fails on one rank, all ranks raise RunFailed. The block must not
    call a collective. At its end each rank waits for the others, within `waiting`."""
    failure = None
    try:
        yield
    except (Exception, SystemExit) as error:  # noqa: BLE001 (raised again)
        failure = error
    with waiting or contextlib.nullcontext():
        any_failed = any_rank(failure is not None)  # collective
    if any_failed:
        raise RunFailed("another rank has failed, and its output shows why") from failure


@contextlib.contextmanager
def explained():
    """Raises this rank's error, or a SystemExit, instead of RunFailed."""
    try:
        yield
    except RunFailed as failure:
        raise failure.__cause__ or SystemExit(str(failure)) from None
