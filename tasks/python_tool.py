"""Products that a model cannot compute in its head, with Python as a tool (docs/turns.md).

    python grpo_ref_split.py MODEL=Qwen/Qwen2.5-1.5B-Instruct TASK=python_tool

The limits are no sandbox: a program may read files. SANDBOX holds the command of a real one.
"""

import sys
import tempfile
from subprocess import PIPE, TimeoutExpired

from tasks.answers import is_right
from tasks.data import generated
from tasks.programs import Program

SIZES = {"train": 2000, "validation": 200, "test": 200}
MAX_CALLS = 3  # of a completion; the next one ends it
SECONDS, MEMORY_BYTES, FILE_BYTES, OUTPUT_CHARS = 5, 2**29, 2**16, 400
SANDBOX = []  # such as ["bwrap", "--unshare-all", "--ro-bind", "/", "/"]
CALL = '<tool_call>{{"name": "python", "arguments": {{"code": "print({})"}}}}</tool_call>'
SYSTEM_PROMPT = f"""You can run Python, at most {MAX_CALLS} times. To do so, write
{CALL.format("...")}. Then write the result in <answer></answer>."""
EXAMPLE = [  # as turns of the chat: without an example SmolLM2-135M never called
    ("system", SYSTEM_PROMPT),
    ("user", "What is 512 * 134 - 205?"),
    ("assistant", CALL.format("512 * 134 - 205")),
    ("tool", "68403"),
    ("assistant", "<answer>68403</answer>"),
]
LIMITED = f"""import resource as r, sys
limits = {{r.RLIMIT_AS: {MEMORY_BYTES}, r.RLIMIT_CPU: {SECONDS}, r.RLIMIT_FSIZE: {FILE_BYTES}}}
for limit, most in limits.items(): r.setrlimit(limit, (most, most))
exec(compile(sys.stdin.read(), "program", "exec"), {{"__name__": "__main__"}})"""


class Environment:
    def __init__(self, item):
        pass  # the tool has no state

    def python(self, code: str) -> str:
        """Runs a Python program and returns what it prints.

        Args:
            code: The program, which prints its result.
        """
        command = [*SANDBOX, sys.executable, "-I", "-c", LIMITED]
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
            own = {"stdin": PIPE, "stdout": out, "stderr": errors, "cwd": "/", "env": {}}
            with Program(command, **own) as program:
                try:
                    program.communicate(code.encode(errors="replace"), timeout=SECONDS)
                except TimeoutExpired:
                    return f"error: the program took more than {SECONDS} s"
            out.seek(0), errors.seek(0)
            printed, reason = (x.read().decode(errors="replace").strip() for x in (out, errors))
        if program.returncode:
            why = reason.splitlines()[-1:] or [f"the program ended with {program.returncode}"]
            return f"error: {why[0][:OUTPUT_CHARS]}"
        return printed[:OUTPUT_CHARS] or "error: the program printed nothing: use print()"

    TOOLS = (python,)


def load(split):
    return generated(problem, split, SIZES[split])


def problem(draw):
    a, b, c = (draw.randint(101, 999) for _ in range(3))
    return {"question": f"What is {a} * {b} - {c}?", "answer": str(a * b - c)}


def messages(item):
    return [{"role": r, "content": text} for r, text in [*EXAMPLE, ("user", item["question"])]]


def rewards(item, turns):
    return {"correctness": is_right(turns[-1], item["answer"])}


def gold(item):
    return [CALL.format(item["question"][8:-1]), f"<answer>{item['answer']}</answer>"]
