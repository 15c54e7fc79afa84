"""Pictures of runs: a group's answers and advantages, and accuracy by step.

    make pictures                                                # the runs, then the curve
    .venv/bin/python -m experiments.picture runs/demo_? runs/demo_shuffled              # demo.png
    .venv/bin/python -m experiments.picture real runs/smollm2_? runs/smollm2_shuffled  # real.png
    .venv/bin/python -m experiments.picture tools runs/tools_?/*                        # tools.png
    .venv/bin/python -m experiments.picture loop runs/demo                              # loop.png

A folder named *shuffled is the control. loop shows the group in the first 20 steps whose answers
differ most in reward, as it was sampled and rewarded there.
The program at b259441 drew docs/turns.png.
"""

import json
import sys
import textwrap
from pathlib import Path

import plot
from tasks.arithmetic import REWARD_WEIGHTS

FOLDER = Path(__file__).parents[1] / "docs"

# --- One group --------------------------------------------------------------------------
SHOWN = 4  # answers
REWARDS = (f"{w:g} × {name}" if w != 1 else name for name, w in REWARD_WEIGHTS.items())
TITLES = ("a question", "four of its eight answers", *REWARDS, "advantage")
COLUMNS = (9.5, 42, 66.5, 76, 84.5)  # where they stand


def chosen(folder):
    """Returns four samples of one group, the best first, of as many different rewards as it has."""
    groups = {}
    for line in Path(folder, "samples.jsonl").read_text().splitlines():
        record = json.loads(line)
        if record["step"] <= 20:
            groups.setdefault(record["group"], []).append(record)
    best = max(groups.values(), key=lambda group: len({r["advantage"] for r in group}))
    best.sort(key=lambda record: -record["advantage"])
    first = {record["advantage"]: record for record in reversed(best)}  # one of each reward
    shown = [*first.values(), *(record for record in best if record not in first.values())]
    return sorted(shown[:SHOWN], key=lambda record: -record["advantage"])


def draw_loop(samples):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.4), layout="constrained")
    ax = figure.subplots()
    ax.set(xlim=(0, 100), ylim=(-22, 100))
    ax.axis("off")
    box = {"boxstyle": "round,pad=0.5", "facecolor": "whitesmoke", "edgecolor": "gray"}
    for x, title in zip(COLUMNS, TITLES, strict=True):
        ax.text(x, 97, title, ha="center", weight="bold", fontsize=9)
    question = textwrap.fill(samples[0]["question"], 20)
    ax.text(COLUMNS[0], 44, question, ha="center", va="center", bbox=box, fontsize=9)
    for number, sample in enumerate(samples):
        y, rewards, advantage = 80 - 24 * number, sample["rewards"], sample["advantage"]
        color = "tab:green" if advantage > 0 else "tab:red"
        ax.annotate("", (25, y), (19.5, 44), arrowprops={"arrowstyle": "->", "color": "gray"})
        text = sample["completion"].removesuffix("<|im_end|>")
        ax.text(26, y, text, va="center", family="monospace", fontsize=8, bbox=box)
        marks = (f"{REWARD_WEIGHTS[name] * rewards[name]:+.2f}" for name in REWARD_WEIGHTS)
        for x, mark in zip(COLUMNS[2:], [*marks, f"{advantage:+.2f}"], strict=True):
            weight = {"color": color, "weight": "bold"} if x == COLUMNS[-1] else {}
            ax.text(x, y, mark, ha="center", va="center", fontsize=9, **weight)
        effect = "more likely" if advantage > 0 else "less likely"
        ax.text(92, y, effect, va="center", color=color, fontsize=9)
    back = {"arrowstyle": "->", "color": "tab:blue", "lw": 1.5}
    ax.plot([COLUMNS[-1], COLUMNS[-1], COLUMNS[0]], [-2, -12, -12], color="tab:blue", lw=1.5)
    ax.annotate("", (COLUMNS[0], 20), (COLUMNS[0], -13), arrowprops=back)
    note = "the update makes the model give better answers more often; then repeat"
    ax.text(48, -21, note, ha="center", color="tab:blue", fontsize=9)
    figure.savefig(FOLDER / "loop.png", dpi=110)


# --- Runs -------------------------------------------------------------------------------
STYLES = {  # by the end of a folder's name: color, what its labels begin with, questions
    "shuffled": ("tab:gray", "control, shuffled, one seed: ", "{} held-out"),
    "calculator": ("tab:orange", "calculator: ", "300 held-out"),
    "guess": ("tab:green", "guess: ", "all 7"),
    "": ("tab:blue", "", "{} held-out"),
}
CURVES = {  # metric: label and style
    "eval_accuracy": ("greedy, {} questions", {"marker": "o", "linewidth": 1.6}),
    "accuracy": ("sampled, in training", {"linewidth": 0.8, "alpha": 0.5}),
}


def draw(folders, target, unseen=500):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.6), layout="constrained")
    ax = figure.subplots()
    named = set()  # one entry of the legend for all seeds
    for folder in folders:
        records = plot.read(folder)
        color, before, number = next(s for end, s in STYLES.items() if folder.endswith(end))
        for metric, (label, style) in CURVES.items():
            label = before + label.format(number.format(unseen))
            points = [(r["step"], r[metric]) for r in records if metric in r]
            shown = "_" if label in named else label
            ax.plot(*zip(*points, strict=True), color=color, label=shown, **style)
            named.add(label)
    ax.set(xlabel="step (optimizer update)", ylabel="accuracy", ylim=(0, 1.02))
    ax.grid(alpha=0.3)
    ax.legend(fontsize=8, loc="best")
    figure.savefig(target, dpi=110)


def main(folders):
    if folders[0] in ("real", "tools"):
        return draw(folders[1:], FOLDER / f"{folders[0]}.png", 200)
    if folders[0] == "loop":
        return draw_loop(chosen(folders[1]))
    draw(folders, FOLDER / "demo.png")


if __name__ == "__main__":
    main(sys.argv[1:] or sys.exit(__doc__))
