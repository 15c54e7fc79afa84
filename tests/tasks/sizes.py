"""even.py, in a run without its rehearsal, or with a rank 1 that has no memory for a part of it."""

import os

import torch
from tasks.even import messages, rewards  # noqa: F401

from grpo import rehearsal
from tasks import even

FAULT = ""  # "no rehearsal", or a function of rehearsal.py


def load(split):
    if FAULT == "no rehearsal":
        rehearsal.rehearse = lambda *_: None
    elif FAULT and os.environ.get("RANK") == "1":
        setattr(rehearsal, FAULT, full)
    return even.load(split)


def full(*_):
    raise torch.OutOfMemoryError("CUDA out of memory")
