"""Sampling that goes on while rewards are computed: `for value in ahead(values): ...`"""

import contextlib
import queue
import threading

from grpo.log import in_background


def ahead(values):
    """Yields what the generator `values` yields, and raises what it raises; it runs in a thread of
    its own, and does not wait for the reader. If the reader leaves, it ends at its next value.

    The reader keeps its thread, and rewards want the main one: their time limit is a signal, and so
    is that of math-verify.
    """
    ready, left, over, failed = queue.SimpleQueue(), threading.Event(), object(), []

    def run():
        try:
            with contextlib.closing(values):
                for value in values:
                    ready.put(value)
                    if left.is_set():
                        break
        except BaseException as error:  # noqa: BLE001 (raised where the values are read)
            failed.append(error)
        ready.put(over)

    thread = in_background(run)
    try:
        while (value := ready.get()) is not over:
            yield value
    finally:
        left.set()
        thread.join()
    if failed:
        raise failed[0]
