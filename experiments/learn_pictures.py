"""Two drawings of docs/learn.md: the clipped objective, and three estimates of the KL.

    .venv/bin/python -m experiments.learn_pictures    # docs/learn_clip.png, learn_kl.png

The curves are values of grpo/loss.py. `git show 655591d:docs/learn_pictures.py` has drawn the
page's diagram, docs/learn_policies.png.
"""

from pathlib import Path

import torch

from experiments import learn
from grpo.loss import policy_loss

FOLDER = Path(__file__).parents[1] / "docs"
BLUE, GRAY, RED = "tab:blue", "tab:gray", "tab:red"


def objective(ratios, advantage):
    """Returns (value, its gradient with respect to logp) of tokens with these ratios, both (N,)."""
    logps, weights = ratios.log().requires_grad_(), torch.ones_like(ratios).requires_grad_()
    given = torch.zeros_like(ratios), None, torch.full_like(ratios, advantage)
    loss, _ = policy_loss(logps, *given, weights, **learn.CLIPS, kl_beta=0.0)
    # The loss is the sum of weight x value, so its gradient by a weight is the value
    return torch.autograd.grad(-loss, (weights, logps))


def draw_clip(figure):
    r = torch.linspace(0.4, 1.6, 241)
    for ax, advantage in zip(figure.subplots(1, 2), (1.0, -1.0), strict=True):
        values, slopes = objective(r, advantage)
        ax.plot(r, r * advantage, "--", color=GRAY, linewidth=1, label="r A")
        bounded = r.clamp(1 - learn.CLIP_LOW, 1 + learn.CLIP_HIGH) * advantage
        ax.plot(r, bounded, ":", color=RED, linewidth=1.4, label="clip(r) A")
        ax.plot(r, values, color=BLUE, linewidth=2.4, label="min of both")
        flat = (slopes == 0).numpy()
        ax.fill_between(r, -1.8, 1.8, where=flat, color=BLUE, alpha=0.08, linewidth=0)
        ax.text(r[flat].mean(), 0.3 * advantage, "no gradient", ha="center", fontsize=8)
        limits = sorted((0.2 * advantage, 1.75 * advantage))
        ax.set(title=f"A = {advantage:+.0f}", xlabel="r", ylim=limits)
        ax.axvline(1, color="black", linewidth=0.6)
        ax.grid(alpha=0.3)
        ax.legend(fontsize=8, loc="upper left" if advantage > 0 else "upper right")


def draw_kl(figure):
    ax, d = figure.subplots(), torch.linspace(-2.2, 2.2, 221)
    for (name, values), style in zip(learn.estimates(d).items(), ("--", ":", "-"), strict=True):
        color, width = (BLUE, 2.4) if style == "-" else (GRAY, 1.4)
        ax.plot(d, values, style, color=color, linewidth=width, label=name)
    ax.axhline(0, color="black", linewidth=0.6)
    ax.axvline(0, color="black", linewidth=0.6)
    ax.text(-2.15, 3.2, "the policy likes the token more", fontsize=8)
    ax.text(0.6, 3.2, "the reference likes it more", fontsize=8)
    ax.set(xlabel="d = ref_logp - logp", ylabel="nats", ylim=(-2.2, 5))
    ax.grid(alpha=0.3)
    ax.legend(fontsize=9, loc="upper center")


DRAWINGS = {"learn_clip.png": draw_clip, "learn_kl.png": draw_kl}


def main():
    from matplotlib.figure import Figure

    for name, draw in DRAWINGS.items():
        figure = Figure(figsize=(8, 3.4), layout="constrained")
        draw(figure)
        figure.savefig(FOLDER / name, dpi=110)


if __name__ == "__main__":
    main()
