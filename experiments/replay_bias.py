"""The expected gradient of a group by enumeration, if groups are chosen by outcome.

    python experiments/replay_bias.py

A policy has four completions of one token: two are right, two wrong. All groups of G are enumerated
with the trainer's advantages and loss, no KL. A gradient is printed as its weight, the factor by
which it is longer along the true gradient of the accuracy than that, and its cosine with that.
"""

import itertools
import math
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import grpo_ref_split as trainer
from grpo.loss import group_advantages, policy_loss

RIGHT = torch.tensor([1.0, 1.0, 0.0, 0.0])
DEFAULTS = trainer.DEFAULTS


def policy(right, first=0.8):
    """Returns a policy's log-probs (4,): `first` is the first's share of `right`."""
    wrong = 1 - right
    return torch.tensor([right * first, right * (1 - first), wrong * 0.7, wrong * 0.3]).log()


def accuracy_gradient(logps):
    probs = logps.exp()
    return probs * (RIGHT - (probs * RIGHT).sum())


def gradient(logps, group, old=None):
    """Returns the gradient (4,) that a group (a list of completions) has by the logits. `old`: the
    log-probs (4,) of the policy that sampled the last one, as REPLAY's."""
    theta, group = logps.clone().requires_grad_(), torch.tensor(group)
    now = theta.log_softmax(0)[group]
    sampler = now.detach().clone()
    if old is not None:
        sampler[-1] = old[group[-1]]
    advantages = group_advantages(RIGHT[group], scale_by_std=DEFAULTS["ADVANTAGE_STD"])
    loss, _ = policy_loss(
        now, sampler, None, advantages, torch.full((len(group),), 1 / len(group)), kl_beta=0.0,
        clip_low=DEFAULTS["CLIP_LOW"], clip_high=DEFAULTS["CLIP_HIGH"],
        sampler_logps=sampler, is_cap=DEFAULTS["IS_CAP"], ratio_cap=DEFAULTS["IS_CAP"],
    )  # fmt: skip
    return -torch.autograd.grad(loss, theta)[0]


def groups(logps, size, among=range(4)):
    """Yields (probability, group) of all groups up to their order."""
    for group in itertools.combinations_with_replacement(among, size):
        orders = math.factorial(size)
        for n in map(group.count, set(group)):
            orders //= math.factorial(n)
        yield orders * math.exp(sum(logps[i] for i in group)), list(group)


def mixed(logps, size):
    """Returns (the share of groups that are not flat, their part of the expected gradient)."""
    share, total = 0.0, torch.zeros(4)
    for p, group in groups(logps, size):
        if len({RIGHT[i].item() for i in group}) == 2:
            share, total = share + p, total + p * gradient(logps, group)
    return share, total


def replayed(logps, size, old, kept=None, found=(1.0, 1.0)):
    """Returns (the share of groups that REPLAY adds, their part of the expected gradient).

    The completion of the other outcome is drawn from `old`, or is `kept`; `found` are the
    probabilities that a right one is kept, and a wrong one."""
    share, total = 0.0, torch.zeros(4)
    for others, same, there in (([0, 1], [2, 3], found[0]), ([2, 3], [0, 1], found[1])):
        one = logps[same].exp().sum().item()  # the replaced completion's probability
        others = [kept] if kept in others else others
        given = old[others].softmax(0).tolist()
        for p, group in groups(logps, size - 1, same):
            share += there * one * p
            for q, other in zip(given, others, strict=True):
                total = total + there * one * p * q * gradient(logps, [*group, other], old)
    return share, total


def against(found, logps):
    """Returns "weight, cosine" of a gradient."""
    true = accuracy_gradient(logps)
    weight = (found @ true / (true @ true)).item()
    return f"{weight:.2f}, {torch.cosine_similarity(found, true, 0).item():.3f}"


def directions(size):
    """Returns rows: how a rule's gradient lies to that of the accuracy."""
    now, old = policy(0.05), policy(0.03, first=0.6)
    share, plain = mixed(now, size)
    rows = [("groups that are not flat", share, plain), ("... replaced", 1.0, plain / share)]
    for name, *settings in (
        ("REPLAY adds, sampled by this policy", now),
        ("... by an older one", old),
        ("... by an older one, always its first right one", old, 0),
        ("... always its second right one", old, 1),
    ):
        rows.append((name, *replayed(now, size, *settings)))
    return [f"| {name} | {share:.3f} | {against(found, now)} |" for name, share, found in rows]


def weights(size, visits=16, accuracies=(0.02, 0.1, 0.3, 0.5, 0.9, 0.98)):
    """Returns rows: the weights of prompts by their accuracy, relative to one of 0.5."""

    def weight(p, replay):
        now = policy(p)
        found = [1 - (1 - x) ** (size * visits) for x in (p, 1 - p)]
        total = mixed(now, size)[1] + (replayed(now, size, now, found=found)[1] if replay else 0)
        true = accuracy_gradient(now)
        return (total @ true / (true @ true)).item()

    rows = []
    for name, replay in (("skipped, replaced or kept", False), ("REPLAY", True)):
        middle = weight(0.5, replay)
        cells = [f"{weight(p, replay) / middle:.2f}" for p in accuracies]
        rows.append(f"| {name} | {' | '.join(cells)} |")
    return rows


if __name__ == "__main__":
    for size in (2, 8):
        print(f"G = {size}", *directions(size), *weights(size), sep="\n")
