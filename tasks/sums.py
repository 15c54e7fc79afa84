"""Sums in words for a small pretrained model (presets/smollm2.py). Copy this file for a task.

The questions are those of tasks/arithmetic.py. One worked example stands before each question, and
the only reward is whether the number is right, in whatever format. Besides train, validation and
test there are three splits that training never touches:

    pairs   pairs of numbers that never meet in training, in any order; the numbers themselves do
    large   numbers from 21 to 40, none of which a training question has (some answers are as large)
    other   multiplication, a kind of question that training does not have
"""

import functools

from tasks import arithmetic
from tasks.answers import is_right
from tasks.data import generated, split_of

SIZES = {"train": 6000} | dict.fromkeys(["validation", "test", "pairs", "large", "other"], 500)
EXAMPLE = [
    {"role": "system", "content": ""},  # else SmolLM2's chat template adds one of 20 tokens
    {"role": "user", "content": "Tom has 5 pens and buys 4 more. How many?"},
    {"role": "assistant", "content": "5 + 4 = 9"},
]
PRODUCTS = [
    "{name} has {a} boxes with {b} {things} each. How many {things} does {name} have?",
    "There are {a} rows of {b} {things}. How many {things} are there in all?",
    "{name} buys {a} bags of {b} {things}. How many {things} does {name} buy?",
]


def load(split):
    """Returns the split's items: question and answer ("12"), both numbers and the operator."""
    larger = functools.partial(arithmetic.make_item, least=21, most=40)
    make = {"other": make_product, "large": larger}.get(split, arithmetic.make_item)
    return generated(make, split, SIZES[split], home_of)


def make_product(draw):
    a, b = draw.randint(2, 10), draw.randint(2, 10)
    names = {"name": draw.choice(arithmetic.NAMES), "things": draw.choice(arithmetic.THINGS)}
    question = draw.choice(PRODUCTS).format(a=a, b=b, **names)
    return {"question": question, "answer": str(a * b), "a": a, "b": b, "operator": "*"}


def home_of(item):
    """Returns the only split that may have an addition or subtraction up to 20; else None."""
    a, b = sorted((item["a"], item["b"]))
    if item["operator"] == "*" or a > arithmetic.LARGEST:
        return None
    return split_of(item["question"]) if split_of(f"{a}, {b}") == "train" else "pairs"


def messages(item):
    """Returns the chat that asks the item's question, after a worked example."""
    return [*EXAMPLE, {"role": "user", "content": item["question"]}]


def rewards(item, completion):
    """Returns 1 for the right number and 0 for any other text."""
    return {"correctness": float(is_right(completion, item["answer"]))}


def gold(item):
    """Returns a right completion, on which a run tries the reward at its start."""
    return "{a} {operator} {b} = {answer}".format(**item)
