"""A preview without any reward: which functions gave None, and which of them return nothing."""

import ast
import contextlib
import inspect
import textwrap

from grpo.calls import task_file
from grpo.log import say
from grpo.rewards import functions_of

CODE = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


def explain(recipe):
    """Logs that no reward applied to the completions of the preview."""
    say(f"no completion above had a reward: {' and '.join(functions_of(recipe.task))} gave None")
    environment = getattr(recipe.task, "Environment", None)
    for name in functions_of(recipe.task):
        owner = environment if "." in name else recipe.task
        with contextlib.suppress(OSError, TypeError, AttributeError):  # no source, or no function
            plain = name.removeprefix("Environment.").removesuffix("()")
            lines, first = inspect.getsourcelines(getattr(owner, plain))
            if not returns(ast.parse(textwrap.dedent("".join(lines))).body[0]):
                at = f"{task_file(recipe.c.TASK)}, line {first}"
                say(f"{at}: {name} returns nothing: does it lack `return`?")


def returns(code):
    """Returns whether a function's code returns a value, not in a function within it."""
    inner = (x for x in ast.iter_child_nodes(code) if not isinstance(x, CODE))
    return any(returns(x) or (isinstance(x, ast.Return) and x.value) for x in inner)
