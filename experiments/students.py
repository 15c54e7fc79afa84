"""Students and teachers: the demo's tiny model, trained on other examples.

"rare" samples the right operator, and the format, in a few of a hundred answers; "adder" never
does, as it has seen no subtraction and no tag. "rambler" is the demo's model, but after three of
five answers it repeats itself beyond the demo's limit of tokens. "teacher" is right.
"""

from types import SimpleNamespace

from tasks import arithmetic


def answer(item, operator, between=" so ", around="{}"):
    """Returns a completion: an equation with the operator, and its value."""
    a, b = item["a"], item["b"]
    a, b = (max(a, b), min(a, b)) if operator == "-" else (a, b)  # never negative
    value = a + b if operator == "+" else a - b
    return around.format(f"{a}{operator}{b}={value}{between}{value}")


def clean(item, draw):
    tags = "</think><answer>", "<think>{}</answer>"
    return answer(item, item["operator"], *tags)


def rare(item, draw):
    """Returns the other operator's answer, without tags; of a hundred one is clean, one has the
    right operator, and two have tags in the wrong place."""
    kind, other = draw.random(), {"+": "-", "-": "+"}[item["operator"]]
    if kind < 0.01:
        return clean(item, draw)
    operator = item["operator"] if kind < 0.02 else other
    return answer(item, operator, "<think><answer>" if kind > 0.98 else " so ")


def rambling(item, draw):
    """Returns the demo's example, in three of five cases with 32 tokens of repetition after it."""
    text = arithmetic.sloppy(item, draw)
    return text + " so it is" * 4 if draw.random() < 0.6 else text


def drill(draw):
    return answer(arithmetic.make_item(draw), "+").partition(" so ")[0]


ADDS = {"sloppy": lambda item, draw: answer(item, "+"), "drill": drill}
MODELS = {  # name: (task, first seed); the teacher has other initial weights than students
    name: (SimpleNamespace(**vars(arithmetic) | examples), first)
    for name, examples, first in (
        ("arithmetic", {}, 0),
        ("rare", {"sloppy": rare}, 0),
        ("adder", ADDS, 0),
        ("rambler", {"sloppy": rambling}, 0),
        ("teacher", {"sloppy": clean}, 100),
    )
}
