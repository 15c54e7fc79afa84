"""The README's curve and its table: the demo's accuracy by step in five runs and a control.

    make pictures                                                # the runs, then this
    .venv/bin/python -m docs.picture runs/demo_? runs/demo_shuffled
    .venv/bin/python -m docs.picture tools runs/tools_?/*    # demo_tools.py's: docs/tools.png

Writes docs/demo.png from each folder's metrics.jsonl; a folder named *shuffled is the control.
Prints how the model of the first folder answers the first test questions, before and after.
"""

import sys
from pathlib import Path

import plot
from demo import greedy_answers
from tasks import arithmetic

PICTURE = Path(__file__).with_name("demo.png")
QUESTIONS = 3  # in the table
STYLES = {  # by the end of a folder's name: colour, what its labels begin with, questions
    "shuffled": ("tab:gray", "control, rewards shuffled: ", "500 unseen"),
    "calculator": ("tab:orange", "calculator: ", "300 unseen"),
    "guess": ("tab:green", "guess: ", "all 7"),
    "": ("tab:blue", "", "500 unseen"),
}
CURVES = {  # metric: label and style
    "eval_accuracy": ("greedy, {} questions", {"marker": "o", "linewidth": 1.6}),
    "accuracy": ("sampled, in training", {"linewidth": 0.8, "alpha": 0.5}),
}


def draw(folders, target):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.6), layout="constrained")
    ax = figure.subplots()
    named = set()  # one entry of the legend for all seeds
    for folder in folders:
        records = plot.read(folder)
        color, before, number = next(s for end, s in STYLES.items() if folder.endswith(end))
        for metric, (label, style) in CURVES.items():
            label = before + label.format(number)
            points = [(r["step"], r[metric]) for r in records if metric in r]
            shown = "_" if label in named else label
            ax.plot(*zip(*points, strict=True), color=color, label=shown, **style)
            named.add(label)
    ax.set(xlabel="step (optimiser update)", ylabel="accuracy", ylim=(0, 1.02))
    ax.grid(alpha=0.3)
    ax.legend(fontsize=8, loc=(0.46, 0.42))
    figure.savefig(target, dpi=110)


def main(folders):
    if folders[0] == "tools":
        draw(folders[1:], PICTURE.with_name("tools.png"))
        return
    draw(folders, PICTURE)
    questions = [item["question"] for item in arithmetic.load("test")[:QUESTIONS]]
    both = [greedy_answers(Path(folders[0], name), questions) for name in ("warm_start", "final")]
    for question, one, other in zip(questions, *both, strict=True):
        print(f"| {question} | `{one}` | `{other}` |")


if __name__ == "__main__":
    main(sys.argv[1:] or sys.exit(__doc__))
