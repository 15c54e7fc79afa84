"""Products that a model cannot compute in its head, with Python as a tool (docs/tasks.md).

    python grpo_ref_split.py MODEL=Qwen/Qwen2.5-1.5B-Instruct TASK=python_tool

tasks/code.py has the limits of a program; they are no sandbox.
"""

from tasks.answers import is_right
from tasks.code import SECONDS, run
from tasks.data import generated

SIZES = {"train": 2000, "validation": 200, "test": 200}
MAX_CALLS = 3  # of a completion; the next one ends it
OUTPUT_CHARS = 400  # that the model sees
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


class Environment:
    def __init__(self, item):
        pass  # the tool has no state

    def python(self, code: str) -> str:
        """Runs a Python program and returns what it prints.

        Args:
            code: The program, which prints its result.
        """
        status, printed, reason = run(code)
        if status is None:
            return f"error: the program took more than {SECONDS} s"
        if status:
            why = reason.strip().splitlines()[-1:] or [f"the program ended with {status}"]
            return f"error: {why[0][:OUTPUT_CHARS]}"
        return printed.strip()[:OUTPUT_CHARS] or "error: the program printed nothing: use print()"

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
