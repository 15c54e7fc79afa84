"""Countdown: make a target of some numbers, each used exactly once (TinyZero's rule).

    numbers 44, 19, 2 and target 50: <answer>(44 - 19) * 2</answer>

Problems are generated with a solution and split by a hash of numbers and target: no test problem
occurs in training, not even with its numbers in another order.
"""

import ast
import operator
import random
import re
from fractions import Fraction

from tasks.answers import BLOCK, FORMAT
from tasks.data import split_of

SIZES = {"train": 10_000, "validation": 500, "test": 500}  # generated each time, with the same seed
LARGEST = {"number": 99, "target": 100}
# The sizes of TinyZero's rewards, but there a right answer earns 1.0 in total
REWARD_WEIGHTS = {"correctness": 1.0, "format": 0.1}
SIGNS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
SIGNS |= {ast.Div: operator.truediv}  # of Fractions: exact
SIGNS |= {ast.UAdd: operator.pos, ast.USub: operator.neg}
MARKS = str.maketrans("\u00d7\u00f7\u2212`$", "*/-  ")  # as models write them
QUESTION = (
    "Make {target} of the numbers {numbers} with + - * / and parentheses, using each number exactly"
    " once. Reason in <think></think>, then give the expression in <answer></answer>, as in"
    " <answer>(1 + 2) / 3</answer>."
)


def load(split):
    """Returns the split's items: numbers, 3 or 4 of them, target and solution."""
    draw, items = random.Random(split), {}
    while len(items) < SIZES[split]:
        item = make_item(draw)
        key = f"{sorted(item['numbers'])} {item['target']}"
        if 0 < item["target"] <= LARGEST["target"] and split_of(key) == split:
            items[key] = item
    return list(items.values())


def make_item(draw):
    """Returns random numbers, joined so that all results are whole; `draw` is a random.Random."""
    numbers = [draw.randint(1, LARGEST["number"]) for _ in range(draw.choice((3, 4)))]
    parts = [(number, str(number)) for number in numbers]
    while len(parts) > 1:
        draw.shuffle(parts)
        (a, left), (b, right) = parts.pop(), parts.pop()
        values = {"+": a + b, "-": a - b, "*": a * b}
        if b and a % b == 0:
            values["/"] = a // b
        sign = draw.choice(list(values))
        parts.append((values[sign], f"({left} {sign} {right})"))
    return {"numbers": numbers, "target": parts[0][0], "solution": parts[0][1][1:-1]}


def value_of(text, numbers):
    """Returns the exact value, a Fraction, of an expression that uses each of the numbers once;
    else None. The text is parsed, never executed: it may have signs and whole numbers only."""
    used = []

    def value(node):
        if isinstance(node, ast.BinOp):
            return SIGNS[type(node.op)](value(node.left), value(node.right))
        if isinstance(node, ast.UnaryOp):
            return SIGNS[type(node.op)](value(node.operand))
        used.append(node.value)
        return Fraction(node.value)

    try:
        found = value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, KeyError, AttributeError, ZeroDivisionError, RecursionError, MemoryError):
        return None
    return found if sorted(used) == sorted(numbers) else None


def messages(item):
    """Returns the chat that sets the problem."""
    question = QUESTION.format(target=item["target"], numbers=", ".join(map(str, item["numbers"])))
    return [{"role": "user", "content": question}]


def rewards(item, completion):
    """Returns whether the last answer is right, with "= target" or without, and the format."""
    answer, target = "".join(BLOCK.findall(completion)[-1:]), item["target"]
    answer = " ".join(answer.translate(MARKS).split()).removesuffix(".").strip()
    answer = re.sub(rf"^{target} ?= ?| ?= ?{target}$", "", answer)
    plain = re.fullmatch(r"[0-9+\-*/() ]{1,200}", answer)
    right = plain and value_of(answer, item["numbers"]) == target
    return {"correctness": bool(right), "format": bool(FORMAT.fullmatch(completion))}


def gold(item):
    """Returns a completion that is right."""
    return (
        f"<think>{item['solution']} = {item['target']}</think><answer>{item['solution']}</answer>"
    )
