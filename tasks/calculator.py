"""Sums that a tiny model cannot do, with a calculator as a tool inside its answer.

    make demo-tools                              # trains a tiny model (presets/calculator.py)
    <think>47+38</think>85<answer>85</answer>    # the first 85 is the calculator's

STOP_STRINGS = ["</think>"] stops the model; reply() computes, and the model goes on. The model
has to learn when to call, with which operator, and to copy the result.
"""

import re

from tasks.arithmetic import NAMES, THINGS, WORDINGS, messages  # noqa: F401 (this task's, too)
from tasks.data import generated

SIZES = {"train": 4000, "validation": 300, "test": 300}
LARGEST = 99
CALL = re.compile(r"<think>(\d{1,4})([+-])(\d{1,4})</think>")
ANSWER = re.compile(r"<answer>(-?\d+)</answer>")


def load(split):
    """Returns the split's items: question and answer ("85"), both numbers and the operator."""
    return generated(problem, split, SIZES[split])


def problem(draw):
    """Returns one random problem; `draw` is a random.Random."""
    operator, b = draw.choice("+-"), draw.randint(10, LARGEST - 10)
    a = draw.randint(10 if operator == "+" else b + 10, LARGEST)  # 10 or more are left
    name, things = draw.choice(NAMES), draw.choice(THINGS)
    question = draw.choice(WORDINGS[operator]).format(a=a, b=b, name=name, things=things)
    return {"question": question, "answer": str(value(a, operator, b)), "work": f"{a}{operator}{b}"}


def value(a, operator, b):
    return int(a) + int(b) if operator == "+" else int(a) - int(b)


def reply(item, turns):
    """Returns the calculator's answer to the first call; None if the turn is not a call."""
    call = CALL.fullmatch(turns[-1])
    return str(value(*call.groups())) if call and len(turns) == 1 else None


def rewards(item, turns):
    """Returns the sole reward: whether the last turn is the right answer, and nothing else."""
    found = ANSWER.fullmatch(turns[-1])
    return {"correctness": bool(found) and found[1] == item["answer"]}


def sloppy(item, draw):
    """Returns the model's turns of a completion from which the tiny model learns. Six in ten only
    repeat a number of the question; one call in four has the wrong operator."""
    a, operator, b = CALL.fullmatch(f"<think>{item['work']}</think>").groups()
    if draw.random() < 0.6:
        return [f"<answer>{draw.choice([a, b])}</answer>"]
    if draw.random() < 0.25:
        operator = {"+": "-", "-": "+"}[operator]
    return [f"<think>{a}{operator}{b}</think>", f"<answer>{value(a, operator, b)}</answer>"]


def gold(item):
    """Returns the model's turns of a completion that is right."""
    return [f"<think>{item['work']}</think>", f"<answer>{item['answer']}</answer>"]
