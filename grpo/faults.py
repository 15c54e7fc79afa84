"""What is wrong with a task: a function that fails, returns what it must not, or takes too long.

A mistake in a task ends the program by a TaskError, which names the file, the function, its line,
what it did, and what it must do.
"""

import traceback
from pathlib import Path

SOONER = "answer within REWARD_TIMEOUT_SECONDS; raise that constant if it needs longer"
ASYNC = "return no coroutine: write `async def` if it is rewards(), group_rewards(), reply() or a"
ASYNC += " method of Environment; all others must be plain functions"


class TaskError(SystemExit):
    """Ends the program with a message about a mistake in a task's file."""

    def __init__(self, name, function, got, must):
        super().__init__(f"{task_file(name)}: {function} {got}: it must {must}")


def called(name, function, must, call, holds=lambda got: True):
    """Returns the result of `call`, which calls a task's function. Raises TaskError with the line
    if it fails, if holds(result) is false, or if timely() around it ends it."""
    try:
        got = call()
    except BaseException as error:
        raise mistake(name, function, must, error=error) from error
    if not holds(got):
        raise mistake(name, function, must, got=got)
    return got


def mistake(name, function, must, given="", error=None, got=None):
    """Returns the TaskError of a task's function, called with the values `given`, that has raised
    `error` or else returned `got`. Raises an error that is no mistake: a TaskError of a call within
    this one, and the user's Ctrl-C."""
    if isinstance(error, TaskError | KeyboardInterrupt):
        raise error
    if isinstance(error, TooSlow):
        why, must = f"took more than {error} s", SOONER
    else:
        why, must = described(task_file(name), must, error, got)
    return TaskError(name, function, why + given, must)


def task_file(name):
    """Returns the path of a task's file as error texts show it.

    >>> task_file("gsm8k"), task_file("my/task.py")
    ('tasks/gsm8k.py', 'my/task.py')
    """
    return name if name.endswith(".py") else f"tasks/{name}.py"


class TooSlow(BaseException):
    """A call took more than so many seconds. Not an Exception, which a task might catch."""


# --- The words -------------------------------------------------------------------------
def described(file, must, error, got):
    """Returns what a function of the task's file has done, raised `error` or else returned `got`,
    and what it must do."""
    if error is None:
        values = got.values() if isinstance(got, dict) else [got]
        must = ASYNC if any(hasattr(value, "__await__") for value in values) else must
        return f"returned {shown(got)}", must
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if Path(frame.filename).name == Path(file).name]
    lines = [frame.lineno for frame in own]
    lines += [error.lineno] if isinstance(error, SyntaxError) else []
    at = f", line {lines[-1]}" if lines else ""
    if own and frames[-1] is not own[-1]:  # in what the task calls
        at += f" ({frames[-1].filename}, line {frames[-1].lineno})"
    return f"failed with {type(error).__name__}{at}: {shown(error, '{!s:.2000}')}", must


def shown(value, form="{!r:.500}"):
    """Returns the text of a task's value or error, whose class may fail to give one."""
    try:
        return form.format(value)
    except Exception:  # noqa: BLE001
        return f"<{type(value).__name__}>"
