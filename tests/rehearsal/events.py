"""What happens on the simulated GPU: the host waits, a graph records."""

import contextlib
import sys
from collections import Counter
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
MACHINERY = {str(HERE / f"{name}.py") for name in ("events", "device", "kernels", "cuda")}
BLOCKS = []  # of the blocks that run, their waits by "what waited at file:line"
DEBUG_MODES = {"default": 0, "warn": 1, "error": 2}


@contextlib.contextmanager
def counted():
    """Yields how often the host waits in the block, in any thread, by place."""
    BLOCKS.append(Counter())
    try:
        yield BLOCKS[-1]
    finally:
        BLOCKS.pop()


def waited(reason, times=1):
    """The host waits for all that was launched. Raises RuntimeError while a graph records, as CUDA
    does, and in the debug mode that finds waits; in which synchronize() may be called."""
    if Recording.current:
        raise RuntimeError(f"operation not permitted when stream is capturing: {reason}")
    if SyncDebug.mode == DEBUG_MODES["error"] and reason != "synchronize":
        raise RuntimeError(f"called a synchronizing CUDA operation: {reason}")
    if BLOCKS:
        place = f"{reason} at {source_line()}"
        for block in BLOCKS:
            block[place] += times


class SyncDebug:
    """torch.cuda.get_sync_debug_mode and set_sync_debug_mode."""

    mode = 0

    @classmethod
    def set(cls, mode):
        cls.mode = DEBUG_MODES.get(mode, mode)


def source_line():
    """Returns the innermost line of the project that is running, and of a library that it called:
    "grpo/forward.py:104, sdpa_mask.py:307"; "autograd" where a backward pass runs."""
    frame, library = sys._getframe(1), ""
    while frame:
        name, line = frame.f_code.co_filename, frame.f_lineno
        if name not in MACHINERY:
            if name.startswith(f"{ROOT}/") and "site-packages" not in name:
                return f"{Path(name).relative_to(ROOT)}:{line}{library}"
            if not library and "/torch/" not in name and "contextlib" not in name:
                library = f", {Path(name).name}:{line}"
        frame = frame.f_back
    return f"autograd{library}"


class Recording:
    """What a CUDA graph records: calls on tensors of the CPU, with the memory that they use."""

    current = None  # the one that records now

    def __init__(self):
        self.calls = []  # (function, its arguments, by name, what it returned)
        self.before = []  # (a tensor that a call wrote to, its values before)

    @staticmethod
    def call(function, *args, **kwargs):
        """Returns function(*args, **kwargs), and records it where a graph records."""
        out = function(*args, **kwargs)
        if Recording.current:
            Recording.current.calls.append((function, args, kwargs, out))
        return out

    @staticmethod
    def writes(tensor):
        """Notes that the next call writes to the tensor."""
        if Recording.current:
            Recording.current.before.append((tensor, tensor.clone()))
