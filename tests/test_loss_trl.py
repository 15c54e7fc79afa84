"""Our loss and its gradient against other implementations: TRL's, on the table that
benchmarks/trl_loss_table.py wrote, and Liger's."""

import json
from pathlib import Path

import pytest
import torch
from oracle import VARIANTS, error, make

from grpo.loss import policy_loss, token_weights
from grpo_loss_triton import linear_logps

TABLE = json.loads((Path(__file__).parent / "trl_loss_table.json").read_text())
TOLERANCE = 1e-5  # float32 against TRL in float64; measured: 3e-8 in the loss, 1e-8 in the gradient


def case_id(case):
    return f"{case['loss_type']}-{case['kl_beta']}-{case['batch']}"


@pytest.mark.parametrize("case", TABLE["cases"], ids=case_id)
def test_loss_and_gradient_are_trls(case):
    batch = {name: torch.tensor(rows) for name, rows in TABLE["batches"][case["batch"]].items()}
    mask = batch["mask"].bool()  # (B, T); the flat tensors below hold its N tokens, row by row
    lengths = mask.sum(1)
    logps = batch["logps"][mask].requires_grad_()
    # A fully masked sequence has no tokens, yet TRL counts it among the sequences, and so do we.
    weights = token_weights(
        lengths,
        loss_type=case["loss_type"],
        sequences=len(lengths),
        tokens=int(lengths.sum()),
        max_completion_tokens=TABLE["max_completion_tokens"],
    )
    loss, _ = policy_loss(
        logps,
        batch["old_logps"][mask] if case["batch"] != "on_policy" else logps.detach(),
        batch["ref_logps"][mask] if case["kl_beta"] else None,
        batch["advantages"].repeat_interleave(lengths),
        weights.repeat_interleave(lengths),
        clip_low=TABLE["clip_low"],
        clip_high=TABLE["clip_high"],
        kl_beta=case["kl_beta"],
    )
    loss.backward()
    expected_loss, expected_grad = torch.tensor(case["loss"]), torch.tensor(case["grad"])[mask]
    torch.testing.assert_close(loss, expected_loss, rtol=TOLERANCE, atol=TOLERANCE)
    torch.testing.assert_close(logps.grad, expected_grad, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("options", [
    {"loss_type": "cispo"},
    {"loss_type": "grpo", "use_bias_correction_kl": True},
    {"loss_type": "grpo", "importance_sampling_level": "sequence"},
], ids=lambda options: "-".join(map(str, options.values())))  # fmt: skip
def test_the_loss_is_ligers(options):
    """Of variants that the table lacks. Liger's CISPO has only a ceiling."""
    liger = pytest.importorskip("liger_kernel.chunked_loss")
    cispo, gspo = options["loss_type"] == "cispo", "importance_sampling_level" in options
    variant = VARIANTS["capped"] | {"gspo": gspo}
    variant |= {"unbiased_kl": "use_bias_correction_kl" in options}
    if cispo:
        variant |= {"objective": "cispo", "clip_low": 1.0}
    mask = torch.arange(6) < torch.tensor([[5], [0], [2], [6]])
    batch, settings = make(variant)
    hidden, head = torch.randn(4, 6, 16), torch.randn(97, 16) / 2
    leaves, ids = (hidden.requires_grad_(), head.requires_grad_()), torch.randint(97, (4, 6))
    logps = linear_logps(*leaves, ids, temperature=0.7)
    shift = logps.detach().flatten() - batch["logps"]
    names = "old_logps", "ref_logps", "sampler_logps"
    batch |= {name: batch[name] + shift for name in names} | {"logps": logps}
    batch["advantages"] = batch["advantages"][:4, None].expand(4, 6)
    kind = "dapo" if cispo else options["loss_type"]
    sizes = {"sequences": 4, "tokens": int(mask.sum()), "max_completion_tokens": 6}
    batch["weights"] = token_weights(mask.sum(1), loss_type=kind, **sizes)[:, None].expand(4, 6)
    batch = {n: t if t is None else t.reshape(4, 6) for n, t in batch.items()}
    loss, _ = policy_loss(**{n: t if t is None else t[mask] for n, t in batch.items()}, **settings)
    ours = loss.detach(), *torch.autograd.grad(loss, leaves)
    loss_of = liger.LigerFusedLinearGRPOLoss(
        beta=0.3, compiled=False, epsilon_low=0.2, epsilon_high=1.28 if cispo else 0.28,
        max_completion_length=6, temperature=0.7, **options,
    )  # fmt: skip
    theirs, *_ = loss_of(
        *leaves, ids, mask.float(), batch["advantages"][:, 0],
        ref_per_token_logps=batch["ref_logps"], old_per_token_logps=batch["old_logps"],
        vllm_is_ratio=(batch["old_logps"] - batch["sampler_logps"]).exp().clamp(max=1.1),
    )  # fmt: skip
    theirs.backward()
    for mine, other in zip(ours, (theirs, *(leaf.grad for leaf in leaves)), strict=True):
        assert error(mine, other.detach()) < 5e-6  # measured: 2.3e-6
