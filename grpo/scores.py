"""What answers amount to: shares of right ones, how surely, and two models compared.

Intervals are of 95 %. Plain Python: answers are {question: [answer, ...]}, an answer as
grpo/sampling/evaluation.py keeps it.
"""

import math
from statistics import fmean, stdev

Z = 1.96  # standard deviations on either side of a normal variable's 95 %


# --- Intervals ----------------------------------------------------------------------
def wilson(right, total):
    """Returns (low, high) of a share of independent questions (Wilson 1927, JASA 22, 209-212):
    unlike share +- Z sd it stays in [0, 1], and has a width also where all are right.

    >>> [round(end, 3) for end in wilson(81, 263)]  # Newcombe 1998, Stat. Med. 17, 857-872
    [0.255, 0.366]
    """
    if not total:
        return 0.0, 1.0
    share, n = right / total, total + Z**2
    centre = (right + Z**2 / 2) / n
    half = Z / n * math.sqrt(total * share * (1 - share) + Z**2 / 4)
    return max(0.0, centre - half), min(1.0, centre + half)


def mean_interval(shares):
    """Returns (low, high) of the mean over questions of a share right of several samples: those of
    one question are not independent, so questions count (Miller 2024, 2411.00640). Wilson's where
    all shares are equal, such as 1: their standard deviation of 0 would give no width."""
    if len(set(shares)) < 2:
        return wilson(sum(shares), len(shares))
    mean, half = fmean(shares), Z * stdev(shares) / math.sqrt(len(shares))
    return max(0.0, mean - half), min(1.0, mean + half)


def pass_at_k(samples, right, k):
    """Returns the chance that at least one of k samples is right, estimated without bias from
    `right` of `samples` (Chen et al. 2021, 2107.03374): 1 - C(n - c, k) / C(n, k).

    >>> pass_at_k(4, 1, 1), pass_at_k(4, 1, 2), pass_at_k(4, 3, 2)
    (0.25, 0.5, 1.0)
    """
    return 1 - math.comb(samples - right, k) / math.comb(samples, k)


def paired_difference(before, after):
    """Returns (difference, low, high) of the mean of `after` less that of `before`: shares right of
    the same questions, in the same order, 0 or 1 where each has one answer.

    The interval is Agresti and Min's (2005, Stat. Med. 24, 729-740): Wald's for matched pairs, with
    half a pair added to each of the four outcomes; so it has a width also where no answer differs.
    Theirs are pairs of 0 and 1; on other shares it is an extension of it.

    >>> [round(x, 3) for x in paired_difference([0] * 10 + [1] * 10, [1] * 20)]
    [0.5, 0.228, 0.681]
    """
    differences = [b - a for a, b in zip(before, after, strict=True)]
    n = len(differences) + 2  # the added pairs: half a pair each of +1 and -1, a whole one of 0
    centre = sum(differences) / n
    variance = (sum(d * d for d in differences) + 1) / n - centre**2
    half = Z * math.sqrt(variance / n)
    mean = fmean(differences) if differences else 0.0
    return mean, max(-1.0, centre - half), min(1.0, centre + half)


# --- Answers ------------------------------------------------------------------------
def is_right(answer, outcome):
    """Returns whether a judged answer is right by the reward `outcome`, in whatever format."""
    return answer["rewards"][outcome] > 0


def is_right_in_format(answer, outcome):
    """Returns whether a judged answer is right and all other rewards that apply to it are positive,
    which is: all that apply."""
    return all(value is None or value > 0 for value in answer["rewards"].values())


HOWS = {"right": is_right, "right_in_format": is_right_in_format}


def judged(answers, outcome):
    """Returns {question: answers} of the answers to which the outcome applies, where it does to
    any: the others are neither right nor wrong."""

    def of(group):
        return [answer for answer in group if answer["rewards"][outcome] is not None]

    return {q: of(group) for q, group in answers.items() if of(group)}


def shares(answers, outcome, how):
    """Returns {question: share of its judged answers that are right}, `how` one of HOWS."""
    groups = judged(answers, outcome).items()
    return {q: fmean(HOWS[how](a, outcome) for a in group) for q, group in groups}


def summary(answers, outcome):
    """Returns numbers by name, of {question: answers}: "right" and "right_in_format", each [share,
    low, high], of the judged; the share of positive values of each other reward, where it applies;
    the truncated share; the mean length; where a question has k answers, "pass@1" (which is
    "right") to "pass@k", of the questions that have so many judged ones. None is of none.
    """
    several = list(answers.values())
    everything = [answer for group in several for answer in group]
    k, found = len(several[0]), {"questions": len(several)}
    for how in HOWS:
        right = list(shares(answers, outcome, how).values())
        ends = wilson(sum(right), len(right)) if k == 1 else mean_interval(right)
        found[how] = [fmean(right), *ends] if right else None
    for name in [name for name in everything[0]["rewards"] if name != outcome]:
        values = [a["rewards"][name] for a in everything if a["rewards"][name] is not None]
        found[f"positive_{name}"] = fmean(v > 0 for v in values) if values else None
    found["truncated"] = fmean(a["truncated"] for a in everything)
    found["completion_tokens"] = fmean(a["tokens"] for a in everything)
    groups = judged(answers, outcome).values()
    counts = [(len(group), sum(is_right(a, outcome) for a in group)) for group in groups]
    for j in range(1, k + 1) if k > 1 else ():
        chances = [pass_at_k(n, right, j) for n, right in counts if n >= j]
        found[f"pass@{j}"] = fmean(chances) if chances else None
    return found


def compare(first, other, outcome):
    """Returns {how: (difference, low, high)} of two models' answers {question: answers}, over the
    questions where both have judged ones."""
    found = {}
    for how in HOWS:
        before, after = (shares(answers, outcome, how) for answers in (first, other))
        both = sorted(before.keys() & after.keys())
        found[how] = paired_difference([before[q] for q in both], [after[q] for q in both])
    return found


def columns(models, outcome):
    """Returns the summary of each model's answers, and for all but the first the differences to the
    first, as "right - first" and the like."""
    first, *others = models
    found = [summary(answers, outcome) for answers in models]
    for column, answers in zip(found[1:], others, strict=True):
        less = compare(first, answers, outcome)
        column |= {f"{how} - first": difference for how, difference in less.items()}
    return found


# --- Shown --------------------------------------------------------------------------
NOTE = """right: {} > 0, in whatever format; right_in_format: all other rewards that
apply are > 0, too; both where the first applies; - first: the paired difference, by question, to
the first model. In brackets: intervals of 95 %."""


def table(title, models, results):
    """Returns lines: the title and a column for each model, below them a row for each number. Of
    pass@k those are shown where k is a power of two, and the last."""
    names = list(dict.fromkeys(name for result in results for name in result))
    passes = [name for name in names if name.startswith("pass@")]
    hidden = {name for name in passes[:-1] if int(name[5:]).bit_count() > 1}
    names = [name for name in names if name not in hidden]
    rows = [[title, *models]]
    rows += [[f"  {name}", *(cell(result.get(name)) for result in results)] for name in names]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [zip(row, widths, strict=True) for row in rows]
    return ["  ".join(text.ljust(width) for text, width in line).rstrip() for line in lines]


def cell(value):
    if isinstance(value, list | tuple):
        return "{:.3f} [{:.3f}, {:.3f}]".format(*value)
    return "-" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)
