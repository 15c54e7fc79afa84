"""MAX_FAILED_REWARDS: how many of a process's last 200 completions may fail in the task's code.

A completion fails if rewards(), group_rewards(), reply() or an Environment raises, or takes too
long. Its rewards then do not apply (NaN), and its conversation ends. The first traceback is logged
whole, later ones are counted.
"""

import traceback
from collections import deque

from grpo.log import say

WINDOW = 200  # completions


class Failures:
    """The failed ones among the last completions of this process."""

    def __init__(self, limit):
        self.limit, self.last, self.shown = limit, deque(maxlen=WINDOW), False

    def take(self, error, others=0):
        """Logs a failure, the first one whole. Raises it if there were too many before, of which
        `others` are not counted yet."""
        if not self.shown:
            say(f"a completion failed (MAX_FAILED_REWARDS = {self.limit}):")
            traceback.print_exception(error)
        self.shown = True
        recent = [*self.last, *[True] * others][-WINDOW:]
        if sum(recent) >= min(self.limit, WINDOW):
            raise error

    def count(self, failed):
        """Counts completions; `failed` holds a bool for each."""
        self.last += failed
