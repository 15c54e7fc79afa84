"""A script's constants and command line, with a sentence for each mistake."""

import difflib
import math
import numbers
import sys

from grpo.proof import NOISE

RULES = {  # what a constant must be: whether a value is
    "a whole number from 1 on": lambda value: type(value) is int and value >= 1,
    "a whole number from 0 on": lambda value: type(value) is int and value >= 0,
    "a number from 0 on": lambda value: real(value) and value >= 0,
    "True or False": lambda value: value in (True, False),
    '"auto" or a whole number from 1 on': lambda value: (
        value == "auto" or type(value) is int and value >= 1
    ),
    '"auto", True or False': lambda value: value in ("auto", True, False),
    "a text": lambda value: isinstance(value, str) and value != "",
}
DTYPES = ["auto", *NOISE]


def arguments():
    """Returns the command line's words without deepspeed's --local_rank=N."""
    return [word for word in sys.argv[1:] if not word.startswith("--local_rank=")]


def usage(doc):
    """Returns the reply to unknown arguments, from a script's __doc__."""
    return "\n\n".join([*doc.split("\n\n")[:2], "All else is said by the constants in the file."])


def check_names(now, known):
    """Raises SystemExit if a preset has set a constant that is not in `known`, the script's own;
    `now` are its globals()."""
    for name in now:
        if name.isupper() and name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0)[0]
            raise SystemExit(f"there is no constant {name}: is {near} meant?")


def rules_of(table, now):
    """Returns [(constant, what it must be, whether it is)] of a table {what: "NAME ..."}."""
    return [(n, what, RULES[what](now[n])) for what in table for n in table[what].split()]


def refuse_broken(script, now, rules):
    broken = [f"{name} = {now[name]!r} must be {what}" for name, what, holds in rules if not holds]
    if broken:
        raise SystemExit(f"{script} can't run with these constants:\n" + "\n".join(broken))


def real(value):
    """Whether this is a finite number, NumPy's too; True is not."""
    number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    return number and math.isfinite(value)
