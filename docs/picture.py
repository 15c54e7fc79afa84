"""The README's curve and its table: the demo's accuracy by step, in runs that took place.

    make pictures                                                # the runs, then this
    .venv/bin/python -m docs.picture runs/demo_? runs/demo_shuffled

Writes docs/demo.png from each folder's metrics.jsonl; a folder named *shuffled is the control.
Prints what the model of the first folder answers to the first test questions, before and after.
"""

import json
import sys
from pathlib import Path

from grpo.models import load_tokenizer, prompt_ids
from grpo.sampling.policy import load_policy
from grpo.sampling.sampler import sample_groups
from tasks import arithmetic

PICTURE = Path(__file__).with_name("demo.png")
QUESTIONS = 3  # in the table
LABELS = {"eval_accuracy": "greedy, 500 unseen questions", "accuracy": "sampled, in training"}
STYLES = {
    "eval_accuracy": {"marker": "o", "linewidth": 1.6},
    "accuracy": {"linewidth": 0.8, "alpha": 0.5},
}


def draw(folders):
    import matplotlib

    matplotlib.use("Agg")  # no screen needed
    import matplotlib.pyplot as plt

    figure, ax = plt.subplots(figsize=(8, 3.6), layout="constrained")
    named = set()  # one entry of the legend for all seeds
    for folder in folders:
        lines = Path(folder, "metrics.jsonl").read_text().splitlines()
        records = [json.loads(line) for line in lines]
        control = folder.endswith("shuffled")
        for metric, label in LABELS.items():
            label = f"control, rewards shuffled: {label}" if control else label
            points = [(r["step"], r[metric]) for r in records if metric in r]
            ax.plot(
                *zip(*points, strict=True),
                color="tab:gray" if control else "tab:blue",
                label="_" if label in named else label,
                **STYLES[metric],
            )
            named.add(label)
    ax.set(xlabel="step (optimiser update)", ylabel="accuracy", ylim=(0, 1.02))
    ax.grid(alpha=0.3)
    ax.legend(fontsize=8, loc=(0.46, 0.42))
    figure.savefig(PICTURE, dpi=110)


def answers(folder, questions):
    """Returns the greedy answers of the model in `folder`."""
    policy = load_policy(folder, load_tokenizer(folder), "float32")
    groups = sample_groups(
        policy.model,
        [prompt_ids(policy.tokenizer, arithmetic.messages(question)) for question in questions],
        group_size=1,
        max_new_tokens=24,
        temperature=0,
        eos_ids=policy.eos_ids,
        vocab_size=policy.vocab_size,
        generator=None,
    )
    return [policy.text(completion) for (completion,) in groups]


def main(folders):
    draw(folders)
    questions = [item["question"] for item in arithmetic.load("test")[:QUESTIONS]]
    before = answers(f"{folders[0]}/warm_start", questions)
    after = answers(max(Path(folders[0]).glob("step_*")), questions)
    for row in zip(questions, before, after, strict=True):
        print(f"| {row[0]} | `{row[1]}` | `{row[2]}` |")


if __name__ == "__main__":
    if not sys.argv[1:]:
        sys.exit(__doc__)
    main(sys.argv[1:])
