"""A task's async functions, such as `async def rewards`: all are called at the same time, while
others are sampled, so that a judge behind an API needs no processes."""

import asyncio
import functools
import time

from grpo.log import in_background


@functools.cache  # one for all tasks: what a task keeps between calls belongs to a loop
def running_loop():
    """Returns an event loop that runs in a thread."""
    loop = asyncio.new_event_loop()
    in_background(loop.run_forever)
    return loop


def begin_async(seconds, function, *arguments):
    """Returns the Future of a call, which raises TimeoutError after `seconds`."""
    call = limited(seconds, function, *arguments)
    return asyncio.run_coroutine_threadsafe(call, running_loop())


async def limited(seconds, function, *arguments):
    began = time.monotonic()
    try:
        async with asyncio.timeout(seconds) as timer:
            found = await function(*arguments)
    # A Future loses a TimeoutError's line, and the others would end the loop's thread
    except (TimeoutError, SystemExit, KeyboardInterrupt) as error:
        if isinstance(error, TimeoutError) and timer.expired():
            raise
        ended = RuntimeError(f"{type(error).__name__}: {error}")
        raise ended.with_traceback(error.__traceback__) from error
    if time.monotonic() - began > seconds:  # the timer had no chance
        raise TimeoutError
    return found
