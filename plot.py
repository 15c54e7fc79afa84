"""Draws curves and prints samples of runs, from the files in their RUN_DIR.

    python plot.py runs/gsm8k                 # writes runs/gsm8k/curves.png
    python plot.py runs/a runs/b [two.png]    # compares runs: runs/a/curves_vs.png, or two.png
    python plot.py samples runs/gsm8k [40]    # prints the samples of step 40, or of the last step
    python plot.py samples runs/gsm8k looks_again    # prints those that earned this reward
    python plot.py live [runs/] [8080]        # serves a live page of all runs in a folder

Pale lines show each step, strong lines running means over at most 10 steps; steps without a dot
had nothing to train on. docs/metrics.md explains each metric.
"""

import json
import re
import signal
import sys
import textwrap
from contextlib import suppress
from itertools import groupby
from pathlib import Path

CURVES = {  # title: the metrics that share its axes
    "accuracy (markers: greedy evaluation)": ["accuracy", "eval_accuracy"],
    "reward": ["reward"],
    "KL to the reference (nats a token)": ["kl"],
    "completion length (tokens)": ["completions/mean_length"],
    "truncated completions (share)": ["completions/clipped_ratio"],
    "zero-variance groups (share)": ["frac_reward_zero_std"],
    "entropy (nats a token)": ["entropy"],
    "gradient norm": ["grad_norm"],
    "mismatch to the sampler (nats)": ["sampling/sampling_logp_difference/mean"],
}
REWARD = re.compile("rewards/(.+)/mean")
WIDTH, LINES = 78, 40  # columns and lines of a printed text, at most


def read(run_dir, name="metrics.jsonl"):
    """Returns the records in a file of a run; skips a line that is still being written."""
    path, records = Path(run_dir, name), []
    for line in path.read_text(errors="replace").splitlines() if path.exists() else ():
        with suppress(ValueError):
            records.append(json.loads(line))
    return records or sys.exit(f"{path} is missing or empty: name a RUN_DIR that has done a step")


def plot(*run_dirs, target=None):
    """Draws the runs; returns the picture's path, by default curves.png or curves_vs.png in the
    first run's folder."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    runs, curves = {str(Path(run_dir)): read(run_dir) for run_dir in run_dirs}, dict(CURVES)
    for name in {name: 0 for records in runs.values() for record in records for name in record}:
        if match := REWARD.fullmatch(name):
            curves[f"reward: {match[1]}"] = [name]
    last = max(record["step"] for records in runs.values() for record in records) or 1
    rows = -(-len(curves) // 3)
    figure = Figure(figsize=(13, 3.2 * rows), layout="constrained")
    axes = iter(figure.subplots(rows, 3).flat)
    for (title, names), ax in zip(curves.items(), axes, strict=False):
        for i, records in enumerate(runs.values()):
            for name in names:
                draw(ax, records, name, f"C{i}")
        ax.set(title=title, xlabel="step", xlim=(0, last))
        if "share" in title or names[0] == "accuracy":
            ax.set_ylim(-0.03, 1.03)
        ax.grid(alpha=0.3)
    for ax in axes:  # left over in the last row
        ax.remove()
    lines = [Line2D([], [], color=f"C{i}") for i in range(len(runs))]
    figure.legend(lines, list(runs), loc="outside upper center", ncols=3)
    target = target or Path(run_dirs[0], "curves_vs.png" if len(runs) > 1 else "curves.png")
    figure.savefig(target, dpi=110)
    return Path(target)


def draw(ax, records, name, color):
    """Draws a metric: its values and their running mean, or the points of an evaluation."""
    points = [(r["step"], r[name]) for r in records if r.get(name) is not None]
    if not points:
        return
    steps, values = zip(*points, strict=True)
    if name.startswith("eval_"):
        ax.plot(steps, values, color=color, marker="o", linestyle=":")
        return
    means, total, weight = [], 0.0, 0.0
    fade = 1 - 1 / min(10, max(1, len(values) / 20))  # in a short run a long mean would lag
    for value in values:
        total, weight = fade * total + value, fade * weight + 1
        means.append(total / weight)
    ax.plot(steps, values, color=color, alpha=0.35, linewidth=0.8, marker=".", markersize=2)
    ax.plot(steps, means, color=color)


def show_samples(run_dir, which=None):
    """Prints samples: those of step `which` (default: the last), or those of all steps that have a
    reward of this name above 0."""
    records = read(run_dir, "samples.jsonl")
    last = records[-1]
    if which is None or which.isdecimal():
        found = [r for r in records if r["step"] == int(which or last["step"])]
    else:
        found = [r for r in records if (r["rewards"].get(which) or 0) > 0]
    if not found:
        there = f"its last step is {last['step']}, its rewards are {', '.join(last['rewards'])}"
        sys.exit(f"{run_dir} has no samples of {which}; {there}")
    for _, ours in groupby(found, key=lambda r: r["step"]):
        show_step(list(ours))


def show_step(ours):
    """Prints the samples of a group, the best first."""
    group, ours = ours[0], sorted(ours, key=lambda r: -r["advantage"])
    flat = ": all answers have the same total reward" if group.get("flat") else ""
    print(f"step {group['step']}, sampled by {group['sampler']}{flat}")
    show("prompt", group["prompt"])
    if group.get("answer") is not None:
        show("answer", group["answer"])
    for r in ours:
        title = f"advantage {r['advantage']:+.2f}, {json.dumps(r['rewards'])}"
        turns = r.get("turns") or [r["completion"]]
        show(title + ", truncated" * r["truncated"], *turns[:1])
        for i, turn in enumerate(turns[1:]):
            show("the model goes on" if i % 2 else "the task", turn)


def show(title, text):
    # Control characters would act on the terminal, and splitlines() breaks lines at them
    text = str(text).removesuffix("\n").expandtabs(4)
    text = "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)
    lines = [part for line in text.split("\n") for part in textwrap.wrap(line, WIDTH) or [""]]
    lines[LINES:] = [f"... {len(lines) - LINES} more lines"] if len(lines) > LINES else []
    print(textwrap.fill(f"--- {title} ---", 80), *lines, sep="\n  ")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["samples", run, *which] if len(which) < 2:
            sys.stdout.reconfigure(errors="backslashreplace")  # what its encoding lacks
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it without a traceback
            show_samples(run, *which)
        case ["live", *more] if len(more) < 3 and "".join(more[1:] or "0").isdecimal():
            from grpo.commands.live import PORT, serve  # the other commands need no web server

            serve(*more[:1] or ["runs/"], int(*more[1:] or [PORT]))
        case [first, *more] if first not in ("live", "samples") and not first.startswith("-"):
            target = more.pop() if more and more[-1].endswith(".png") else None
            print(plot(first, *more, target=target))
        case _:
            sys.exit(__doc__)
