"""The wait for another process, and how it ends the run."""

import math
import time

from grpo.log import SPEAK_SECONDS, tell
from grpo.stop import stop

STOP_SECONDS = 15  # longest wait after a stop was requested; deepspeed kills the process after 30 s


class TooLong(SystemExit):
    """A wait has reached its limit."""


class Refused(SystemExit):
    """The other side of a connection refuses a request, or is no longer the same."""


class Wait:
    """The wait in a polling loop. Logs every 10 s what it waits for. Raises TooLong at its limit,
    which counts from its creation."""

    def __init__(self, what, limit_seconds=math.inf):
        self.what, self.limit = what, limit_seconds
        self.start = self.said = time.monotonic()

    def sleep(self, why, pause=0.5):
        """Sleeps `pause` seconds; `why` is what is still missing. Raises TooLong at the limit, or
        STOP_SECONDS after a stop was requested."""
        now = time.monotonic()
        if now - self.start > self.limit:
            raise TooLong(f"waited {self.limit} s for {self.what}: {why}")
        if stop.asked and now - max(self.start, stop.at) > STOP_SECONDS:
            raise TooLong(f"{stop.asked}: the step can't be finished without {self.what}: {why}")
        if now - self.said > SPEAK_SECONDS:
            self.said = now
            tell(f"waited {now - self.start:.0f} s so far for {self.what}: {why}")
        time.sleep(pause)
