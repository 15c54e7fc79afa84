"""Statistics of answers: accuracy with 95% intervals, pass@k, and comparisons of models.

Answers are {question: [answer, ...]}, as evaluate.py keeps them.
"""

import math
from statistics import fmean

Z = 1.96  # 95% of a normal distribution lie within Z standard deviations
# What `interval` adds: a number of values, their sum, their sum of squares. Then the lowest value
SHARES = (4, 2, 2, 0.0)  # two right and two wrong questions (Agresti, Coull 1998, Am. Stat. 52)
PAIRS = (2, 0, 1, -1.0)  # 1/2 of each outcome of a pair (Agresti, Min 2005, Stat. Med. 24, 729-740)


def interval(values, kind):
    """Returns [mean, low, high] of one value per question: SHARES of correct answers, or
    differences between PAIRS of answers. A few values are added before the normal approximation, so
    that the interval has a width even if all values are equal. Samples of one question are not
    independent, so only questions count (Miller 2024, 2411.00640).

    >>> [round(x, 3) for x in interval([1] * 81 + [0] * 182, SHARES)]  # Wilson's: 0.255, 0.366
    [0.308, 0.255, 0.366]
    >>> [round(x, 3) for x in interval([1] * 10 + [0] * 10, PAIRS)]
    [0.5, 0.228, 0.681]
    """
    number, total, squares, least = kind
    n = len(values) + number
    centre = (sum(values) + total) / n
    variance = (sum(v * v for v in values) + squares) / n - centre**2
    half = Z * math.sqrt(variance / n)
    return [mean(values) or 0.0, max(least, centre - half), min(1.0, centre + half)]


def pass_at_k(samples, right, k):
    """Returns the probability that at least one of k samples is right: the unbiased estimate from
    `right` of `samples` (Chen et al. 2021, 2107.03374): 1 - C(n - c, k) / C(n, k).

    >>> pass_at_k(4, 1, 1), pass_at_k(4, 1, 2), pass_at_k(4, 3, 2)
    (0.25, 0.5, 1.0)
    """
    return 1 - math.comb(samples - right, k) / math.comb(samples, k)


def mean(values):
    """Returns the mean of numbers, or None if there are none."""
    values = list(values)
    return fmean(values) if values else None


# --- A model's answers ----------------------------------------------------------------
def shares(answers, outcome, metrics=()):
    """Returns {"right", "right_in_format": {question: its share of answers}}. An answer is right if
    its reward `outcome` is above 0, and right in format if all its rewards that apply are, except
    those in `metrics`. Answers to which the outcome does not apply are left out."""
    found = {"right": {}, "right_in_format": {}}
    for question, group in answers.items():
        rewards = [a["rewards"] for a in group if a["rewards"][outcome] is not None]
        if rewards:
            judged = [[v for name, v in r.items() if name not in metrics] for r in rewards]
            whole = [all(v is None or v > 0 for v in values) for values in judged]
            found["right"][question] = fmean(given[outcome] > 0 for given in rewards)
            found["right_in_format"][question] = fmean(whole)
    return found


def summary(answers, outcome, metrics=()):
    """Returns {name: number, or None for a mean of nothing}: the `shares`, each [mean, low, high];
    how often each other reward that applies is positive; the share of truncated answers; their mean
    length; and if there are n > 1 answers to a question, pass@k for k = 1 (which is "right"), 2, 4,
    ... n."""
    everything = [answer for group in answers.values() for answer in group]
    found = {"questions": len(answers)}
    for how, by_question in shares(answers, outcome, metrics).items():
        values = list(by_question.values())
        found[how] = interval(values, SHARES) if values else None
    for name in [name for name in everything[0]["rewards"] if name != outcome]:
        values = (answer["rewards"][name] for answer in everything)
        found[f"positive_{name}"] = mean(v > 0 for v in values if v is not None)
    found["truncated"] = fmean(answer["truncated"] for answer in everything)
    found["completion_tokens"] = fmean(answer["tokens"] for answer in everything)
    groups = [[a["rewards"][outcome] for a in group] for group in answers.values()]
    judged = [[value > 0 for value in group if value is not None] for group in groups]
    most = len(groups[0])
    sizes = sorted({most, *(2**i for i in range(most.bit_length()))}) if most > 1 else []
    counts = {k: [(len(g), sum(g)) for g in judged if len(g) >= k] for k in sizes}
    found |= {f"pass@{k}": mean(pass_at_k(*both, k) for both in counts[k]) for k in sizes}
    return found


def columns(models, outcome, metrics=()):
    """Returns the summary of each model's answers. To each but the first it adds "right - first"
    and the like: the paired differences over the questions that both have."""
    found = [summary(answers, outcome, metrics) for answers in models]
    first, *others = [shares(answers, outcome, metrics) for answers in models]
    for column, other in zip(found[1:], others, strict=True):
        for how, before in first.items():
            after = other[how]
            pairs = [after[q] - share for q, share in before.items() if q in after]
            column[f"{how} - first"] = interval(pairs, PAIRS)
    return found


# --- Printed --------------------------------------------------------------------------
NOTE = """right: {} > 0; right_in_format: the other rewards are > 0 as well, except those to which
the task gives weight 0; "right - first": the difference from the first model on the same questions;
a group teaches if some of its answers are right and some wrong. In brackets: 95% intervals."""


def table(title, models, results):
    """Returns the lines of a table: a header with title and models, then a row per number."""
    names = list(dict.fromkeys(name for result in results for name in result))
    rows = [[title, *models]]
    rows += [[f"  {name}", *(cell(result.get(name)) for result in results)] for name in names]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [zip(row, widths, strict=True) for row in rows]
    return ["  ".join(text.ljust(width) for text, width in line).rstrip() for line in lines]


def cell(value):
    if isinstance(value, list):
        return "{:.3f} [{:.3f}, {:.3f}]".format(*value)
    return "-" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)
