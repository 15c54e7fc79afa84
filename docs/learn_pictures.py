"""The drawings of docs/learn.md: the clipped objective, three estimates of the KL, who holds what.

    .venv/bin/python -m docs.learn_pictures     # docs/learn_*.png, a few seconds

The curves are of grpo/loss.py's own values. The page's fourth picture, docs/demo.png, is of real
runs: docs/picture.py.
"""

from pathlib import Path

import torch

from grpo.loss import policy_loss

FOLDER = Path(__file__).parent
CLIP = 0.2  # CLIP_LOW and CLIP_HIGH
BLUE, GRAY, RED = "tab:blue", "tab:gray", "tab:red"


def objective(ratios, advantage):
    """Returns (value, its gradient with respect to logp) of tokens with these ratios, both (N,)."""
    logps = ratios.log().requires_grad_()
    given = torch.zeros_like(ratios), None, torch.full_like(ratios, advantage)
    gains = []
    for part in torch.eye(len(ratios)):  # the weights: one token at a time
        loss, _ = policy_loss(logps, *given, part, clip_low=CLIP, clip_high=CLIP, kl_beta=0.0)
        gains.append(-loss)
    values = torch.stack(gains)
    (slopes,) = torch.autograd.grad(values.sum(), logps)
    return values.detach(), slopes


def draw_clip():
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.4), layout="constrained")
    r = torch.linspace(0.4, 1.6, 241)
    for ax, advantage in zip(figure.subplots(1, 2), (1.0, -1.0), strict=True):
        values, slopes = objective(r, advantage)
        ax.plot(r, r * advantage, "--", color=GRAY, linewidth=1, label="r A")
        bounded = r.clamp(1 - CLIP, 1 + CLIP) * advantage
        ax.plot(r, bounded, ":", color=RED, linewidth=1.4, label="clip(r) A")
        ax.plot(r, values, color=BLUE, linewidth=2.4, label="min of both")
        flat = (slopes == 0).numpy()
        ax.fill_between(r, -1.8, 1.8, where=flat, color=BLUE, alpha=0.08, linewidth=0)
        ax.text(
            r[flat].mean(), 0.3 * advantage, "no gradient", ha="center", va="center", fontsize=8
        )
        limits = sorted((0.2 * advantage, 1.75 * advantage))
        ax.set(title=f"A = {advantage:+.0f}", xlabel="r", ylim=limits)
        ax.axvline(1, color="black", linewidth=0.6)
        ax.set_xticks([0.4, 0.6, 0.8, 1.0, 1.2, 1.4, 1.6])
        ax.grid(alpha=0.3)
        ax.legend(fontsize=8, loc="upper left" if advantage > 0 else "upper right")
    return figure


def estimates(d):
    """Returns {name: (N,)} of the three estimates at the differences d = ref_logp - logp."""
    logps, zeros = torch.zeros_like(d), torch.zeros_like(d)
    _, stats = policy_loss(logps, logps, d, zeros, zeros, clip_low=CLIP, clip_high=CLIP, kl_beta=1)
    return {"k1 = -d": -d, "k2 = d² / 2": d**2 / 2, "k3 = exp(d) - d - 1": stats["kl"]}


def draw_kl():
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.4), layout="constrained")
    ax = figure.subplots()
    d = torch.linspace(-2.2, 2.2, 221)
    for (name, values), style in zip(estimates(d).items(), ("--", ":", "-"), strict=True):
        color = BLUE if style == "-" else GRAY
        ax.plot(d, values, style, color=color, linewidth=2.4 if style == "-" else 1.4, label=name)
    ax.axhline(0, color="black", linewidth=0.6)
    ax.axvline(0, color="black", linewidth=0.6)
    ax.text(-2.15, 3.2, "the policy likes the token more", fontsize=8)
    ax.text(0.6, 3.2, "the reference likes it more", fontsize=8)
    ax.set(xlabel="d = ref_logp - logp", ylabel="nats", ylim=(-2.2, 5))
    ax.grid(alpha=0.3)
    ax.legend(fontsize=9, loc="upper center")
    return figure


# Who, from, to, the policy's number, text. Two updates a rollout; the worker is slow
TRAINER, WORKER, REFERENCE = 2, 1, 0
BARS = [
    (TRAINER, 0, 2, 0, "samples"),
    (TRAINER, 2, 3, 0, "update 1\nr = 1"),
    (TRAINER, 3, 4, 1, "update 2\nr = π1 / π0"),
    (TRAINER, 4, 6, 2, "samples"),
    (TRAINER, 6, 7, 2, "update 3\nr = 1"),
    (TRAINER, 7, 8, 3, "update 4\nr = π3 / π2"),
    (TRAINER, 8, 10, 4, "samples"),
    (TRAINER, 10, 11.2, 4, "update 5\nown: r = 1\nlate: π4 / π0"),
    (TRAINER, 11.2, 12.4, 5, "update 6\nown: π5 / π4\nlate: π5 / π0"),
    (WORKER, 0.4, 7.4, 0, "samples one group, slowly"),
    (WORKER, 7.4, 12.4, 2, "samples the next, with the newest that is published"),
    (REFERENCE, 0, 12.4, 0, "scores every group: ref_logp is always π0's"),
]


def draw_policies():
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.5, 3.6), layout="constrained")
    ax = figure.subplots()
    for who, begin, end, policy, text in BARS:
        color = colormaps["YlGnBu"](0.08 + policy * 0.11)
        ax.barh(who, end - begin, left=begin, height=0.72, color=color, edgecolor="black")
        label = f"π{policy}\n{text}"
        ax.text((begin + end) / 2, who, label, ha="center", va="center", fontsize=7.5)
    arrow = {"arrowstyle": "->", "color": RED, "linewidth": 1.6}
    ax.annotate("", (8.05, TRAINER - 0.36), (7.4, WORKER + 0.36), arrowprops=arrow)
    ax.text(
        8,
        1.5,
        "its group is trained from here on, 4 updates late",
        color=RED,
        fontsize=8,
        va="center",
    )
    ax.set_yticks([REFERENCE, WORKER, TRAINER], ["reference", "worker", "trainer"])
    ax.set(xlabel="time", xticks=[], xlim=(-0.1, 12.5), ylim=(-0.5, 2.5))
    return figure


DRAWINGS = {
    "learn_clip.png": draw_clip,
    "learn_kl.png": draw_kl,
    "learn_policies.png": draw_policies,
}


def main():
    for name, draw in DRAWINGS.items():
        draw().savefig(FOLDER / name, dpi=110)
        print(FOLDER / name)


if __name__ == "__main__":
    main()
