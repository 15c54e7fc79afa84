"""Curves of a run, from its metrics.jsonl to its curves.png.

python plot.py runs/gsm8k
"""

import json
import sys
from pathlib import Path

CURVES = {  # title: the metrics that share its axes
    "accuracy": ["accuracy", "eval_accuracy"],
    "reward": ["reward"],
    "KL to the reference (nats a token)": ["kl"],
    "completion length (tokens)": ["completions/mean_length"],
    "entropy (nats a token)": ["entropy"],
    "share of zero-variance (flat) groups": ["frac_outcome_zero_std"],
}


def plot(run_dir) -> Path:
    """Writes run_dir/curves.png from run_dir/metrics.jsonl and returns its path."""
    from matplotlib.figure import Figure

    path, target = Path(run_dir, "metrics.jsonl"), Path(run_dir, "curves.png")
    if not path.exists():
        sys.exit(f"{path} is not there: give the folder of a run, e.g. python plot.py runs/demo")
    records = [json.loads(line) for line in path.read_text().splitlines()]
    figure = Figure(figsize=(13, 6.5), layout="constrained")
    for ax, (title, names) in zip(figure.subplots(2, 3).flat, CURVES.items(), strict=True):
        for name in names:
            points = [(r["step"], r[name]) for r in records if name in r]
            if points:
                marker = "o" if name.startswith("eval_") else ""
                ax.plot(*zip(*points, strict=True), marker=marker, label=name)
        ax.set(title=title, xlabel="step")
        ax.grid(alpha=0.3)
        if ax.lines:
            ax.legend()
    figure.savefig(target, dpi=110)
    return target


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    print(plot(sys.argv[1]))
