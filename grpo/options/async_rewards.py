"""A task with `async def rewards`: completions are rewarded at the same time, while others are
sampled, so that a judge behind an API needs no processes."""

import asyncio

from grpo.log import in_background
from grpo.rewards import TooSlow


def start_loop(task, seconds):
    """Starts an event loop in a thread. Returns submit(function, *arguments), which calls the
    task's function, plain or async, and returns a Future; that raises TooSlow after `seconds`."""
    loop = asyncio.new_event_loop()
    in_background(loop.run_forever)

    async def call(name, *arguments):
        function = getattr(task, name)
        if not asyncio.iscoroutinefunction(function):
            return function(*arguments)
        try:
            return await asyncio.wait_for(function(*arguments), seconds)
        except TimeoutError:
            raise TooSlow(f"{name}()", seconds) from None

    return lambda *job: asyncio.run_coroutine_threadsafe(call(*job), loop)
