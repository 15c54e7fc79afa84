"""TOOLS: methods of class Environment that the model calls in the form of its chat template.

    TOOLS = [deposit, withdraw]    # in the class: methods with type hints and docstrings, or names
    <tool_call>{"name": "deposit", "arguments": {"amount": 5}}</tool_call>    # a turn

transformers' get_json_schema describes them to the chat template. If the tokenizer has a response
template, its parse_response reads the calls, in the form of the model; else they have the form
above. A turn with calls is answered by a message of role "tool", with the name of the last that was
called: the results, or what is wrong with a call. A turn without a call ends the
conversation. MAX_CALLS of the task limits the calls of a completion, MAX_RESULT_CHARS the length of
a result.
"""

import contextlib
import functools
import inspect
import json
import os
import re
import traceback

import jinja2
from transformers.utils import get_json_schema

from grpo.faults import TaskError, called, shown
from grpo.log import say

MAX_RESULT_CHARS = 10_000  # the model reads so many characters of a result
CALL = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)
# The chat template may have opened the first
THOUGHTS = re.compile(r"\A(?:(?!<think>).)*?</think>|<think>.*?</think>", re.DOTALL)
FORM = 'write <tool_call>{"name": "...", "arguments": {...}}</tool_call>'
SAID = set()  # (a task's id, a kind of failure) that were logged
KINDS = {"string": str, "integer": int, "number": int | float, "boolean": bool}
KINDS |= {"array": list, "object": dict}


def schemas_of(name, task):
    """Returns the schemas of TOOLS of a task's class Environment, None if it has none. TaskError if
    a tool can't be described."""
    if hasattr(task, "TOOLS"):
        raise TaskError(name, "TOOLS", "stands outside class Environment", "move into that class")
    if not hasattr(getattr(task, "Environment", None), "TOOLS"):
        return None
    if hasattr(task.Environment, "reply"):
        must = "be left out: the TOOLS of the class answer each turn that calls them"
        raise TaskError(name, "Environment.reply()", "stands beside TOOLS", must)
    must = "be a list of methods of the class, or of their names, each with type hints and a"
    must += " docstring that explains its Args, and all plain or all async"
    find = lambda: described(task.Environment)
    return called(name, "Environment.TOOLS", must, find, holds=bool)


def described(kind):
    """Returns the schemas of the TOOLS of a class. ValueError if one can't be a tool."""
    found = {}
    for tool in kind.TOOLS:
        name = tool if isinstance(tool, str) else getattr(tool, "__name__", repr(tool))
        tool = getattr(kind, name, None)
        wrong = "" if getattr(tool, "__name__", "") == name else "is no method of the class"
        wrong = "is the name of two tools" if name in found else wrong
        if wrong:
            raise ValueError(f"{name:.50} {wrong}")
        found[name] = get_json_schema(tool)
    if len({inspect.iscoroutinefunction(getattr(kind, name)) for name in found}) > 1:
        raise ValueError("some are async, others plain")
    return list(found.values())


def calls_in(parse, turn):
    """Returns [(a call as JSON, its end or "")] of a turn. `parse` is Recipe.parse."""
    if parse:
        with contextlib.suppress(Exception):  # of any kind, if a call is not valid
            calls = parse(turn).get("tool_calls") or []
            return [(json.dumps(call["function"]), "closed") for call in calls]
    head, tag, tail = turn.rpartition("</think>")
    return CALL.findall(THOUGHTS.sub("", head + tag) + tail)  # a call in thoughts is none


def show_unread_call(recipe, tokenizer):
    """Prints a call as the chat template writes it, if it is not read."""
    name = recipe.tools[0]["function"]["name"]
    call = {"type": "function", "function": {"name": name, "arguments": {}}}
    asked, told = {"role": "user", "content": "."}, {"role": "assistant", "content": ""}
    options = recipe.chat_options | {"tokenize": False}
    render, read = functools.partial(tokenizer.apply_chat_template, **options), set()
    try:
        before = render([asked], add_generation_prompt=True)
        whole = render([asked, told | {"tool_calls": [call]}])
    except (jinja2.TemplateError, TypeError):  # it writes no calls
        return
    written = whole[len(os.path.commonprefix([before, whole])) :]
    for text, _ in calls_in(recipe.parse, written):
        with contextlib.suppress(ValueError, LookupError, TypeError):
            read.add(json.loads(text)["name"])
    if name in written and name not in read:
        say(f"calls as the chat template writes them are not read ({written!r:.200}): {FORM}")


class Tools:
    """The tools of one completion, which calls those that the model's turns name."""

    def __init__(self, recipe, environment):
        schemas = {schema["function"]["name"]: schema for schema in recipe.tools}
        # Of the class, as an attribute of the instance may have a method's name
        methods = {name: inspect.getattr_static(type(environment), name) for name in schemas}
        self.tools = {name: (m.__get__(environment), schemas[name]) for name, m in methods.items()}
        self.task, self.parse, self.called = recipe.task, recipe.parse, {}
        self.is_async = any(inspect.iscoroutinefunction(tool) for tool, _ in self.tools.values())
        self.reply = self.reply_async if self.is_async else self.reply_plain
        self.left = getattr(self.task, "MAX_CALLS", -1)  # negative: any number
        self.calls = self.failed = 0

    def reply_plain(self, turn):
        """Returns the message that answers a turn, or None if it calls no tool."""
        try:
            self.reply_async(turn).send(None)  # plain tools await nothing
        except StopIteration as end:
            return end.value

    async def reply_async(self, turn):
        calls, self.called = calls_in(self.parse, turn) if self.left else [], {}
        content = "\n".join([await self.answer(*call) for call in calls])
        return {"role": "tool", "content": content} | self.called if calls else None

    async def answer(self, text, end):
        """Returns the result of a call, or what is wrong with the call, as text."""
        if not self.left:
            return "error: no call is left"
        self.left, self.calls, self.failed = self.left - 1, self.calls + 1, self.failed + 1
        try:
            told = await self.result(text, end)
            self.failed -= 1  # but for a call that takes too long
        except Failed as failed:
            told = f"error: {failed.told}"
            if (kind := (id(self.task), failed.kind)) not in SAID:
                SAID.add(kind)
                say(f"a tool call failed, the first of its kind{failed.where}: {told:.500}")
        most = getattr(self.task, "MAX_RESULT_CHARS", MAX_RESULT_CHARS)
        cut = f"\n... (cut: the first {most} of {len(told)} characters)" if len(told) > most else ""
        return told[:most] + cut

    async def result(self, text, end):
        """Returns the result of a call as text. Raises Failed."""
        try:
            call = json_within(json.loads(text))
            name, arguments = call["name"], dict(**json_within(call.get("arguments")) or {})
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise Failed("form", f"a call is not valid ({words_of(error)}): {FORM}") from None
        if not end or str(name) not in self.tools:
            known = f"there is no tool {name!r:.50}, only {', '.join(self.tools)}"
            raise Failed("name", f"{known if end else 'a call has no </tool_call>'}: {FORM}")
        (tool, schema), self.called = self.tools[name], {"name": name}
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
            found = tool(**arguments)
            return text_of(await found if self.is_async else found)
        except (Exception, SystemExit) as error:  # noqa: BLE001
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
    if hasattr(got, "__await__"):
        raise TypeError("it returned a coroutine: write `async def`")
    try:
        return str(got) if isinstance(got, str) else json.dumps(got, default=str)
    except (TypeError, ValueError, RecursionError):  # keys that JSON lacks, a list within itself
        return str(got)


def words_of(error):
    return f"{type(error).__name__}: {shown(error, '{}')}"
