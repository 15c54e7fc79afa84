"""Batches for the fused loss, and an oracle: the loss in float64, written independently."""

import math

import torch

from grpo import loss as plain

CLIPS = {"clip_low": 0.2, "clip_high": 0.28, "kl_beta": 0.0}
GSPO = CLIPS | {"gspo": True, "clip_low": 0.08, "clip_high": 0.1}  # means spread less
VARIANTS = {
    "clip": CLIPS,
    "kl": CLIPS | {"kl_beta": 0.3},
    "unbiased_kl": CLIPS | {"kl_beta": 0.3, "unbiased_kl": True},
    "cispo": CLIPS | {"objective": "cispo", "kl_beta": 0.3},
    "capped": CLIPS | {"is_cap": 1.1, "kl_beta": 0.3},
    "masked": CLIPS | {"is_cap": 1.3, "is_mask": True, "kl_beta": 0.3},
    "bounded": CLIPS | {"ratio_cap": 1.3, "kl_beta": 0.3},
    "low_bounded": CLIPS | {"ratio_cap": 1.1, "unbiased_kl": True, "kl_beta": 0.3},
    "capped_cispo": CLIPS | {"is_cap": 1.1, "objective": "cispo", "temperature": 0.7},
    "warm": CLIPS | {"temperature": 1.6, "kl_beta": 0.3},
    "padded_head": CLIPS | {"temperature": 0.7, "vocab_size": 90, "kl_beta": 0.3},
    "on_policy": CLIPS | {"on_policy": True},
    "on_policy_kl": CLIPS | {"on_policy": True, "kl_beta": 0.3, "unbiased_kl": True, "is_cap": 1.1},
    "gspo": GSPO,
    "gspo_kl": GSPO | {"kl_beta": 0.3, "unbiased_kl": True, "is_cap": 1.1,
                       "temperature": 0.7, "vocab_size": 90},
}  # fmt: skip


def make(variant, shape=(24,), *, width=97, size=16, dtype=torch.float32):
    """-> (batch, settings), the keyword arguments of grpo_loss. A batch (4, 6) has padding.

    The first ids are column 0, the last column and the likeliest one; log-ratios spread by 0.4, so
    that each side of the clip has its tokens.
    """
    torch.manual_seed(0)
    settings = dict(variant)
    on_policy, gspo = settings.pop("on_policy", False), settings.pop("gspo", False)
    vocab, temperature = settings.get("vocab_size", width), settings.get("temperature", 1.0)
    hidden, head = torch.randn(*shape, size).to(dtype), (torch.randn(width, size) / 2).to(dtype)
    z = (hidden.double() @ head.double().T)[..., :vocab] / temperature
    ids = torch.randint(vocab, shape)
    corners = torch.tensor([vocab - 1, 0, z.reshape(-1, vocab)[min(2, ids.numel() - 1)].argmax()])
    ids.view(-1)[:3] = corners[: ids.numel()]
    exact = z.log_softmax(-1).gather(-1, ids[..., None]).squeeze(-1)
    old, ref, sampler = ((exact + 0.4 * torch.randn(shape)).float() for _ in range(3))
    weights, rows = torch.rand(shape) + 0.1, torch.arange(shape[0])
    if shape == (4, 6):
        weights *= torch.arange(6) < torch.tensor([[5], [0], [2], [6]])
    sequences = rows[:, None].expand(shape) if len(shape) == 2 else rows * 4 // shape[0]
    batch = {
        "hidden": hidden, "head": head, "ids": ids, "weights": weights,
        "old_logps": None if on_policy else old, "ref_logps": ref if settings["kl_beta"] else None,
        "advantages": torch.randn(shape[0]), "sequences": sequences if gspo else None,
        "sampler_logps": sampler if "is_cap" in settings else None,
    }  # fmt: skip
    return batch, settings


def with_garbage(batch):
    """-> the batch with what padding may hold wherever the weight is 0."""
    masked, batch = batch["weights"] == 0, dict(batch)
    garbage = {"ids": -100, "old_logps": math.nan, "ref_logps": 1e30, "sampler_logps": -math.inf}
    for name, value in garbage.items():
        if batch[name] is not None:
            batch[name] = batch[name].masked_fill(masked, value)
    return batch | {"hidden": batch["hidden"].masked_fill(masked[..., None], math.nan)}


def oracle(
    hidden, head, ids, old_logps, ref_logps, advantages, weights, sampler_logps, sequences, *,
    clip_low, clip_high, kl_beta, temperature=1.0, vocab_size=None, objective="clip",
    unbiased_kl=False, is_cap=0.0, is_mask=False, ratio_cap=math.inf,
):  # fmt: skip
    """-> loss, dH, dW and the sum of the loss's |terms|: autograd in float64, papers' formulas."""
    hidden, head = (t.detach().double().requires_grad_() for t in (hidden, head))
    z = (hidden @ head.T)[..., :vocab_size] / temperature
    logp = z.gather(-1, ids[..., None]).squeeze(-1) - z.logsumexp(-1)
    old = logp.detach() if old_logps is None else old_logps.double()
    a = advantages.double().view(-1, *[1] * (ids.dim() - 1))
    r = of_token = (logp - old).exp()
    if sequences is not None:
        for number in range(4):
            own = (sequences == number) & (weights > 0)
            r = torch.where(own, (logp - old)[own].sum().div(own.sum()).exp(), r)
    if objective == "cispo":
        gain = r.detach().clamp(1 - clip_low, 1 + clip_high) * a * logp
    else:  # the same as the smaller of two: bounded only where that lowers the objective
        r = r.clamp(max=ratio_cap)
        gain = a * torch.where(a > 0, r.clamp(max=1 + clip_high), r.clamp(min=1 - clip_low))
    if is_cap:
        log = old - sampler_logps
        inside = log.abs() <= math.log(is_cap)
        gain = gain * (log.exp() * inside if is_mask else log.exp().clamp(max=is_cap))
    if kl_beta:
        d = ref_logps.double() - logp
        cut = (ratio_cap / of_token.detach()).clamp(max=1)  # what the cap takes of the ratio
        gain = gain - kl_beta * (d.exp() - 1 - d) * (of_token * cut if unbiased_kl else 1)
    terms = (weights * gain)[weights > 0]
    grads = torch.autograd.grad(-terms.sum(), (hidden, head))
    return -terms.detach().sum(), *grads, terms.detach().abs().sum()


def run(module, batch, settings, *, factor=1.0):
    """-> (loss, dH, dW), stats"""
    leaves = {name: batch[name].clone().requires_grad_() for name in ("hidden", "head")}
    loss, stats = module.grpo_loss(**batch | leaves, **settings)
    (loss * factor).backward()
    return (loss.detach(), leaves["hidden"].grad, leaves["head"].grad), stats


def error(got, exact):
    """-> the norm of the difference, relative to that of `exact`."""
    assert got.shape == exact.shape
    return ((got.double() - exact).norm() / exact.norm()).item()


def errors(results, exact):
    """-> those of loss, dH and dW; the loss's relative to its terms, as they nearly cancel."""
    of_loss = (results[0].double() - exact[0]).abs() / exact[3]
    return of_loss.item(), error(results[1], exact[1]), error(results[2], exact[2])


def on_device(engine, batch):
    return {name: t if t is None else t.to(engine.device) for name, t in batch.items()}


def check(engine, batch, settings, tolerance=5e-6):
    """Loss and gradients are the oracle's, in either file; the stats are those of grpo/loss.py."""
    batch = on_device(engine, batch)
    exact, given = oracle(**batch, **settings), with_garbage(batch)
    (got, stats), (specified, expected) = (run(m, given, settings) for m in (engine.module, plain))
    # Measured: 1.7e-6 at most, and 2.1e-6 of grpo/loss.py
    assert all(e < tolerance for e in errors(got, exact))  # max() would pass over a NaN
    assert all(e < tolerance for e in errors(specified, exact)), "grpo/loss.py"
    assert not got[1][batch["weights"] == 0].any()
    assert not any(values.requires_grad for values in stats.values())
    torch.testing.assert_close(stats, expected, rtol=1e-5, atol=2 * tolerance)
    return stats
