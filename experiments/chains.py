"""A task whose answers differ in length: sums of 2 to 6 digits, one at a time.

    Add 3 9 4.    ->    <think>3+9=12 12+4=16</think><answer>16</answer>

The warm start writes some steps twice and gets some wrong, so that right and wrong completions of
one question differ in length, too. Rewards of weight 0 are what the experiment measures: a value
for the completions that they apply to, None for the others.
"""

import random

from tasks.answers import FORMAT, is_right
from tasks.data import split_of

SIZES = {"train": 4000, "validation": 300, "test": 500}
SHORT, LONG = 3, 5  # digits: at most, at least
REWARD_WEIGHTS = {"correctness": 1.0, "short": 0.0, "long": 0.0, "right_steps": 0.0}
REWARD_WEIGHTS |= {"wrong_steps": 0.0}
OUTCOME = "correctness"
WRONG, TWICE = 0.12, 0.15  # shares of the warm start's steps


def load(split):
    """Returns the split's items: question, answer ("16") and the digits to add."""
    draw, items = random.Random(f"chains {split}"), {}
    while len(items) < SIZES[split]:
        digits = [draw.randint(1, 9) for _ in range(draw.randint(2, 6))]
        question = f"Add {' '.join(map(str, digits))}."
        if split_of(question) == split:
            items[question] = {"question": question, "answer": str(sum(digits)), "digits": digits}
    return list(items.values())


def make_item(draw):
    """Returns a random sum of two numbers, an equation of the warm start."""
    a, b = draw.randint(1, 45), draw.randint(1, 9)
    return {"a": a, "b": b, "operator": "+", "answer": str(a + b)}


def sloppy(item, draw):
    """Returns a completion for the warm start."""
    value, steps = item["digits"][0], []
    for digit in item["digits"][1:]:
        total = value + digit + (draw.choice([-1, 1]) if draw.random() < WRONG else 0)
        steps += [f"{value}+{digit}={total}"] * (2 if draw.random() < TWICE else 1)
        value = total
    return f"<think>{' '.join(steps)}</think><answer>{value}</answer>"


def messages(item):
    return [{"role": "user", "content": item["question"]}]


def rewards(item, completion):
    """Returns whether the answer is right, that again for short and for long questions, and the
    steps written by right and by wrong completions, over those that the question needs."""
    right = is_right(completion, item["answer"]) and bool(FORMAT.fullmatch(completion))
    number = len(item["digits"])
    steps = completion.count("=") / (number - 1)
    return {
        "correctness": right,
        "short": right if number <= SHORT else None,
        "long": right if number >= LONG else None,
        "right_steps": steps if right else None,
        "wrong_steps": None if right else steps,
    }
