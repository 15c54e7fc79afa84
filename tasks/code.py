"""Python programs, rewarded if they give the right values.

    python grpo_ref_split.py MODEL=Qwen/Qwen2.5-Coder-1.5B-Instruct TASK=code

A test is a call and its value. A program gets the calls alone, and what it prints is compared here:
no class that is equal to everything, no early exit and no file of the tests earns a reward. A
program has limits of time, memory and output; it may neither write files, nor start processes,
nor open connections, and what is left of its process group is killed. That is no sandbox: it may
read files, and what Python does not audit (ctypes, os.mkfifo, _posixsubprocess) does all that this
user may, or leaves the group. SANDBOX holds the command of a real one.
"""

import ast
import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor

from tasks.data import records

DATA = "google-research-datasets/mbpp"  # on the hub; or {"prompt", "test_list"[, "code"]} in a file
SECONDS, MEMORY_BYTES, OUTPUT_BYTES = 5, 2**29, 2**16  # of a program
SANDBOX = []  # such as ["bwrap", "--unshare-all", "--ro-bind", "/", "/"]
AT_ONCE = ThreadPoolExecutor(os.cpu_count())  # a program's wait for others counts for its reward
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
LIMITED = f"""import json, resource as r, signal, sys
def check(event, given):  # of Python's audit events
    asks = event in ("os.listdir", "os.scandir", "os.walk", "os.putenv", "os.unsetenv")
    acts = event.startswith(("os.", "resource.", "socket.", "subprocess.")) and not asks
    writes = event == "open" and given[2] & {WRITES} or event.startswith("sqlite3.")
    if acts or writes:
        raise PermissionError(event + " is not allowed")
def plain(x):  # a value in Python's literals: a Counter is a dict
    if isinstance(x, dict): return {{plain(k): plain(v) for k, v in x.items()}}
    for kind, others in ((list, list), (tuple, tuple), (set, (set, frozenset, type({{}}.keys())))):
        if isinstance(x, others): return kind(map(plain, x))
    return x.item() if hasattr(x, "item") else x
for limit, most in ((r.RLIMIT_AS, {MEMORY_BYTES}), (r.RLIMIT_CPU, {SECONDS}), (r.RLIMIT_CORE, 0),
                    (r.RLIMIT_FSIZE, {OUTPUT_BYTES}), (r.RLIMIT_NOFILE, 64)):
    r.setrlimit(limit, (most, most))
signal.alarm({SECONDS})  # also if the trainer is killed
(program, calls), names = json.load(sys.stdin), {{"__name__": "__main__"}}
sys.addaudithook(check)
exec(compile(program, "program", "exec"), names)
values = [repr(plain(eval(call, names))) for call in calls]
if values: print("", *values, sep="\\n")"""


def run(program, calls=()):
    """Returns (exit status, None if it took too long; what it printed; its errors) of a Python
    program, which prints the values of `calls`, expressions, at its end."""
    command, status = [*SANDBOX, sys.executable, "-IB", "-c", LIMITED], None
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
        own = {"stdout": out, "stderr": errors, "cwd": "/", "env": {}, "start_new_session": True}
        child = subprocess.Popen(command, stdin=subprocess.PIPE, **own)
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.communicate(json.dumps([program, calls]).encode(), timeout=SECONDS)
                status = child.returncode
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        files = out.fileno(), errors.fileno()
        return status, *(os.pread(n, OUTPUT_BYTES, 0).decode(errors="replace") for n in files)


def load(split):
    """Returns the items {"prompt", "tests": [(call, value)], ...} of `split`. Tests that are not
    `assert CALL == VALUE`, and items without another, are left out."""
    items = [item | {"tests": tests_of(item)} for item in records(DATA, split, "sanitized")]
    return [item for item in items if item["tests"]]


def tests_of(item):
    found = []
    for test in item["test_list"]:
        with contextlib.suppress(ValueError, TypeError, SyntaxError):  # no literal, no Python
            match ast.parse(test).body:
                case [ast.Assert(ast.Compare(call, [ast.Eq()], [value]))]:
                    found.append((ast.unparse(call), ast.literal_eval(value)))
    return found


def messages(item):
    """Returns the chat that asks for a program, and shows the first of its tests if it has more."""
    (call, value), *more = item["tests"]
    shown = f" For example, {call} is {value!r}." * bool(more)
    text = f"{item['prompt']}{shown} Write Python in a ```python block."
    return [{"role": "user", "content": text}]


async def rewards(item, completion):
    """Returns whether the last block of code that defines something, or else the last one, or the
    whole completion, gives all right values."""
    blocks = re.findall(r"```[^\n]*\n(.*?)```", completion, re.DOTALL) or [completion]
    blocks = [block for block in blocks if re.search("def |class |lambda", block)] or blocks
    program = "\n".join([*item.get("test_imports", []), blocks[-1]])
    (calls, right), loop = zip(*item["tests"], strict=True), asyncio.get_running_loop()
    status, printed, _ = await loop.run_in_executor(AT_ONCE, run, program, calls)
    try:
        values = [ast.literal_eval(line) for line in printed.split("\n")[-len(calls) - 1 : -1]]
        return {"correctness": status == 0 and values == list(right)}
    except Exception:  # noqa: BLE001 (of any kind: a line may be anything)
        return {"correctness": False}


def gold(item):
    """Returns a right completion, if the data has one."""
    return f"```python\n{item['code']}\n```" if item.get("code") else None
