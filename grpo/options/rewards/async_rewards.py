"""A task with `async def rewards`: completions are rewarded at the same time, while others are
sampled, so that a judge behind an API needs no processes."""

import asyncio
import functools
import inspect
import time

from grpo.calls import GRACE_SECONDS, TooSlow
from grpo.log import in_background


@functools.cache  # one for all tasks: what a task keeps between calls belongs to a loop
def running_loop():
    """Returns an event loop that runs in a thread."""
    loop = asyncio.new_event_loop()
    in_background(loop.run_forever)
    return loop


def start_loop(task, seconds):
    """Returns submit(function, *arguments), which calls an async
    function of the task and returns a Future; submit.result(future) raises TooSlow after `seconds`.
    A plain group_rewards beside it is called in the main thread, as ever."""
    loop = running_loop()

    async def call(name, *arguments):
        began = time.monotonic()
        try:
            async with asyncio.timeout(seconds) as timer:
                found = await getattr(task, name)(*arguments)
            if time.monotonic() - began > seconds:  # the timer had no chance
                raise TooSlow(f"{name}()", seconds)
            return found
        # A Future loses a TimeoutError's line, and the others would end the loop's thread
        except (TimeoutError, SystemExit, KeyboardInterrupt) as error:
            if isinstance(error, TimeoutError) and timer.expired():
                raise TooSlow(f"{name}()", seconds) from None
            ended = RuntimeError(f"{type(error).__name__}: {error}")
            raise ended.with_traceback(error.__traceback__) from error

    def submit(*job):
        return asyncio.run_coroutine_threadsafe(call(*job), loop)

    def result(future):
        try:
            return future.result(submit.limit)
        except TimeoutError:
            raise TooSlow("the loop", seconds) from None

    submit.takes = lambda name: inspect.iscoroutinefunction(getattr(task, name))
    submit.limit = seconds + GRACE_SECONDS  # for code that blocks the loop
    submit.result = result
    return submit
