"""Healthy and sick runs of the demo's task, for docs/reading_curves.md.

    python experiments/curves.py healthy    # trains a case, a minute on a free core
    python experiments/curves.py draw       # draws all trained cases: docs/curves/*.png and table

All cases start from one warm start of seed 0, which the first case makes in half a minute. A case
trains presets/demo.py with COMMON, its constants and seed 0 in runs/curves/CASE.
"""

import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from experiments.runs import HACKABLE, ROOT, Case, made_by, records_of, save_picture, train, values

RUNS, PICTURES = ROOT / "runs/curves", ROOT / "docs/curves"
TABLES = ROOT / "benchmarks/results/curves.md"
SEED = 0
FORMAT = {"REWARD_WEIGHTS": {"correctness": 0.0, "format": 1.0}}

COMMON = {"PROMPTS_PER_STEP": 16}
CASES = {
    "healthy": Case({}),
    "rate": Case({"LEARNING_RATE": 7e-3, "MASK_TRUNCATED": True}),
    "collapse": Case({"LEARNING_RATE": 2e-3, "KL_BETA": 0.0, "UPDATES_PER_ROLLOUT": 4}),
    "high_kl": Case({"KL_BETA": 1.0}),
    "hacked": Case(HACKABLE),
    "format": Case(FORMAT),
    "shuffled": Case({"TASK": "shuffled"}),
    "short": Case({"MAX_COMPLETION_TOKENS": 10, "MASK_TRUNCATED": True}),
}


# --- Pictures and table ---------------------------------------------------------------
PANELS = ("accuracy", "reward", "kl", "entropy", "completions/mean_length")
PANELS += ("completions/clipped_ratio", "frac_reward_zero_std", "grad_norm")
PANELS += ("sampling/sampling_logp_difference/mean",)
NOTES = {"accuracy": " (circles: greedy)", "kl": " (above 0.01: logarithmic)"}
UNITS = {"kl": "nats a token", "entropy": "nats a token", "completions/mean_length": "tokens"}
UNITS[PANELS[-1]] = "nats"
SHARES = ("accuracy", "completions/clipped_ratio", "frac_reward_zero_std")
LOGARITHMIC = ("grad_norm", "sampling/sampling_logp_difference/mean")
WINDOW = 10  # steps that a mean in the table is taken over
ENDS = (10, 30, 50)  # the last of them; and the run's last


def draw(name):
    """Draws a case, the healthy run pale behind it, with axes that hold both."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 5), layout="constrained")
    for metric, ax in zip(PANELS, figure.subplots(3, 3).flat, strict=True):
        strong = "tab:blue" if name == "healthy" else "tab:red"
        for run, color in {"healthy": "silver", name: strong}.items():
            records = records_of(RUNS / run)
            ax.plot(*line_of(records, metric), ".-", color=color, lw=1, ms=2)
            if points := values(records, f"eval_{metric}"):
                ax.plot(*zip(*points, strict=True), "o", color=color, ms=5)
        ax.set_title(metric.removeprefix("sampling/") + NOTES.get(metric, ""), fontsize=9)
        ax.set_ylabel("share" if metric in SHARES else UNITS.get(metric, ""), fontsize=7)
        ax.tick_params(which="both", labelsize=7)
        ax.grid(alpha=0.3)
        if metric in SHARES:
            ax.set_ylim(-0.04, 1.04)
        if metric in LOGARITHMIC:
            ax.set_yscale("log")
        if metric == "kl":  # it begins at 0
            ax.set_yscale("symlog", linthresh=0.01)
    figure.supxlabel("step", fontsize=8)
    save_picture(figure, PICTURES / f"{name}.png")


def line_of(records, metric):
    """Returns ([step], [value]) of a metric; NaN, a gap in the line, at steps without it."""
    steps = [record for record in records if "seconds" in record]  # other records are evaluations
    found = [math.nan if r.get(metric) is None else r[metric] for r in steps]
    return [record["step"] for record in steps], found


def table(name):
    """Returns a case's table: its settings, evaluations, and means of its metrics by steps."""
    records = records_of(RUNS / name)
    greedy = ", ".join(f"{v:.3f} after {step}" for step, v in values(records, "eval_accuracy"))
    formatted = values(records, "eval_positive_format")[-1][1]
    last = records[-1]["step"]
    ends = [end for end in ENDS if end + WINDOW <= last] + [last]
    evaluated = f"Greedy accuracy: {greedy} steps; {formatted:.3f} are then in the format."
    lines = [f"## {name}", "", f"{CASES[name].settings()}. {evaluated}", ""]
    lines += [f"| steps | {' | '.join(f'{end - WINDOW + 1}-{end}' for end in ends)} |"]
    lines += ["|---|" + "---|" * len(ends)]
    for metric in PANELS:
        cells = [mean(values(records, metric), end) for end in ends]
        lines.append(f"| {metric} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def mean(points, end):
    """Returns the mean of a metric over the WINDOW of steps up to `end`, "" if it has none."""
    inside = [value for step, value in points if end - WINDOW < step <= end]
    return f"{sum(inside) / len(inside):.3g}" if inside else ""


def main():
    names = [name for name in CASES if (RUNS / name / "metrics.jsonl").exists()]
    for name in names:
        draw(name)
    words = f"""# Healthy and sick runs

`python experiments/curves.py CASE` each, seed {SEED}, 16 prompts a step, after one warm start:
{made_by([RUNS / name for name in names])}
Greedy accuracy is on the 500 test questions; all other numbers are means over
{WINDOW} steps, of those that have the metric. Their curves are in docs/reading_curves.md.

"""
    TABLES.write_text(words + "\n".join(map(table, names)))


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in {*CASES, "draw"}:
        sys.exit(f"{__doc__}\nCases: {', '.join(CASES)}")
    name = sys.argv[1]
    main() if name == "draw" else train(CASES[name], SEED, RUNS / name, COMMON)
