"""What is wrong with a task: a function that has failed or has returned what it must not."""

import traceback
from pathlib import Path

SOONER = "answer within REWARD_TIMEOUT_SECONDS; raise that constant if it needs longer"
ASYNC = "return no coroutine: write `async def` if it is rewards(), group_rewards(), reply() or a"
ASYNC += " method of Environment; all others must be plain functions"


# --- A function ------------------------------------------------------------------------
def described(file, must, error, got):
    """Returns what a function of the task's file has done, raised `error` or else returned `got`,
    and what it must do."""
    if error is None:
        values = got.values() if isinstance(got, dict) else [got]
        must = ASYNC if any(hasattr(value, "__await__") for value in values) else must
        return f"returned {shown(got)}", must
    frames = [(frame.f_globals, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    own = [(names, line) for names, line in frames if names.get("__name__") in modules_of(file)]
    lines = [line for _, line in own]
    lines += [error.lineno] if isinstance(error, SyntaxError) else []
    at = f", line {lines[-1]}" if lines else ""
    if own and frames[-1] != own[-1]:  # in what the task calls
        at += f" ({frames[-1][0].get('__file__')}, line {frames[-1][1]})"
    return f"failed with {type(error).__name__}{at}: {shown(error, '{!s:.2000}')}", must


def shown(value, form="{!r:.500}"):
    """Returns the text of a task's value or error, whose class may fail to give one."""
    try:
        return form.format(value)
    except Exception:  # noqa: BLE001
        return f"<{type(value).__name__}>"


def modules_of(file):
    """Returns the names that the module of a task's file may have (task.load_task)."""
    stem = Path(file).stem
    return f"tasks.{stem}", f"task_of_{stem}", stem
