"""Holds the GSM8K checker against 5,276 labelled solutions: four models, 1,319 test questions.

    python -m benchmarks.gsm8k_checker example_model_solutions.jsonl

The file is grade_school_math/data/example_model_solutions.jsonl in the openai/grade-school-math
repository on GitHub (2.5 MB); it is not copied here. Prints each disagreement with its label, the
agreement, and the time per 1,000 rewards. It measures agreement on text that models really wrote,
nearly all of which ends in "A: 18"; what the tags and LaTeX need is in tests/test_rewards.py.
"""

import json
import sys
import time
from pathlib import Path

from tasks.answers import final_answer
from tasks.gsm8k import CORRECT, rewards


def read(path):
    """Returns (gold, solution, label) for every labelled solution in the file."""
    rows = []
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        gold = entry["ground_truth"].rsplit("A:", 1)[1].strip()
        solutions = [value for value in entry.values() if isinstance(value, dict)]
        rows += [(gold, s["solution"], s["is_correct"]) for s in solutions]
    return rows


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    rows = read(sys.argv[1])
    start = time.perf_counter()
    verdicts = [rewards({"answer": g}, text)["correctness"] == CORRECT for g, text, _ in rows]
    seconds = time.perf_counter() - start
    wrong = 0
    for (gold, text, label), verdict in zip(rows, verdicts, strict=True):
        if verdict != label:
            wrong += 1
            print(f"gold {gold!r}, labelled {label}, checker {verdict}: {final_answer(text)[0]!r}")
    agreed = len(rows) - wrong
    print(f"{agreed} of {len(rows)} agree: {agreed / len(rows):.3%}")
    print(f"{seconds / len(rows) * 1e6:.0f} ms per 1,000 rewards")


if __name__ == "__main__":
    main()
