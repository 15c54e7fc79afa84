"""Does REPLAY help a student that is rarely right? At equal tokens, groups of 2 and of 8.

    python experiments/replay.py           # trains the missing runs one by one; prints the table

64 questions (few.py). With replacements (MAX_REFILLS = 1) a rollout has up to 32 groups of 8,
half of the questions, or 128 of 2, each question twice; 16 rollouts are up to 8 or 32 epochs. The
learning rate is constant, so that runs of one length can be compared before their end.
"""

import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from experiments import runs
from experiments.runs import ROOT, SEEDS, Case, records_of

ROLLOUTS = 16
COMMON = {"STEPS": 40, "IDLE_LIMIT": 40, "EVAL_STEPS": 20, "KEEP_BEST": False, "FINAL_LR": 1.0}
COMMON |= {"TASK": str(ROOT / "experiments/few.py"), "SAMPLES_PER_STEP": 8}
PAIRS = {"GROUP_SIZE": 2, "PROMPTS_PER_STEP": 64}
REPLAY = {"REPLAY": ROLLOUTS}
ONCE = {"MAX_REFILLS": 0, "STEPS": 64, "IDLE_LIMIT": 64}  # 64 rollouts have as many tokens as 40
CASES = {
    "few2": Case(PAIRS, "replaced", "rare"),
    "replay2": Case(PAIRS | REPLAY, "... and REPLAY", "rare"),
    "skip2": Case(PAIRS | ONCE, "not replaced", "rare"),
    "skipreplay2": Case(PAIRS | ONCE | REPLAY, "... and REPLAY", "rare"),
    "few8": Case({}, "replaced", "rare"),
    "replay8": Case(REPLAY, "... and REPLAY", "rare"),
    "skip8": Case(ONCE, "not replaced", "rare"),
    "skipreplay8": Case(ONCE | REPLAY, "... and REPLAY", "rare"),
}


def folder_of(name, seed):
    return runs.RUNS / name / str(seed)


def totals(records):
    """Returns [(tokens sampled so far, record)] of a run."""
    found, tokens = [], 0
    for record in records:
        tokens += record.get("tokens_sampled", 0)
        found.append((tokens, record))
    return found


def greedy_at(run, budget):
    """Returns the greedy accuracy at a number of tokens, between two evaluations."""
    points = [(t, r["eval_accuracy"]) for t, r in totals(run) if "eval_accuracy" in r]
    t0, a0 = max(p for p in points if p[0] <= budget)
    t1, a1 = min(p for p in points if p[0] >= budget)
    return a0 if t1 == t0 else a0 + (a1 - a0) * (budget - t0) / (t1 - t0)


def useful(record):
    mixed = record["groups_sampled"] * (1 - record["frac_outcome_zero_std"])
    return round(mixed) + record.get("groups_replayed", 0)


def facts(run, budget):
    """Returns a run's numbers up to `budget` tokens, by name."""
    steps = [(t, r) for t, r in totals(run) if t <= budget and "accuracy" in r]

    def accuracy(least, most):
        part = [r for t, r in steps if least * budget < t <= most * budget]
        tokens = [r["tokens_sampled"] for r in part]
        return sum(r["accuracy"] * n for r, n in zip(part, tokens, strict=True)) / sum(tokens)

    return {
        "updates": sum("loss" in r for _, r in steps),
        "useful groups": sum(useful(r) for _, r in steps),
        "... of them with a replayed completion": sum(
            r.get("groups_replayed", 0) for _, r in steps
        ),
        "tokens that the upper clip stops": statistics.mean(
            r["clip_ratio/high_mean"] for _, r in steps if "loss" in r
        ),
        "sampled accuracy, all tokens": accuracy(0, 1),
        "... first quarter": accuracy(0, 1 / 4),
        "... last quarter": accuracy(3 / 4, 1),
        "greedy accuracy, all tokens": greedy_at(run, budget),
    }


def cell(values):
    return f"{statistics.mean(values):.3g} ({min(values):.3g} to {max(values):.3g})"


def table():
    """Returns a table for each group size; "less" is a case less the same without REPLAY."""
    lines = []
    for size in "28":
        names = [name for name in CASES if name.endswith(size)]
        found = [[records_of(folder_of(name, s)) for s in SEEDS] for name in names]
        budget = min(totals(run)[-1][0] for seeds in found for run in seeds)
        rows = [[facts(run, budget) for run in seeds] for seeds in found]
        one, two, three, four = (CASES[name].label for name in names)
        lines += [
            "",
            f"| G = {size}, {budget} tokens | {one} | {two} | less | {three} | {four} | less |",
        ]
        lines.append("|" + "---|" * 7)
        for name in rows[0][0]:
            values, cells = [[row[name] for row in seeds] for seeds in rows], []
            for before, after in (values[:2], values[2:]):
                gaps = [b - a for a, b in zip(before, after, strict=True)]
                less = f"{statistics.mean(gaps):+.3g}, {sum(gap > 0 for gap in gaps)} of 5"
                cells += [cell(before), cell(after), less]
            lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    for seed in SEEDS:
        for name, case in CASES.items():
            if not runs.is_trained(case, seed, folder_of(name, seed), COMMON):
                runs.train(case, seed, folder_of(name, seed), COMMON)
    print(table())
