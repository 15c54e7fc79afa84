"""TOOLS: shown by the chat template, called in its form, answered as the template renders it."""

import asyncio
import json
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from fakes import a_recipe, one_reward, sampled
from test_turns import Actor

from grpo.faults import TaskError
from grpo.models import prompt_ids
from grpo.options.turns import tools as module
from grpo.options.turns.replies import bridge
from grpo.options.turns.tools import Tools, schemas_of
from grpo.options.turns.turns import play, turn_metrics
from grpo.prepare import preview
from grpo.sample import Question, Sample
from grpo.task import load_task
from tasks import code, python_tool

# SmolLM2's, which shows no tools; and what Qwen2.5's does with tools, without the texts around them
SMOLLM2 = (
    "{% for m in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM<|im_end|>\n{% endif %}"
    "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "<tool_call></tool_call><|im_end|>\n{% endif %}{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "{{ '\n<tool_response>\n' + m.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEMPLATES = {"SmolLM2": SMOLLM2, "Qwen2.5": QWEN}
TOLD = {
    "SmolLM2": "\n<|im_start|>tool\nR<|im_end|>\n<|im_start|>assistant\n",
    "Qwen2.5": "\n<|im_start|>user\n<tool_response>\nR\n</tool_response><|im_end|>\n"
    "<|im_start|>assistant\n",
}


def add(a: int, b: int = 1) -> int:
    """Adds two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


def both(a: str) -> dict:
    """Returns its argument twice.

    Args:
        a: Any text.
    """
    return {"twice": [a, a]}


def a_task(*tools, **names):
    own = {"messages": lambda item: [{"role": "user", "content": item["question"]}]}
    own |= {"rewards": lambda item, turns: len(turns)}
    methods = {tool.__name__: staticmethod(tool) for tool in tools}
    others = {"TOOLS": list(methods), "__init__": lambda self, item: None}
    kind = type("Environment", (), methods | others)
    return SimpleNamespace(Environment=kind, **own | names)


def tools_of(task, **item):
    """-> the tools of a completion."""
    return Tools(one_reward(task), task.Environment(item))


def call(name="add", arguments='{"a": 2, "b": 3}'):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


@pytest.fixture
def tokenizer(tokenizer):
    tokenizer.add_tokens(["<tool_call>", "</tool_call>"])  # single ids, not special, as Qwen2.5's
    return tokenizer


# --- What the model reads -------------------------------------------------------------
@pytest.mark.parametrize("name", TOLD)
def test_ids_are_those_of_the_template_for_the_whole_chat(tokenizer, name):
    """Calls are in the model's turn; what stands behind it is what the template renders."""
    tokenizer.chat_template = TEMPLATES[name]
    task, item = a_task(add, both), {"question": "Two and three?"}
    recipe = one_reward(task, MAX_COMPLETION_TOKENS=999)
    chat, options = task.messages(item), recipe.chat_options
    ids = prompt_ids(tokenizer, chat, **options)
    assert ("Adds two numbers." in tokenizer.decode(ids)) == (name != "SmolLM2")
    said = ["First " + call() + call("both", '{"a": "x"}'), "It is 5."]
    (group,) = sampled(Actor(tokenizer, said), recipe, iter([(0, item, ids)]))
    talk, told = group.samples[0], '5\n{"twice": ["x", "x"]}'
    assert talk.text == [said[0], told, said[1]] and talk.rewards == {"reward": 3.0}
    roles = zip(("assistant", "tool", "assistant"), talk.text, strict=True)
    chat += [{"role": role, "content": text} for role, text in roles]
    whole = tokenizer.apply_chat_template(chat, tokenize=False, **options)
    assert tokenizer.decode(ids + talk.ids) == whole.removesuffix("\n")
    added = [i for i, own in zip(talk.ids, talk.is_model_token, strict=True) if not own]
    assert tokenizer.decode(added) == TOLD[name].replace("R", told)


# --- Calls ----------------------------------------------------------------------------
def fail(a: int) -> int:
    """Fails.

    Args:
        a: Any number.
    """
    raise KeyError("it")


@pytest.mark.parametrize("turn, told", [
    (call(), "5"),
    (call(arguments='{"a": 2}'), "3"),
    (call() + " and " + call(arguments='{"a": 7}'), "5\n8"),
    ("five", None),
    ("<think>Use <tool_call>?</think>" + call(), "5"),
    ("<think>" + call() + ", or not</think>five", None),
    (call() + ", or not</think>five", None),  # the prompt has opened the thoughts
    ("The tag <think> is\n" + call(), "5"),
    ("<think>I</think>" + call() + "</think>", "5"),
    ("<tool_call>{'name': 1}</tool_call>", "error: a call is not valid (JSONDecodeError: "),
    ("<tool_call>5</tool_call>", "error: a call is not valid (TypeError: "),
    ("<tool_call>" + "[" * 100_000 + "</tool_call>", "error: a call is not valid (RecursionError"),
    ('<tool_call>{"name": "add"}</tool_call>', "error: add(a: int, b: int = 1) -> int: TypeError"),
    (call(arguments='"a"'), "error: a call is not valid (TypeError: "),
    (call().removesuffix("</tool_call>"), "error: a call has no </tool_call>: write <tool_call>{"),
    (call("sub"), "error: there is no tool 'sub', only add, fail: write <tool_call>{"),
    ('<tool_call>{"name": ["add"], "arguments": {}}</tool_call>', "error: there is no tool ['add"),
    (call(arguments='{"b": 2}'), "error: add(a: int, b: int = 1) -> int: TypeError: missing a"),
    (call(arguments='{"a": 2, "c": 2}'), "error: add(a: int, b: int = 1) -> int: TypeError: got"),
    (call(arguments='{"a": "2"}'), "error: add(a: int, b: int = 1) -> int: TypeError: a must be"),
    (call("fail", '{"a": 2}'), "error: fail(a: int) -> int: KeyError: 'it'"),
])  # fmt: skip
def test_each_turn_has_a_clear_answer(turn, told):
    got = tools_of(a_task(add, fail)).reply(turn)
    if told is None:
        assert got is None
    else:
        assert got["role"] == "tool" and got["content"].startswith(told)
        assert got["content"].endswith("}</tool_call>") == ("write <" in got["content"])


class Odd:
    """Its text can't be had."""

    def __repr__(self):
        raise ZeroDivisionError("no text")


class OddError(Exception):
    def __str__(self):
        raise ZeroDivisionError("no text")


def circle():
    items = []
    items.append(items)
    return items


def tool_of(make):
    def odd(a: int = 0) -> str:
        """Returns anything.

        Args:
            a: Any number.
        """
        return make()

    return odd


def raising(error):
    def fail():
        raise error

    return fail


ANSWERS = [
    (lambda: {"a": {1, 2}}, '{"a": "{1, 2}"}'), (lambda: "", ""),
    (circle, "[[...]]"), (Odd, "error: odd(a: int = 0) -> str: ZeroDivisionError: no text"),
    (lambda: {Odd(): 1}, "error: odd(a: int = 0) -> str: ZeroDivisionError: no text"),
    (lambda: b"ab", "\"b'ab'\""), (lambda: None, "null"), (lambda: 1.5, "1.5"),
    (lambda: "\ud83d", "\ud83d"), (lambda: torch.ones(2), '"tensor('),
    (lambda: {None: 1, True: 2, 3: 4}, '{"null": 1, "true": 2, "3": 4}'),
    (lambda: asyncio.sleep(0), "error: odd(a: int = 0) -> str: TypeError: it returned a coroutine"),
    (raising(OddError()), "error: odd(a: int = 0) -> str: OddError"),
    (raising(SystemExit(3)), "error: odd(a: int = 0) -> str: SystemExit: 3"),
]  # fmt: skip


@pytest.mark.parametrize("make, told", ANSWERS, ids=range(len(ANSWERS)))
def test_whatever_a_tool_returns_or_raises_becomes_a_text(tokenizer, make, told):
    """In a run, too: a completion gets it from a thread."""
    task, item = a_task(tool_of(make)), {"question": "?"}
    recipe = one_reward(task, MAX_COMPLETION_TOKENS=999)
    actor = Actor(tokenizer, [call("odd", "{}"), "Done."])
    ids = prompt_ids(tokenizer, task.messages(item))
    (group,) = sampled(actor, recipe, iter([(0, item, ids)]))
    for sample in group.samples:
        assert sample.text[1].startswith(told.replace("\ud83d", "?")), sample.text[1]
        assert sample.tool_calls == (1, int(told.startswith("error")))


NO_ARGUMENTS = '""', "null", '"null"'


@pytest.mark.parametrize("arguments, told", [
    ('"{\\"a\\": 2, \\"b\\": 3}"', "5"),
    ('"{}"', "error: add(a: int, b: int = 1) -> int: TypeError: "),
    ('"[2, 3]"', "error: a call is not valid (TypeError: "), ("5", "error: a call is not valid"),
    *((none, "error: add(a: int, b: int = 1) -> int: TypeError: ") for none in NO_ARGUMENTS),
])  # fmt: skip
def test_arguments_inside_a_text_are_read(arguments, told):
    tools = tools_of(a_task(add))
    assert tools.reply(call(arguments=arguments))["content"].startswith(told)
    inner = json.dumps('{"name": "add", "arguments": {"a": 2}}')
    assert tools.reply(f"<tool_call>{inner}</tool_call>")["content"] == "3"


def test_a_long_result_is_cut_and_the_model_is_told():
    for most, names in ((module.MAX_RESULT_CHARS, {}), (7, {"MAX_RESULT_CHARS": 7})):
        for make in (lambda: "x" * 123_456, raising(ValueError("x" * 123_456))):
            told = tools_of(a_task(tool_of(make), **names)).reply(call("odd", "{}"))
            text, _, note = told["content"].partition("\n... (cut: ")
            assert len(text) == most and note.startswith(f"the first {most} of 123")
        whole = "x" * most
        tools = tools_of(a_task(tool_of(lambda: whole), **names))  # noqa: B023
        assert tools.reply(call("odd", "{}"))["content"] == whole


def test_failed_calls_are_counted_and_the_first_of_each_kind_is_logged(alone, capsys):
    module.SAID.clear()  # a task that is gone may have had the same id
    task = a_task(add, fail, tool_of(raising(ValueError("x"))))
    bad = [call("fail", '{"a": 2}'), call("nothing"), call(arguments='{"b": 2}'), call("odd", "{}")]
    bad += ["<tool_call>{</tool_call>"]
    for _ in range(2):  # of two completions: each kind is logged once
        tools = tools_of(task)
        for turn in bad:
            tools.reply(turn + call())
        assert (tools.calls, tools.failed) == (10, 5)
    lines = [x for x in capsys.readouterr().out.splitlines() if "the first of its kind" in x]
    assert len(lines) == 5 and f"({__file__}, line " in lines[0] and "KeyError: 'it'" in lines[0]
    tools_of(a_task(add)).reply(bad[1])  # of another task
    assert "there is no tool 'nothing'" in capsys.readouterr().out
    samples = [Sample([1], [0.0], tool_calls=made) for made in ((10, 5), (0, 0), (6, 1))]
    found = turn_metrics(samples)
    assert found["tools/failure_frequency"] == 6 / 16
    assert "tools/failure_frequency" not in turn_metrics(samples[1:2])


# --- Methods of class Environment -------------------------------------------------------
class Account:
    def __init__(self, item):
        self.balance = item.get("start", 0)  # which hides the method in the instance

    def deposit(self, amount: int) -> int:
        """Puts money into the account and returns the balance.

        Args:
            amount: How much.
        """
        if amount < 0:
            raise ValueError("a deposit is positive")
        self.balance += amount
        return self.balance

    def balance(self) -> int:
        """Returns the balance."""
        return self.balance

    def rewards(self, turns):
        return self.balance

    async def later(self) -> int:
        """Waits."""

    def bare(self, amount):
        """Has no type hint.

        Args:
            amount: How much.
        """

    def silent(self, amount: int):
        return amount


def a_bank(*tools, base=Account, **names):
    tools = tools or ("deposit", "balance")
    own = {"messages": lambda item: [{"role": "user", "content": item["question"]}]}
    kind = type("Environment", (base,), {"TOOLS": tools})
    return SimpleNamespace(Environment=kind, **own, **names)


def pay(amount):
    return call("deposit", f'{{"amount": {amount}}}')


def test_a_method_is_described_without_self_and_called_on_its_environment():
    for tools in (("deposit", "balance"), (Account.deposit, Account.balance)):
        task = a_bank(*tools)
        described, _ = (schema["function"] for schema in schemas_of("mine", task))
        assert described["name"] == "deposit" and described["description"].startswith("Puts money")
        assert list(described["parameters"]["properties"]) == ["amount"]
        assert described["parameters"]["required"] == ["amount"]
        one, other = tools_of(task, start=5), tools_of(task)
        assert one.reply(pay(2) + pay(3))["content"] == "7\n10"
        assert [t.reply(call("balance", "{}"))["content"] for t in (one, other)] == ["10", "0"]
        assert one.reply("Ten.") is None


def test_a_method_that_raises_becomes_a_text_and_calls_are_limited(alone, capsys):
    tools = tools_of(a_bank(MAX_CALLS=2, MAX_RESULT_CHARS=30))
    told = tools.reply(pay(-1) + pay(4) + pay(5))["content"]
    assert told.startswith("error: deposit(amount: int) ->\n... (cut: the first 30 of ")
    assert told.endswith("\n4\nerror: no call is left") and tools.reply(pay(1)) is None
    assert (tools.calls, tools.failed) == (2, 1)
    assert f"({__file__}, line " in capsys.readouterr().out


def test_async_tools_of_a_round_are_awaited_together_and_may_take_too_long(tokenizer, capsys):
    """Each of the two groups waits for the other one."""
    arrived, all_wait = [], asyncio.Event()

    class Environment(Account):
        async def later(self) -> int:
            """Waits."""
            arrived.append(self)
            if len(arrived) == 4:
                all_wait.set()
            await all_wait.wait()
            if len(arrived) > 4:
                await asyncio.sleep(9)
            return len(arrived)

    task, item = a_bank("later", base=Environment), {"question": "?"}
    recipe = one_reward(task, MAX_COMPLETION_TOKENS=999, REWARD_TIMEOUT_SECONDS=0.5)
    ids = prompt_ids(tokenizer, task.messages(item), **recipe.chat_options)
    said = call("later", "{}"), call("later", "{}")
    groups = sampled(Actor(tokenizer, said), recipe, iter([(0, item, ids), (1, item, ids)]))
    samples = [sample for group in groups for sample in group.samples]
    assert [sample.text for sample in samples] == [[said[0], "4", said[1]]] * 4
    assert [sample.tool_calls for sample in samples] == [(2, 1)] * 4  # one in vain
    assert "took more than REWARD_TIMEOUT_SECONDS" in capsys.readouterr().out


@pytest.mark.parametrize("tools, named", [
    (["deposti"], "deposti is no method of the class"),
    ([add], "add is no method of the class"),
    (["balance", "later"], "some are async, others plain"),
    (["balance", Account.balance], "balance is the name of two tools"),
    (["bare"], "amount is missing a type hint in function bare"),
    (["silent"], "silent because it has no docstring"),
    (5, "'int' object is not iterable"),
    ([], r"returned \[\]"),
])  # fmt: skip
def test_a_method_that_can_not_be_described_is_refused(tools, named):
    task = SimpleNamespace(Environment=type("Environment", (Account,), {"TOOLS": tools}))
    must = "it must be a list of methods of the class, or of their names, each with type hints"
    with pytest.raises(TaskError, match=rf"tasks/mine.py: Environment.TOOLS .*{named}.*: {must}"):
        schemas_of("mine", task)


def test_an_environment_with_tools_and_a_reply_is_refused():
    base = type("Both", (Account,), {"reply": lambda self, turn: None})
    with pytest.raises(
        TaskError, match=r"Environment.reply\(\) stands beside TOOLS: it must be left"
    ):
        schemas_of("mine", a_bank(base=base))


# --- tasks/ledger.py ------------------------------------------------------------------
def test_the_ledgers_gold_is_right_and_other_answers_are_not(alone):
    task = load_task("ledger")
    items = task.load("test")
    assert {len(item["orders"]) for item in items} == {0, 1, 2}
    recipe = a_recipe([(0, items[0], [5])], task=task, TASK="ledger", REWARD_WEIGHTS=None)
    recipe = recipe.resolved()
    for item in items[:30]:
        turns, rewards, roles = play(recipe, item, task.gold(item))
        assert rewards == {"correctness": True} and set(roles) == {"tool"}
        assert turns[-2] == item["answer"]
        assert play(recipe, item, task.gold(item)[-1:])[1]["correctness"] == (not item["orders"])
        assert not play(recipe, item, task.gold(item)[:-1])[1]["correctness"]
    turns, _, _ = play(recipe, items[0], [task.CALL.format("withdraw", '"amount": 999'), ""])
    assert turns[1].startswith("error: withdraw(amount: int) -> int: ValueError: the balance is on")


# --- Calls in the model's own form ------------------------------------------------------
XML = QWEN.replace(
    "{{ m.content }}<|im_end|>\n{% endif %}",
    "{{ m.content }}{% for call in m.tool_calls or [] %}<tool_call>\n"
    "<function={{ call.function.name }}>\n"
    "{% for k, v in call.function.arguments.items() %}<parameter={{ k }}>\n{{ v }}\n</parameter>\n"
    "{% endfor %}</function>\n</tool_call>{% endfor %}<|im_end|>\n{% endif %}",
)
JSON = XML.replace("<function={{ call.function.name }}>\n", "{{ call.function | tojson }}")
JSON = (
    JSON[: JSON.index("{% for k, v")] + JSON[JSON.index("</function>\n") + len("</function>\n") :]
)
FUNCTION = {"name": "{name}", "arguments": "{content}"}
RESPONSE = {"start_anchor": "<|im_start|>assistant\n", "fields": {
    "content": {}, "thinking": {"open": "<think>", "close": "</think>"},
    "tool_calls": {
        "open_pattern": r"<tool_call>\s*<function=(?P<name>\w+)>\s*", "close": "</tool_call>",
    "repeats": True,
        "content": "xml-inline", "transform": {"type": "function", "function": FUNCTION},
        "content_args": {"tag_pattern": r"<parameter=(?P<key>\w+)>\n(?P<value>.*?)\n</parameter>"},
    },
}}  # fmt: skip


def in_xml(name, **arguments):
    given = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in arguments.items())
    return f"<tool_call>\n<function={name}>\n{given}</function>\n</tool_call>"


@pytest.fixture
def reads_xml(tokenizer):
    if not hasattr(tokenizer, "response_template"):
        pytest.skip("this transformers has no response templates")
    task = a_task(add, both)
    tokenizer.chat_template, tokenizer.response_template = XML, RESPONSE
    return partial(tokenizer.parse_response, prefix="", tools=schemas_of("mine", task)), task


@pytest.mark.parametrize("turn, told, name", [
    (in_xml("add", a=2, b=3), "5", "add"), ("I add." + in_xml("both", a="x"),
    '{"twice": ["x", "x"]}', "both"),
    (in_xml("add", a=2) + in_xml("both", a="y"), '3\n{"twice": ["y", "y"]}', "both"),
    (in_xml("no", a=2), "error: there is no tool 'no', only add, both", None),
    (in_xml("add", a="x"), "error: add(a: int, b: int = 1) -> int: TypeError: a must be", "add"),
    (in_xml("add"), "error: add(a: int, b: int = 1) -> int: TypeError: missing", "add"),
    ("<think>" + in_xml("add", a=2) + "</think>No.", None, None), ("It is 5.", None, None),
])  # fmt: skip
def test_calls_in_the_form_of_the_tokenizers_response_template(reads_xml, turn, told, name):
    parse, task = reads_xml
    recipe = replace(one_reward(task), parse=parse)
    reply = Tools(recipe, task.Environment({})).reply(turn)
    assert reply is None if told is None else reply["content"].startswith(told)
    assert (reply or {}).get("name") == name


@pytest.mark.parametrize("template, parses, unread", [
    (XML, True, False), (XML, False, True), (JSON, False, False), (QWEN, False, False),
    (JSON.replace("<tool_call>\n", "<|python_tag|>"), False, True), (SMOLLM2, False, False),
])  # fmt: skip
def test_the_preview_says_if_the_models_calls_are_not_read(
    template, parses, unread, reads_xml, tokenizer, tiny, capsys
):
    parse, task = reads_xml
    tokenizer.chat_template = template
    item = {"question": "Two and three?"}
    recipe = replace(one_reward(task), prompts=[Question(0, item, [5])], outcome="reward")
    preview(replace(recipe, parse=parse if parses else None), tokenizer, 0)
    assert ("are not read" in capsys.readouterr().out) == unread


def test_a_tools_message_reaches_the_chat_template_with_its_name(tokenizer):
    tokenizer.chat_template = QWEN.replace("+ m.content", "+ m.name + ': ' + m.content")
    task = a_task(add)
    reply = tools_of(task).reply(call())
    eos = tokenizer.convert_tokens_to_ids("<|im_end|>")
    ids = bridge(tokenizer, {eos}, eos, reply, {})
    assert "<tool_response>\nadd: 5\n</tool_response>" in tokenizer.decode(ids)


# --- tasks/python_tool.py --------------------------------------------------------------
PYTHON = python_tool.Environment({}).python


@pytest.mark.parametrize("program, told", [
    ("print(6 * 7)\nprint('é')", "42\né"),
    ("def f(n): return n and f(n - 1)\nprint(f(9))", "0"),
    ("6 * 7", "error: the program printed nothing: use print()"),
    ("print(1)\nx", "error: NameError: name 'x' is not defined"),
    ("print(", "error: SyntaxError: '(' was never closed"),
    ("x = [0] * 10**9", "error: MemoryError"),
    ("while True: print('x' * 9999)", "error: OSError: [Errno 27] File too large"),
    ("import os; os._exit(3)", "error: the program ended with 3"),
    ("print('x' * 999)", "x" * 400),
])  # fmt: skip
def test_a_program_is_run_within_limits(program, told, monkeypatch):
    monkeypatch.setattr(code, "SECONDS", 60)
    assert PYTHON(program) == told


def test_a_program_that_hangs_is_ended(monkeypatch):
    monkeypatch.setattr(code, "SECONDS", 0.2)
    assert PYTHON("import time; time.sleep(60)").startswith("error: the program took more than")


@pytest.mark.parametrize("name", ["ledger", "python_tool"])
def test_the_preview_shows_a_conversation_with_a_tool(name, tiny, tokenizer, capsys):
    task = load_task(name)
    item = next(item for item in task.load("test") if item.get("orders", True))
    ids = prompt_ids(tokenizer, task.messages(item))
    recipe = a_recipe([(0, item, ids)], task=task, TASK=name, MODEL=str(tiny))
    recipe = replace(recipe, weights={"correctness": 1.0}, outcome="correctness")
    preview(recipe, tokenizer, 1)
    printed = capsys.readouterr().out
    assert f"reply() as a tool turn: '\\n<|im_start|>tool\\n{item['answer']}<|im_end|>" in printed
    assert "correctness 1" in printed and "the chat template does not show TOOLS" in printed
