"""Does REPLAY help a student that is rarely right? At equal tokens, groups of 2 and of 8.

    python experiments/replay.py           # trains the missing runs one by one; prints the table

64 questions (few.py): with its replacements (MAX_REFILLS = 1) a rollout has each question once (G =
8: 32 groups, half of them; G = 2: 128 groups, each twice), so 16 rollouts are 8 or 32 epochs. The
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
CASES = {
    "few2": Case(PAIRS, "MAX_REFILLS", "rare"),
    "replay2": Case(PAIRS | {"REPLAY": ROLLOUTS}, "REPLAY, too", "rare"),
    "few8": Case({}, "MAX_REFILLS", "rare"),
    "replay8": Case({"REPLAY": ROLLOUTS}, "REPLAY, too", "rare"),
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
    """Returns a run's numbers up to `budget` tokens."""
    steps = [r for t, r in totals(run) if t <= budget and "accuracy" in r]
    sampled = sum(r["tokens_sampled"] for r in steps)
    return {
        "updates": len(steps),
        "useful groups": sum(map(useful, steps)),
        "... of them replayed": sum(r.get("groups_replayed", 0) for r in steps),
        "sampled accuracy, mean": sum(r["accuracy"] * r["tokens_sampled"] for r in steps) / sampled,
        "greedy, half of the tokens": greedy_at(run, budget / 2),
        "greedy, all": greedy_at(run, budget),
    }


def table():
    lines = []
    for base, other in (("few2", "replay2"), ("few8", "replay8")):
        found = {name: [records_of(folder_of(name, s)) for s in SEEDS] for name in (base, other)}
        budget = min(totals(run)[-1][0] for seeds in found.values() for run in seeds)
        rows = {n: [facts(run, budget) for run in seeds] for n, seeds in found.items()}
        names = list(rows[base][0])
        lines += ["", f"G = {base[-1]}, {budget} tokens", "", f"| | {' | '.join(names)} |"]
        lines.append("|---|" + "---|" * len(names))
        for case, seeds in rows.items():
            cells = []
            for name in names:
                values = [row[name] for row in seeds]
                mean = statistics.mean(values)
                cells.append(f"{mean:.3g} ({min(values):.3g} to {max(values):.3g})")
                if case == other:
                    gaps = [v - row[name] for v, row in zip(values, rows[base], strict=True)]
                    cells[-1] += f" {statistics.mean(gaps):+.3f}, {sum(g > 0 for g in gaps)} of 5"
            lines.append(f"| {CASES[case].label} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    for seed in SEEDS:
        for name, case in CASES.items():
            if not runs.is_trained(case, seed, folder_of(name, seed), COMMON):
                runs.train(case, seed, folder_of(name, seed), COMMON)
    print(table())
