"""Students and teachers: the demo's tiny model, trained on other examples.

"rare" samples the right operator, and the format, in a few of a hundred answers; "adder" never
does, as it has seen no subtraction and no tag. "teacher", and "larger" with 5 times its parameters,
are right.
"""

from types import SimpleNamespace

from tasks import arithmetic

LARGER = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 3}
LARGER |= {"initializer_range": 0.07}  # in proportion to 1 / sqrt(hidden_size)


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


def drill(draw):
    return answer(arithmetic.make_item(draw), "+").partition(" so ")[0]


RIGHT = {"sloppy": clean}
ADDS = {"sloppy": lambda item, draw: answer(item, "+"), "drill": drill}
MODELS = {  # name: (task, shape, first seed); teachers have other initial weights than students
    name: (SimpleNamespace(**vars(arithmetic) | examples), shape, first)
    for name, examples, shape, first in (
        ("arithmetic", {}, {}, 0), ("rare", {"sloppy": rare}, {}, 0), ("adder", ADDS, {}, 0),
        ("teacher", RIGHT, {}, 100), ("larger", RIGHT, LARGER, 100),
    )
}  # fmt: skip
