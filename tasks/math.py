r"""Mathematics with LaTeX answers, such as the MATH data set.

The answer is the last \boxed{...} of a completion and of the data's solution. math-verify compares
short and plain answers. It can hang on other answers, so they are compared as texts.
"""

import logging
import re

from tasks.data import records

DATA = "DigitalLearningGmbH/MATH-lighteval"  # on the hub; or a file, or a folder with SPLIT.jsonl
SYSTEM_PROMPT = r"Reason step by step, and put your final answer within \boxed{}."
# A unit, as in 12\text{ cm}^2, but neither another number nor the time of day
UNIT = (
    r"(?<=[\d}])\\(?:text|mbox|mathrm(?!\{.\}))\{(?!hundred|thousand|(?:m|b|tr)illion|dozen|lakh"
    r"|crore|k\}|[mb]n\}|[ap]\.?m\b)[A-Za-z./()-]*\}(?:\^\{?-?\d\}?)?$"
)
# What changes no value of an answer; each pattern takes time linear in its length
CLEAN = [(re.compile(pattern), to) for pattern, to in (
    # "32, 349" is a list, "32,349" a number; but not within brackets
    (r"(?<=\d)(?:\s+,\s*|,(?:\s|~|\\[ ,;:])+)(?=\d{3}(?!\d))(?![^(\[]*[)\]]|.*\\\})", ";"),
    (r"\\(?:left|right|displaystyle)(?![a-z])|(?<!\\)\\[,;:! ]", ""),  # but not a row's end, \\
    (r"\\?\$|\s+|\\?%|\^\{?\\circ\}?|\.$", ""),
    (r"\\[cdt]frac", r"\\frac"),
    ("\u2212", "-"),
    (UNIT, ""),
    (r"\\(?:text(?:bf|it)?|math(?:rm|bf)|mbox)\{([^{}]*)\}", r"\1"),
    (r"^\(([A-Z])\)$", r"\1"),  # a choice
)]  # fmt: skip
NAME = re.compile(r"^([A-Za-z])(?:=|\\in(?![a-z]))")  # x=5
# What math-verify gets: its timeout (SIGALRM) stops neither 9^{9^9} nor its parser at nested
# braces, each of which makes it slower by half. Three letters, or more powers, take minutes
BOUNDED = re.compile(
    r"(?!.{61})(?!(?:.*\^){3})(?!(?:.*\\sqrt){3})(?!(?:.*(?:/|frac)){4})(?!(?:.*[(\[]){6})"
    r"(?!(?:.*(?<![a-z}^])\{){4})(?!.*\d{10})(?:[\w.,+\-*/()\[\]{}]|\^(?:[2-4]|\{[2-4]\})"
    r"|(?<!\d)(?:10|\d)\^(?:\d|\{-?\d\d?\})(?!\^)"
    r"|\\(?:frac|sqrt|pi|cdot|times|pm|infty|cup|[{}])(?![a-z]))*"
)


def load(split):
    r"""Returns the items {"problem", "answer", ...} of `split`. If the data has no "answer", it is
    the solution's \boxed{...}; problems without one (proofs) are left out."""
    items = []
    for item in records(DATA, split):
        answer = item.get("answer")
        if answer in (None, ""):
            answer = boxed(item.get("solution") or "")
        if answer != "":
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
    _, *rest = re.split(r"\\boxed\s*\{", text)
    depth = 1
    for place, letter in enumerate(rest[-1] if rest else ""):
        depth += (letter == "{") - (letter == "}")
        if depth == 0:
            return rest[-1][:place].strip()
    return ""


def is_right(answer, gold):
    """Returns whether two LaTeX expressions are equal, as texts or by math-verify."""
    answer, gold = map(plain, (answer, gold))
    names = [name[1] for name in map(NAME.match, (answer, gold)) if name]
    if names[1:] and names[0] != names[1]:  # y=3 is not x=3
        return False
    answer, gold = NAME.sub("", answer, count=1), NAME.sub("", gold, count=1)
    if not answer or answer == gold:
        return bool(answer)
    return comparable(answer) and comparable(gold) and is_equal_latex(answer, gold)


def is_equal_latex(answer, gold):
    from math_verify import LatexExtractionConfig, parse, verify

    def read(text):
        latex = [LatexExtractionConfig()]
        return parse(f"${text}$", latex, fallback_mode="no_fallback", parsing_timeout=0)

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that no timeout is set
    return verify(read(gold), read(answer), timeout_seconds=0, raise_on_error=True)


def plain(latex):
    for pattern, to in CLEAN:
        latex = pattern.sub(to, latex)
    return latex


def comparable(latex):
    letters = set(re.findall(r"[^\W\d_]", re.sub(r"\\[a-z]+", "", latex)))
    return len(letters) <= 2 and bool(BOUNDED.fullmatch(latex))


def rewards(item, completion):
    r"""Returns the sole reward: whether the last \boxed{...} is the gold answer."""
    return {"correctness": is_right(boxed(completion), item["answer"])}


def gold(item):
    """Returns a completion that is right."""
    return rf"The answer is \boxed{{{item['answer']}}}."
