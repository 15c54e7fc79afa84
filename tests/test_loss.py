"""Advantages, weights, log-probs and the loss itself, by hand.

The expected numbers are worked out in the comments, and all variants are tested against an oracle.
test_loss_trl.py tests the loss against TRL's, test_loss_triton.py the fused log-probs.
"""

import pytest
import torch
from oracle import VARIANTS, errors, make, run

from grpo.loss import group_advantages, linear_logps, policy_loss, token_weights

CLIPS = {"clip_low": 0.2, "clip_high": 0.3}


# --- Advantages and weights ---------------------------------------------------------
def test_advantages_by_hand():
    rewards = torch.tensor([3.0, 1.0, 1.0, -1.0])  # mean 1; deviations 2, 0, 0, -2
    # The sample variance is (4 + 0 + 0 + 4) / 3, its root 1.632993; 2 / 1.633093 = 1.224670.
    scaled = group_advantages(rewards, scale_by_std=True)
    torch.testing.assert_close(scaled, torch.tensor([1.224670, 0, 0, -1.224670]))
    centred = group_advantages(rewards, scale_by_std=False)  # Dr. GRPO
    torch.testing.assert_close(centred, torch.tensor([2.0, 0, 0, -2.0]))
    # Both are blind to a shift; only the first to scale.
    torch.testing.assert_close(group_advantages(rewards + 7, scale_by_std=True), scaled)
    tenfold = group_advantages(10 * rewards, scale_by_std=True)
    torch.testing.assert_close(tenfold, scaled, rtol=1e-4, atol=0)
    torch.testing.assert_close(group_advantages(10 * rewards, scale_by_std=False), 10 * centred)


@pytest.mark.parametrize("scale_by_std", [True, False])
def test_an_all_equal_group_teaches_nothing(scale_by_std):
    """Rounding in the mean must not be blown up by the small std: 2.2 has no exact binary value."""
    for size in range(2, 65):
        for reward in (0.0, 1.0, -0.75, 2.2, 1 / 3, 1e3 + 0.1):
            advantages = group_advantages(torch.full((size,), reward), scale_by_std=scale_by_std)
            assert torch.equal(advantages, torch.zeros(size)), (size, reward, advantages)


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo"])
def test_token_weights_by_hand(loss_type):
    """simple_GRPO took the mean of each micro-batch; here it is that of the whole step."""
    # Three of the step's 4 sequences are here, of 2, 5 and 0 tokens, of the step's 10. An empty
    # completion gave simple_GRPO 0 / 0.
    expected = {"grpo": [1 / 8, 1 / 20, 1 / 4], "dapo": [1 / 10] * 3, "dr_grpo": [1 / 32] * 3}
    sizes = {"sequences": 4, "max_completion_tokens": 8, "loss_type": loss_type}
    weights = token_weights(torch.tensor([2, 5, 0]), tokens=10, **sizes)
    assert weights.dtype == torch.float32
    torch.testing.assert_close(weights, torch.tensor(expected[loss_type]))
    assert token_weights(torch.tensor([0]), tokens=0, **sizes).isfinite()


# --- Log-probs ----------------------------------------------------------------------
def test_logps_are_float32_of_bfloat16_logits():
    """simple_GRPO took the log-softmax in bf16: 1.6 % in the ratio, a KL of mostly zeros."""
    torch.manual_seed(0)
    logits, targets = 5 * torch.randn(50, 1000).bfloat16(), torch.randint(990, (50,))
    logps = linear_logps(logits, None, targets, temperature=0.9, vocab_size=990)
    exact = torch.log_softmax(logits[:, :990].double() / 0.9, -1)[torch.arange(50), targets]
    assert logps.dtype == torch.float32
    assert (logps - exact).abs().max() < 1e-5
    in_bf16 = torch.log_softmax(logits[:, :990] / 0.9, -1)[torch.arange(50), targets]
    assert (in_bf16 - exact).abs().max() > 1e-2
    hidden, head = torch.randn(50, 8).bfloat16(), 5 * torch.randn(1000, 8).bfloat16()
    exact = (hidden.double() @ head.double().T).log_softmax(-1)[torch.arange(50), targets]
    assert (linear_logps(hidden, head, targets) - exact).abs().max() < 1e-4


# --- Loss ---------------------------------------------------------------------------
def hand_batch():
    """2 sequences x 3 tokens; ratios 1, 1.5, 0.5 in each, and log(ref / policy) is log 2 twice.

    A = 2 and -1. With CLIPS the clipped ratios are 1, 1.3 and 0.8. min(r A, clip(r) A):
      A = +2:   2,   2.6 (clipped),   1      A = -1:   -1,   -1.5,   -0.8 (clipped)
    k3 = 2 - log 2 - 1 = 0.3068528 at the first and the last token, and 0 elsewhere.
    """
    old_logps = torch.tensor([-1.0, -2.0, -0.5, -1.5, -3.0, -0.7])
    ratio = torch.tensor([1.0, 1.5, 0.5] * 2)
    logps = old_logps + ratio.log()
    ref_logps = logps + torch.tensor([2.0, 1, 1, 1, 1, 2]).log()
    advantages = torch.tensor([2.0, 2, 2, -1, -1, -1])
    weights = torch.tensor([0.1, 0.1, 0.1, 0.2, 0.2, 0.2])
    return logps.requires_grad_(), old_logps, ref_logps, advantages, weights


def test_loss_by_hand():
    logps, old_logps, ref_logps, *_ = parts = [*hand_batch()]
    old_logps.requires_grad_()
    ref_logps.requires_grad_()
    loss, stats = policy_loss(*parts, **CLIPS, kl_beta=0.5)
    # Objective: 0.1 (2 + 2.6 + 1) + 0.2 (-1 - 1.5 - 0.8) = 0.56 - 0.66 = -0.1.
    # KL: 0.5 x 0.3068528 x (0.1 + 0.2) = 0.0460279. The loss is minus the one, plus the other.
    torch.testing.assert_close(loss, torch.tensor(0.1460279))
    k3 = 0.3068528
    torch.testing.assert_close(stats["ratio"], torch.tensor([1.0, 1.5, 0.5] * 2))
    torch.testing.assert_close(stats["kl"], torch.tensor([k3, 0, 0, 0, 0, k3]))
    # Clipped is a token that went further the way its advantage wants, and no other.
    assert stats["clip_high"].tolist() == [False, True, False, False, False, False]
    assert stats["clip_low"].tolist() == [False, False, False, False, False, True]
    # d objective / d logp = w r A where not clipped; d k3 / d logp = 1 - exp(ref - logp) = -1.
    loss.backward()
    of_kl = 0.5 * torch.tensor([-0.1, 0, 0, 0, 0, -0.2])
    of_objective = -torch.tensor([0.2, 0, 0.1, -0.2, -0.3, 0])
    torch.testing.assert_close(logps.grad, of_objective + of_kl)
    # old_logps = logps is the trap: undetached, the ratio is 1, its gradient 0, nothing learns
    assert old_logps.grad is None and ref_logps.grad is None
    assert not any(values.requires_grad for values in stats.values())  # they keep no graph
    parts[3] = torch.zeros(6)  # an advantage of 0 wants nothing, so nothing goes too far
    _, stats = policy_loss(*parts, **CLIPS, kl_beta=0.0)
    assert not (stats["clip_low"] | stats["clip_high"]).any()


def test_kl_is_never_negative():
    """Nor noise: exp(d) - d - 1 in float32 is below 0 for a tenth of the d of early training."""
    sizes = torch.cat([torch.zeros(1), torch.logspace(-9, 1, 20_001)])
    ref_logps = torch.cat([sizes, -sizes])  # of a policy with logps 0, so d is exactly this
    zeros, ones = torch.zeros_like(ref_logps), torch.ones_like(ref_logps)
    _, stats = policy_loss(zeros, zeros, ref_logps, zeros, ones, **CLIPS, kl_beta=1.0)
    assert (stats["kl"] >= 0).all()
    # k3 = d^2 / 2 + d^3 / 6 + ..., for a log-prob that drifts by 1e-4, 1e-3 and 1e-2
    for d in (1e-4, 1e-3, 1e-2):
        _, stats = policy_loss(*torch.tensor([0, 0, d, 0, 1]).split(1), **CLIPS, kl_beta=1.0)
        # expm1(d) is exact to 6e-8 of d, so k3 to 1.2e-7 / d of itself
        assert stats["kl"].item() == pytest.approx(d**2 / 2 + d**3 / 6, rel=2e-3)


def test_cispo_counts_as_clipped_whatever_the_advantages_sign():
    _, stats = policy_loss(*hand_batch(), **CLIPS, kl_beta=0.0, objective="cispo")
    assert stats["clip_low"].tolist() == [False, False, True] * 2
    assert stats["clip_high"].tolist() == [False, True, False] * 2


def test_the_unbiased_kl_of_a_token_that_became_impossible():
    """exp(ref - logp) overflows where the ratio underflows: their product was NaN."""
    logps, advantage = torch.tensor([-120.0], requires_grad=True), torch.tensor([1.5])
    old, ref, weight = torch.tensor([-1.0]), torch.tensor([-1.0]), torch.ones(1)
    loss, _ = policy_loss(
        logps, old, ref, advantage, weight, **CLIPS, kl_beta=0.1, unbiased_kl=True
    )
    loss.backward()
    assert torch.isfinite(loss) and logps.grad.item() == pytest.approx(0)


# --- Variants -----------------------------------------------------------------------
@pytest.mark.parametrize("variant", VARIANTS)
def test_loss_and_gradient_are_the_oracles(variant):
    batch, settings = make(VARIANTS[variant])
    results, stats = run(batch, settings)
    assert all(e < 1e-6 for e in errors(results, batch, settings))  # measured: 1.5e-7
    assert not any(values.requires_grad for values in stats.values())
    if "on_policy" not in variant:  # else the variant shows nothing
        assert stats["clip_low"].any() and stats["clip_high"].any()


FAR = {name: VARIANTS[name] for name in ("clip", "bounded", "unbiased_kl", "cispo", "gspo")}
FAR |= {
    "bounded_gspo": VARIANTS["gspo"] | {"ratio_cap": 1.3},
    "unbiased_cispo": VARIANTS["cispo"] | {"unbiased_kl": True},
    "bounded_unbiased": VARIANTS["unbiased_kl"] | {"ratio_cap": 1.3, "is_cap": 1.1},
}


@pytest.mark.parametrize("sign", [1, 0, -1])
@pytest.mark.parametrize("variant", FAR)
def test_ratios_that_overflow(variant, sign):
    """The gradient is finite, and where the clip or the cap stops a token it is the oracle's, whose
    ratios float64 holds."""
    batch, settings = make(FAR[variant])
    far = slice(2, 5) if batch["sequences"] is None else slice(0, 6)  # of gspo a whole sequence
    batch["advantages"][far] = sign * batch["advantages"][far].abs()
    batch["old_logps"][far] -= torch.tensor([89.0, 200, 600, 100, 89, 300])[: far.stop - far.start]
    results, _ = run(batch, settings)
    assert all(torch.isfinite(result).all() for result in results)
    stopped = sign >= 0 or "ratio_cap" in settings or settings.get("objective") == "cispo"
    # Without the cap nothing stops the r of r k3
    stopped = stopped and ("ratio_cap" in settings or not settings.get("unbiased_kl"))
    assert (results[1].abs().max() > 1e30) != stopped
    if stopped:
        assert all(e < 1e-6 for e in errors(results, batch, settings))
