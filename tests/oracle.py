"""Tokens for the loss, and an oracle: the objective in float64, written independently."""

import math

import torch

from grpo.loss import policy_loss

CLIPS = {"clip_low": 0.2, "clip_high": 0.28, "kl_beta": 0.0}
GSPO = CLIPS | {"gspo": True, "clip_low": 0.08, "clip_high": 0.1}  # means spread less
VARIANTS = {
    "clip": CLIPS,
    "kl": CLIPS | {"kl_beta": 0.3},
    "unbiased_kl": CLIPS | {"kl_beta": 0.3, "unbiased_kl": True},
    "cispo": CLIPS | {"objective": "cispo", "kl_beta": 0.3},
    "capped": CLIPS | {"is_cap": 1.1, "kl_beta": 0.3},
    "bounded": CLIPS | {"ratio_cap": 1.3, "kl_beta": 0.3},
    "low_bounded": CLIPS | {"ratio_cap": 1.1, "unbiased_kl": True, "kl_beta": 0.3},
    "capped_cispo": CLIPS | {"is_cap": 1.1, "objective": "cispo"},
    "on_policy": CLIPS | {"on_policy": True},
    "on_policy_kl": CLIPS | {"on_policy": True, "kl_beta": 0.3, "unbiased_kl": True, "is_cap": 1.1},
    "gspo": GSPO,
    "gspo_kl": GSPO | {"kl_beta": 0.3, "unbiased_kl": True, "is_cap": 1.1},
}


def make(variant, size=24):
    """-> (batch, settings): policy_loss's tensors (N,), and its numbers. Log-ratios spread by 0.4,
    so that each side of the clip has its tokens."""
    torch.manual_seed(0)
    settings = dict(variant)
    on_policy, gspo = settings.pop("on_policy", False), settings.pop("gspo", False)
    logps = -5 * torch.rand(size)
    old, ref, sampler = logps + 0.4 * torch.randn(3, size)
    batch = {
        "logps": logps,
        "old_logps": None if on_policy else old,
        "ref_logps": ref if settings["kl_beta"] else None,
        "advantages": torch.randn(size),
        "weights": torch.rand(size) + 0.1,
        "sampler_logps": sampler if "is_cap" in settings else None,
        "sequences": torch.arange(size) * 4 // size if gspo else None,
    }
    return batch, settings


def run(batch, settings):
    """-> (loss, its gradient by logps), stats"""
    logps = batch["logps"].clone().requires_grad_()
    loss, stats = policy_loss(**batch | {"logps": logps}, **settings)
    loss.backward()
    return (loss.detach(), logps.grad), stats


def oracle(
    logps, old_logps, ref_logps, advantages, weights, sampler_logps, sequences, *,
    clip_low, clip_high, kl_beta, objective="clip", unbiased_kl=False, is_cap=0.0,
    ratio_cap=math.inf,
):  # fmt: skip
    """-> the loss, its gradient, the sum of the loss's |terms|: in float64, by papers' formulas."""
    logp = logps.double().requires_grad_()
    old, a = (logp.detach() if old_logps is None else old_logps.double()), advantages.double()
    r = of_token = (logp - old).exp()
    if sequences is not None:
        for number in range(4):
            own = sequences == number
            r = torch.where(own, (logp - old)[own].sum().div(own.sum()).exp(), r)
    if objective == "cispo":
        gain = r.detach().clamp(1 - clip_low, 1 + clip_high) * a * logp
    else:  # the same as the smaller of two: bounded only where that lowers the objective
        r = r.clamp(max=ratio_cap)
        gain = a * torch.where(a > 0, r.clamp(max=1 + clip_high), r.clamp(min=1 - clip_low))
    if is_cap:
        gain = gain * (old - sampler_logps).exp().clamp(max=is_cap)
    if kl_beta:
        d = ref_logps.double() - logp
        cut = (ratio_cap / of_token.detach()).clamp(max=1)  # what the cap takes of the ratio
        gain = gain - kl_beta * (d.exp() - 1 - d) * (of_token * cut if unbiased_kl else 1)
    terms = weights * gain
    (gradient,) = torch.autograd.grad(-terms.sum(), logp)
    return -terms.detach().sum(), gradient, terms.detach().abs().sum()


def error(got, exact):
    """-> the norm of the difference, relative to that of `exact`."""
    assert got.shape == exact.shape
    return ((got.double() - exact).norm() / exact.norm()).item()


def errors(results, batch, settings):
    """-> those of loss and gradient; the loss's relative to its terms, as they nearly cancel."""
    loss, gradient, terms = oracle(**batch, **settings)
    return ((results[0].double() - loss).abs() / terms).item(), error(results[1], gradient)
