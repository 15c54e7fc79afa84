"""TOOLS: functions and methods of a task that the model calls in the form of its chat template.

    TOOLS = [python]    # in a task: functions with type hints and docstrings
    TOOLS = [deposit, withdraw]    # in its class Environment: methods, or their names
    <tool_call>{"name": "python", "arguments": {"code": "print(6 * 7)"}}</tool_call>    # a turn

transformers' get_json_schema describes both kinds to the chat template. If the task has no reply(),
a turn with calls is answered by a message of role "tool": the results, or what is wrong with a
call. A method is called on the environment of the completion. A turn without a call ends the
conversation. MAX_CALLS of the task limits the calls of a completion, MAX_RESULT_CHARS the length of
a result.
"""

import contextlib
import inspect
import json
import re
import traceback

from transformers.utils import get_json_schema

from grpo.calls import TaskError, TooSlow, called
from grpo.log import say
from grpo.options.rewards.faults import shown

MAX_RESULT_CHARS = 10_000  # the model reads so many characters of a result
CALL = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)
# The chat template may have opened the first
THOUGHTS = re.compile(r"\A(?:(?!<think>).)*?</think>|<think>.*?</think>", re.DOTALL)
FORM = 'write <tool_call>{"name": "...", "arguments": {...}}</tool_call>'
KINDS = {"string": str, "integer": int, "number": int | float, "boolean": bool}
KINDS |= {"array": list, "object": dict}


def give_tools(name, task):
    """Sets TOOL_SCHEMAS of a task with TOOLS, and adds a reply() that calls them to its Environment
    unless the task answers by itself. TaskError if a tool can't be described."""
    kind = getattr(task, "Environment", NoState)
    kind = getattr(kind, "_without_tools", kind)  # of a task that is loaded again
    answers = hasattr(task, "reply") or hasattr(kind, "reply") or not isinstance(kind, type)
    if answers and hasattr(kind, "TOOLS"):
        must = "be left out: the TOOLS of the class answer each turn that calls them"
        raise TaskError(name, "Environment.reply()", "stands beside TOOLS", must)
    functions, methods, must = {}, {}, "each with type hints and a docstring that explains its Args"
    if hasattr(task, "TOOLS"):
        of = f"be a list of functions, {must}"
        functions = called(name, "TOOLS", of, lambda: described(task.TOOLS), holds=bool)
    if hasattr(kind, "TOOLS"):
        of = f"be a list of methods of the class, or of their names, {must}"
        find = lambda: described(kind.TOOLS, kind, known=functions)
        methods = called(name, "Environment.TOOLS", of, find, holds=bool)
    task.TOOL_SCHEMAS = [schema for _, schema in (functions | methods).values()]
    if not answers:
        task.Environment = answering(task, kind, functions, methods)


def described(tools, kind=None, known=()):
    """Returns {name: (tool, schema)} of functions, or of methods of the class `kind`. ValueError if
    one can't be a tool, or has a name that is `known`."""
    found = {}
    for tool in tools:
        name = tool if kind and isinstance(tool, str) else getattr(tool, "__name__", repr(tool))
        tool = getattr(kind, name, None) if kind else tool
        wrong = "" if callable(tool) else f"is no {'method of the class' if kind else 'function'}"
        wrong = "is async" if inspect.iscoroutinefunction(tool) else wrong
        wrong = "is the name of two tools" if name in found or name in known else wrong
        if wrong:
            raise ValueError(f"{name:.50} {wrong}")
        found[name] = tool, get_json_schema(tool)
    return found


class NoState:
    """The environment of a task that has only functions as tools."""

    def __init__(self, item):
        pass


def answering(task, kind, functions, methods):
    """Returns the class `kind` with a reply() that calls the tools; methods, on its instance."""

    class Environment(kind):
        _without_tools = kind

        def __init__(self, item):
            super().__init__(item)
            own = {  # super(): found even if an attribute of the instance has a method's name
                name: (getattr(super(Environment, self), name), schema)
                for name, (_, schema) in methods.items()
            }
            self._grpo_tools = Tools(task, functions | own)

        def reply(self, turn):
            return self._grpo_tools.reply(turn)

    return Environment


class Tools:
    """The tools of one completion, which calls those that the model's turns name."""

    role = "tool"  # of its messages

    def __init__(self, task, tools):
        self.task, self.tools = task, tools  # {name: (tool, schema)}
        self.left = getattr(task, "MAX_CALLS", -1)  # negative: any number
        self.calls = self.failed = 0

    def reply(self, turn):
        head, tag, tail = turn.rpartition("</think>")
        turn = THOUGHTS.sub("", head + tag) + tail  # a call in thoughts is none
        calls = CALL.findall(turn) if self.left else []
        content = "\n".join(self.answer(*call) for call in calls)
        return {"role": self.role, "content": content} if calls else None

    def answer(self, text, end):
        """Returns the result of a call, or what is wrong with the call, as text."""
        if not self.left:
            return "error: no call is left"
        self.left, self.calls = self.left - 1, self.calls + 1
        try:
            told = self.result(text, end)
        except Failed as failed:
            self.failed, told = self.failed + 1, f"error: {failed.told}"
            seen = vars(self.task).setdefault("_failures_logged", set())
            if failed.kind not in seen:
                seen.add(failed.kind)
                say(f"a tool call failed, the first of its kind{failed.where}: {told:.500}")
        most = getattr(self.task, "MAX_RESULT_CHARS", MAX_RESULT_CHARS)
        cut = f"\n... (cut: the first {most} of {len(told)} characters)" if len(told) > most else ""
        return told[:most] + cut

    def result(self, text, end):
        """Returns the result of a call as text. Raises Failed."""
        try:
            call = json_within(json.loads(text))
            name, arguments = call["name"], dict(**json_within(call.get("arguments")) or {})
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise Failed("form", f"a call is not valid ({words_of(error)}): {FORM}") from None
        if not end or str(name) not in self.tools:
            known = f"there is no tool {name!r:.50}, only {', '.join(self.tools)}"
            raise Failed("name", f"{known if end else 'a call has no </tool_call>'}: {FORM}")
        tool, schema = self.tools[name]
        usage = f"{name}{inspect.signature(tool)}"
        try:
            inspect.signature(tool).bind(**arguments)
            for key, value in arguments.items():
                kind = schema["function"]["parameters"]["properties"].get(key, {}).get("type")
                if value is not None and not isinstance(value, KINDS.get(str(kind), object)):
                    raise TypeError(f"{key} must be of type {kind}, not {value!r:.50}")
        except TypeError as error:
            raise Failed((name, "arguments"), f"{usage}: {words_of(error)}") from None
        try:
            return text_of(tool(**arguments))
        except BaseException as error:
            if isinstance(error, TooSlow | KeyboardInterrupt):
                raise
            frame = traceback.extract_tb(error.__traceback__)[-1]
            kind, where = (name, type(error)), f" ({frame.filename}, line {frame.lineno})"
            raise Failed(kind, f"{usage}: {words_of(error)}", where) from None


class Failed(Exception):
    """A failed call: what the model is told, and what it has in common with others of its kind."""

    def __init__(self, kind, told, where=""):
        self.kind, self.told, self.where = kind, told, where


def json_within(value):
    """Returns what a text holds as JSON, which some models write there; else the value itself."""
    with contextlib.suppress(ValueError):
        return json.loads(value) if isinstance(value, str) else value
    return value


def text_of(got):
    """Returns what a tool has returned as text: JSON, or else what Python shows."""
    try:
        return str(got) if isinstance(got, str) else json.dumps(got, default=str)
    except (TypeError, ValueError, RecursionError):  # keys that JSON lacks, a list within itself
        return str(got)


def words_of(error):
    return f"{type(error).__name__}: {shown(error, '{}')}"
