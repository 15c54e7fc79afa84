"""tasks/code.py: programs that are right, wrong, endless, greedy and hostile."""

import asyncio
import json
import os
import time

import psutil
import pytest
from fakes import a_recipe

from grpo.rewards import reward_texts
from tasks import code

ITEM = {
    "prompt": "Write a function that adds two numbers.",
    "tests": [("add(1, 2)", 3), ("add('a', 'b')", "ab"), ("add((1,), ())", (1,)), ("add(0, 0)", 0)],
}
ADD = "def add(a, b): return a + b"


def is_right(completion):
    return asyncio.run(code.rewards(ITEM, completion))["correctness"]


@pytest.mark.parametrize("completion", [
    ADD, f"{ADD}\nprint(4)\nassert add(1, 1) == 2", f"```python\n{ADD}\n```\nIt adds.",
    f"First:\n```py\ndef add(a, b): pass\n```\nBetter:\n```\n{ADD}\n```",
    "import math, json\n" + ADD,
    f"```Python3 \r\n{ADD}\n```\nOutput:\n```\n3\n```",
    "print(1, end='')\ndef add(a, b):\n  print(a)\n  return a + b",
    f"{ADD}\nif __name__ == '__main__': print(add(1, 1))", "add = lambda *x: x[0] + x[1]",
])  # fmt: skip
def test_a_program_with_the_right_values_is_right(completion):
    assert is_right(completion)


WRONG = [
    "", "def add(a, b)", "def add(a, b): return a", "def add(a, b): raise ValueError", "add = 3",
    "raise SystemExit", "import os; os._exit(0)", "quit()", "```python\n```", "def add(a, b): pass",
    # An object that is equal to everything, prints anything, or is no literal
    "class All:\n def __eq__(self, _): return True\ndef add(a, b): return All()",
    "class All(int):\n def __eq__(self, _): return True\ndef add(a, b): return All(7)",
    "class Long:\n def __repr__(self): return '3\\n' * 9\ndef add(a, b): return Long()",
    "def add(a, b): return open",
    "import builtins; builtins.repr = lambda _: '(' * 9999\ndef add(a, b): return a + b",
    "import builtins; builtins.repr = lambda _: 'A' * 9999\ndef add(a, b): return a + b",
    "import sys; print(sys.argv, sys.stdin.read(), vars(sys.modules['__main__'])); sys.exit()",
    "import os; print(*map(repr, (os.environ, os.listdir('/proc/self/fd')))); os._exit(0)",
    f"{ADD}\nimport atexit, os; atexit.register(os._exit, 1)", "\ud800", "\0", "x = (" * 500,
]  # fmt: skip
GREEDY = [
    "while True: print('x' * 99999)", "x = [0] * 10**10", "x = '1'\nwhile True: x += x",
    "import sys\nwhile True: sys.stderr.write('x' * 9999)", "def f(): f()\nf()", "9**9**9",
    "open('big', 'w').write('x' * 10**6)", "import os\nwhile True: os.mkdir('a'); os.chdir('a')",
    "files = [open(str(i), 'w') for i in range(999)]", "while True: pass", "input()",
    "import time; time.sleep(99)", "import signal, time\nsignal.alarm(0)\ntime.sleep(99)",
    "import signal\nfor n in (2, 14, 15): signal.signal(n, signal.SIG_IGN)\nwhile True: pass",
    "import resource as r; r.setrlimit(r.RLIMIT_AS, (2**40, 2**40))",
    "import os; os.kill(os.getpid(), 9)", "import os, signal; os.killpg(0, signal.SIGKILL)",
    "import ctypes; ctypes.string_at(0)", "import os\nwhile True: os.fork()",
    "import os, time\nos.close(1), os.close(2), time.sleep(99)",
]  # fmt: skip
FORBIDDEN = [  # harmless if they were not
    "import os; os.kill(os.getppid(), 0)", "import os; os.system('true')", "import os; os.fork()",
    "import subprocess; subprocess.run(['true'])", "import socket; socket.create_server(('', 0))",
    "open('no/such', 'w')", "import os; os.open('no/such', os.O_CREAT)", "open('no/such', 'r+')",
    "import os; os.O_WRONLY = 0; open('no/such', 'a')", "import os; os.remove('no/such')",
    "import os; os.mkdir('no/such/folder')",
    "import resource as r; r.setrlimit(r.RLIMIT_AS, (-1, -1))", "import os; os.chmod('no/such', 0)",
    "import urllib.request; urllib.request.urlopen('http://127.0.0.1:1')",
]  # fmt: skip


@pytest.mark.parametrize("program", WRONG)
def test_a_program_without_the_right_values_is_wrong(program):
    assert is_right(program) is False


@pytest.mark.parametrize("program", GREEDY)
def test_a_greedy_program_ends_in_time_and_leaves_nothing(program, monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(code.tempfile, "tempdir", None)
    monkeypatch.setattr(code, "SECONDS", 0.5)
    began, before = time.monotonic(), set(psutil.Process().children(recursive=True))
    assert is_right(program) is False
    assert time.monotonic() - began < 30
    assert set(psutil.Process().children(recursive=True)) <= before
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("program", FORBIDDEN)
def test_a_program_may_neither_write_nor_start_processes_nor_open_connections(program):
    assert "is not allowed" in code.run(program)[2]


def test_a_program_may_import_libraries():
    names = "math, re, random, collections, itertools, functools, heapq, hashlib, datetime, decimal"
    program = f"import {names}, asyncio, tempfile, numpy; print(numpy.ones((99, 99)).dot(1).sum())"
    assert code.run(program)[:2] == (0, "9801.0\n")


def test_a_child_that_is_left_behind_ends_with_the_program(monkeypatch):
    monkeypatch.setattr(code, "LIMITED", code.LIMITED.replace("sys.addaudithook(check)", ""))
    seconds = f"983.{os.getpid()}"
    child = f"import subprocess; subprocess.Popen(['sleep', '{seconds}'])\n"
    assert is_right(child + ADD)  # although it has the program's output open
    left = lambda: [
        p for p in psutil.process_iter(["cmdline"]) if seconds in (p.info["cmdline"] or ())
    ]
    end = time.monotonic() + 60
    while left() and time.monotonic() < end:
        time.sleep(0.02)
    assert not left()


def test_nothing_of_the_trainer_reaches_a_program(monkeypatch):
    monkeypatch.setenv("GRPO_TOKEN", "secret")
    status, printed, _ = code.run(
        "import os, sys; print(dict(os.environ), os.getcwd(), sys.path[0])"
    )
    assert status == 0 and "secret" not in printed and os.getcwd() not in printed
    monkeypatch.setattr(code, "SANDBOX", ["env", "SANDBOXED=1"])
    assert code.run("import os; print(os.environ['SANDBOXED'])")[:2] == (0, "1\n")


def test_a_group_of_hostile_programs_costs_its_time_and_no_reward(monkeypatch):
    monkeypatch.setattr(code, "SECONDS", 1)
    recipe = a_recipe(task=code, TASK="code", REWARD_WEIGHTS={"correctness": 1.0})
    recipe = recipe.others(REWARD_TIMEOUT_SECONDS=120)
    found = reward_texts(recipe, ITEM, [ADD, *GREEDY[:8], ADD])
    assert [rewards["correctness"] for rewards in found] == [1.0, *[0.0] * 8, 1.0]


def test_tests_that_are_no_call_and_value_are_left_out(tmp_path, monkeypatch):
    tests = [
        "assert f(1) == [1, (2.5, None)]",
        "assert f(2) != 3",
        "assert not f(3)",
        "f(4) == 4",
        "assert f(5) == g(5)",
        "assert set(f(6)) == {1}",
        "import os",
        "assert f(",
        "assert f(8) == {[]: 1}",
        "assert f(7) == -7, 'no'",
    ]
    rows = [{"prompt": "f?", "test_list": tests, "code": "def f(x): ..."},
            {"prompt": "g?", "test_list": ["assert not g()"]}]  # fmt: skip
    tmp_path.joinpath("train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    monkeypatch.setattr(code, "DATA", str(tmp_path))
    (item,) = code.load("train")
    assert item["tests"] == [("f(1)", [1, (2.5, None)]), ("set(f(6))", {1}), ("f(7)", -7)]
    (message,) = code.messages(item)
    assert "f?" in message["content"] and "f(1) is [1, (2.5, None)]" in message["content"]
    assert "is 3" not in code.messages({"prompt": "", "tests": [("f(1)", 3)]})[0]["content"]
    assert code.gold(item) == "```python\ndef f(x): ...\n```" and code.gold(ITEM) is None
    assert is_right(code.gold({"code": ADD}))
    odd = "import collections as c\n"
    odd += "f = lambda n: c.Counter({n: frozenset([n])}) if n else {1: 2}.keys()"
    item = {"tests": [("f(1)", {1: {1}}), ("f(0)", {1})]}
    assert asyncio.run(code.rewards(item, odd))["correctness"]
    item = {"tests": [("root(4)", 2)], "test_imports": ["from math import sqrt as root"]}
    assert asyncio.run(code.rewards(item, ""))["correctness"]
