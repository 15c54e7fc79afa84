"""TOOLS: a task's functions that the model calls in the form of its chat template.

    TOOLS = [python]    # in a task: functions with type hints and docstrings
    <tool_call>{"name": "python", "arguments": {"code": "print(6 * 7)"}}</tool_call>    # a turn

transformers' get_json_schema describes the functions to the chat template. If the task has neither
reply() nor Environment, a turn with calls is answered by a message of role "tool": the results, or
what is wrong with a call. A turn without a call ends the conversation. MAX_CALLS of the task limits
the calls of a completion.
"""

import inspect
import json
import re

from transformers.utils import get_json_schema

from grpo.rewards import called, has_turns

CALL = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)
FORM = 'write <tool_call>{"name": "...", "arguments": {...}}</tool_call>'
KINDS = {"string": str, "integer": int, "number": int | float, "boolean": bool}
KINDS |= {"array": list, "object": dict}


def give_tools(name, task):
    """Sets TOOL_SCHEMAS of a task with TOOLS, and an Environment that calls them unless the task
    answers by itself. TaskError if the functions cannot be described."""
    must = "be a list of functions, each with type hints and a docstring that explains its Args"
    task.TOOL_SCHEMAS = called(name, "TOOLS", must, lambda: schemas(task.TOOLS), holds=bool)
    if not has_turns(task):
        task.Environment = type("Environment", (Tools,), {"task": task})


def schemas(tools):
    names = {tool.__name__ for tool in tools}
    if any(map(inspect.iscoroutinefunction, tools)) or len(names) < len(tools):
        raise ValueError("a function is async, or two have the same name")
    return [get_json_schema(tool) for tool in tools]


class Tools:
    """The environment of one completion: it calls the tools that the model's turns name."""

    task, role = None, "tool"  # of its messages

    def __init__(self, item):
        described = zip(self.task.TOOLS, self.task.TOOL_SCHEMAS, strict=True)
        self.tools = {tool.__name__: (tool, schema) for tool, schema in described}
        self.left = getattr(self.task, "MAX_CALLS", -1)  # negative: any number

    def reply(self, turn):
        calls = CALL.findall(turn) if self.left else []
        content = "\n".join(self.answer(*call) for call in calls)
        return {"role": self.role, "content": content} if calls else None

    def answer(self, text, end):
        """Returns the result of a call, or what is wrong with the call, as text."""
        if not self.left:
            return "error: no call is left"
        self.left -= 1
        try:
            call = json.loads(text)
            name, arguments = call["name"], dict(**call["arguments"])
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            return f"error: a call is not valid ({type(error).__name__}: {error}): {FORM}"
        if not end or str(name) not in self.tools:
            known = f"there is no tool {name!r:.50}, only {', '.join(self.tools)}"
            return f"error: {known if end else 'a call has no </tool_call>'}: {FORM}"
        tool, schema = self.tools[name]
        try:
            inspect.signature(tool).bind(**arguments)
            for key, value in arguments.items():
                kind = schema["function"]["parameters"]["properties"].get(key, {}).get("type")
                if value is not None and not isinstance(value, KINDS.get(str(kind), object)):
                    raise TypeError(f"{key} must be of type {kind}, not {value!r:.50}")
            got = tool(**arguments)
        except (Exception, SystemExit) as error:  # noqa: BLE001 (the model reads it)
            return f"error: {name}{inspect.signature(tool)}: {type(error).__name__}: {error}"
        return got if isinstance(got, str) else json.dumps(got, default=str)
