"""Like even.py, but its reward is slow in the trainer's ranks, so that workers send most groups."""

import os
import time

from tasks import arithmetic
from tasks.arithmetic import REWARD_WEIGHTS, messages  # noqa: F401


def load(split):
    return arithmetic.load(split)[:64]


def rewards(item, completion):
    time.sleep(0.1 * ("RANK" in os.environ))
    return {"correctness": 1.0 if len(completion) % 2 == 0 else -1.0, "format": 0.0}
