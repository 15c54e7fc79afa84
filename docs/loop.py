"""The README's first picture: one question, four of its answers, their rewards and advantages.

    .venv/bin/python -m docs.loop runs/demo       # needs a run of the demo

Draws docs/loop.png from the group in the first 20 steps of samples.jsonl whose answers differ most
in reward, as it was sampled and rewarded there. SAMPLES_PER_STEP must be GROUP_SIZE.
"""

import json
import sys
import textwrap
from pathlib import Path

from tasks.arithmetic import REWARD_WEIGHTS

PICTURE = Path(__file__).with_name("loop.png")
SHOWN = 4  # answers
FIRST_STEPS = 20
TITLES = ("a question", "the model answers it several times", "right?", "format", "advantage")
COLUMNS = (9.5, 43, 68, 75, 85)  # where they stand


def chosen(folder):
    """Returns four samples of one group, the best first, of as many different rewards as it has."""
    groups = {}
    for line in Path(folder, "samples.jsonl").read_text().splitlines():
        record = json.loads(line)
        if record["step"] <= FIRST_STEPS:
            groups.setdefault(record["group"], []).append(record)
    groups = [group for group in groups.values() if len(group) >= SHOWN]
    if not groups:
        sys.exit(f"{folder}/samples.jsonl has no group with {SHOWN} samples: SAMPLES_PER_STEP=8")
    best = max(groups, key=lambda group: len({r["advantage"] for r in group}))
    best.sort(key=lambda record: -record["advantage"])
    first = {record["advantage"]: record for record in reversed(best)}  # one of each reward
    shown = list(first.values())[:SHOWN]
    others = [record for record in best if record not in shown]
    return sorted(shown + others[: SHOWN - len(shown)], key=lambda record: -record["advantage"])


def draw(samples):
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
        effect = "likelier" if advantage > 0 else "less likely"
        ax.text(92, y, effect, va="center", color=color, fontsize=9)
    back = {"arrowstyle": "->", "color": "tab:blue", "lw": 1.5}
    ax.plot([COLUMNS[-1], COLUMNS[-1], COLUMNS[0]], [-2, -12, -12], color="tab:blue", lw=1.5)
    ax.annotate("", (COLUMNS[0], 20), (COLUMNS[0], -13), arrowprops=back)
    note = "the update makes the better answers likelier and the worse ones less likely; then again"
    ax.text(48, -21, note, ha="center", color="tab:blue", fontsize=9)
    figure.savefig(PICTURE, dpi=110)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    draw(chosen(sys.argv[1]))
