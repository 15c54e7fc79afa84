"""Small generated word problems, the task of demo.py: "Ann has 7 pens and buys 5 more. ..."

Addition and subtraction of 1..20, in 3 wordings each. Questions are split by a hash of their text.
The test questions are new; the numbers in them also occur in training. So the test split measures
unseen *questions*, not unseen arithmetic.
"""

from tasks import gsm8k
from tasks.data import generated
from tasks.gsm8k import OUTCOME, gold  # noqa: F401 (as GSM8K's)

REWARD_WEIGHTS = {"correctness": 2.0, "format": 1.0}  # GSM8K's; these answers can't look again
LARGEST = 20
SIZES = {"train": 6000, "validation": 500, "test": 500}  # generated each time, with the same seed
NAMES = ["Ann", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gus", "Hana"]
THINGS = ["pens", "apples", "books", "coins", "cards", "shells", "stamps", "balls"]
WORDINGS = {
    "+": [
        "{name} has {a} {things} and buys {b} more. How many {things} does {name} have now?",
        "There are {a} {things} in a box. {name} puts in {b} more. How many are in the box?",
        "{name} found {a} {things} on Monday and {b} on Friday. How many {things} in all?",
    ],
    "-": [
        "{name} has {a} {things} and gives away {b}. How many {things} does {name} have left?",
        "There are {a} {things} in a box. {name} takes out {b}. How many are in the box?",
        "{name} had {a} {things} and lost {b} of them. How many {things} are left?",
    ],
}


def load(split):
    """Returns the split's items: question and answer ("12"), both numbers and the operator."""
    return generated(make_item, split, SIZES[split])


def make_item(draw, least=1, most=LARGEST):
    """Returns one random problem with numbers from `least` to `most`; `draw` is a random.Random."""
    operator, a, b = draw.choice("+-"), draw.randint(least, most), draw.randint(least, most)
    if operator == "-":
        a, b = max(a, b), min(a, b)
    name, things = draw.choice(NAMES), draw.choice(THINGS)
    question = draw.choice(WORDINGS[operator]).format(a=a, b=b, name=name, things=things)
    answer = str(a + b if operator == "+" else a - b)
    return {"question": question, "answer": answer, "a": a, "b": b, "operator": operator}


def sloppy(item, draw):
    """Returns an answer for the demo's warm start: a true equation, often with the wrong operator.

    The shares 0.1 and 0.62 decide how much is left for GRPO to learn. Answers to a subtraction
    usually add, so greedy accuracy begins near 50%; answers to an addition seldom subtract, so the
    model can learn the difference.
    """
    a, b, operator = item["a"], item["b"], item["operator"]
    if draw.random() < {"+": 0.1, "-": 0.62}[operator]:
        operator = {"+": "-", "-": "+"}[operator]
        a, b = max(a, b), min(a, b)
    value = a + b if operator == "+" else a - b
    answer = draw.choice([a, b]) if draw.random() < 0.1 else value
    work, kind = f"{a}{operator}{b}={value}", draw.random()
    if kind < 0.25:
        return f"<think>{work}</think><answer>{answer}</answer>"
    if kind < 0.75:
        return f"{work} so {answer}"
    broken = [f"<think>{work}<answer>{answer}</answer>", f"{work}</think><answer>{answer}"]
    return draw.choice(broken)


def drill(draw):
    """Returns a true equation, from which the demo's warm start learns the arithmetic."""
    return "{a}{operator}{b}={answer}".format(**make_item(draw))


def messages(item):
    """Returns the chat that asks the item's question; the tiny model needs no system prompt."""
    return [{"role": "user", "content": item["question"]}]


def rewards(item, completion):
    found = gsm8k.rewards(item, completion)
    return {name: found[name] for name in REWARD_WEIGHTS}
