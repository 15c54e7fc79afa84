r"""Mathematics with LaTeX answers, such as the MATH data set.

The answer is the last \boxed{...}, of a completion and of the data's solution. math-verify compares
those that are short and plain, as it can hang on others, which are compared as texts.
"""

import re

from tasks.answers import SAFE, is_equal_latex
from tasks.data import records

DATA = "DigitalLearningGmbH/MATH-lighteval"  # on the hub; or a file, or a folder with SPLIT.jsonl
SYSTEM_PROMPT = r"Reason step by step, and put your final answer within \boxed{}."
CLEAN = re.compile(r"\\(?:left|right|displaystyle|[,;:! ])|\\?\$|\s+|\\?%|\^\{?\\circ\}?|\.$")
# What math-verify may see beside SAFE: with three letters, or more powers, it takes minutes
BOUNDED = re.compile(
    r"(?!.{61})(?!(?:.*\^){3})(?!(?:.*\\sqrt){3})(?!(?:.*(?:/|frac)){4})(?!(?:.*[(\[]){6})"
    r"(?!(?:.*(?<![a-z}^])\{){4})(?!.*\d{10})(?:[\w.,+\-*/()\[\]{}]|\^(?:[2-4]|\{[2-4]\})"
    r"|\\(?:frac|sqrt|pi|cdot|times|pm|infty|cup|[{}])(?![a-z]))*"
)


def load(split):
    r"""Returns the items {"problem", "answer", ...} of `split`; "answer", where the data has none,
    is the solution's \boxed{...}, and problems without it (proofs) are left out."""
    items = []
    for item in records(DATA, split, "tasks/math.py"):
        answer = item.get("answer") or boxed(item.get("solution", ""))
        if answer:
            items.append(item | {"answer": str(answer)})
    return items


def messages(item):
    """Returns the chat that asks for the problem's answer."""
    system = {"role": "system", "content": SYSTEM_PROMPT}
    return [system, {"role": "user", "content": item["problem"]}]


def boxed(text):
    r"""Returns what the last \boxed{...} of `text` holds, "" if there is none.

    >>> boxed(r"so \boxed{1}, no: \boxed{\frac{1}{2}}.")
    '\\frac{1}{2}'
    """
    _, found, rest = text.rpartition(r"\boxed{")
    depth = 1
    for place, letter in enumerate(rest if found else ""):
        depth += (letter == "{") - (letter == "}")
        if depth == 0:
            return rest[:place].strip()
    return ""


def is_right(answer, gold):
    """Returns whether two LaTeX expressions are the same, as texts or to math-verify."""
    answer, gold = map(plain, (answer, gold))
    if not answer or answer == gold:
        return bool(answer)
    return comparable(answer) and comparable(gold) and is_equal_latex(answer, gold)


def plain(latex):
    return CLEAN.sub("", re.sub(r"\\[dt]frac", r"\\frac", latex)).removeprefix("x=")


def comparable(latex):
    letters = set(re.findall(r"[^\W\d_]", re.sub(r"\\[a-z]+", "", latex)))
    return bool(SAFE.fullmatch(latex) or len(letters) <= 2 and BOUNDED.fullmatch(latex))


def rewards(item, completion):
    r"""Returns the sole reward: whether the last \boxed{...} is the gold answer."""
    return {"correctness": is_right(boxed(completion), item["answer"])}


def gold(item):
    """Returns a completion that is right."""
    return rf"The answer is \boxed{{{item['answer']}}}."
