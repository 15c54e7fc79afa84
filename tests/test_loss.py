"""Advantages, weights, log-probs and the loss itself, by hand.

tests/test_loss_trl.py holds the loss against TRL's, test_loss_triton.py the fused one against this;
here the expected numbers are worked out in the comments.
"""

import math

import pytest
import torch

from grpo.loss import MAX_LOG_RATIO, group_advantages, linear_logps, policy_loss, token_weights

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
    # Two of the step's 4 sequences are here, of 2 and 5 tokens; the whole step trains 10 tokens.
    expected = {"grpo": [1 / 8, 1 / 20], "dapo": [1 / 10, 1 / 10], "dr_grpo": [1 / 32, 1 / 32]}
    weights = token_weights(
        torch.tensor([2, 5]), loss_type=loss_type, sequences=4, tokens=10, max_completion_tokens=8
    )
    assert weights.dtype == torch.float32
    torch.testing.assert_close(weights, torch.tensor(expected[loss_type]))


@pytest.mark.parametrize("lengths", [[2, 5, 1, 8], [8, 8, 8, 8], [1], [3, 0, 5]])
@pytest.mark.parametrize("masked", [0, 2])
def test_what_the_weights_of_a_step_add_up_to(lengths, masked):
    """`masked` sequences count among the step's sequences, but have no tokens; nor has a 0 here."""
    trained, sequences, longest = sum(n > 0 for n in lengths), len(lengths) + masked, 8
    expected = {
        "grpo": trained / sequences,  # every trained sequence weighs 1 / sequences
        "dapo": 1.0,  # every token weighs the same
        "dr_grpo": sum(lengths) / (sequences * longest),  # the filled share of sequences x longest
    }
    for loss_type, total in expected.items():
        weights = token_weights(
            torch.tensor(lengths),
            loss_type=loss_type,
            sequences=sequences,
            tokens=sum(lengths),
            max_completion_tokens=longest,
        )
        assert torch.isfinite(weights).all()  # simple_GRPO: an empty completion gave 0 / 0
        assert weights.repeat_interleave(torch.tensor(lengths)).sum() == pytest.approx(total)


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


# --- Loss ---------------------------------------------------------------------------
def hand_batch(dtype=torch.float32):
    """2 sequences x 3 tokens; ratios 1, 1.5, 0.5 in each, and log(ref / policy) is log 2 twice.

    A = 2 and -1. With CLIPS the clipped ratios are 1, 1.3 and 0.8. min(r A, clip(r) A):
      A = +2:   2,   2.6 (clipped),   1      A = -1:   -1,   -1.5,   -0.8 (clipped)
    k3 = 2 - log 2 - 1 = 0.3068528 at the first and the last token, and 0 elsewhere.
    """
    old_logps = torch.tensor([-1.0, -2.0, -0.5, -1.5, -3.0, -0.7], dtype=dtype)
    ratio = torch.tensor([1.0, 1.5, 0.5] * 2, dtype=dtype)
    logps = old_logps + ratio.log()
    ref_logps = logps + torch.tensor([2.0, 1, 1, 1, 1, 2], dtype=dtype).log()
    advantages = torch.tensor([2.0, 2, 2, -1, -1, -1], dtype=dtype)
    weights = torch.tensor([0.1, 0.1, 0.1, 0.2, 0.2, 0.2], dtype=dtype)
    return logps.requires_grad_(), old_logps, ref_logps, advantages, weights


def test_loss_by_hand():
    logps, *rest = hand_batch()
    loss, stats = policy_loss(logps, *rest, **CLIPS, kl_beta=0.5)
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


@pytest.mark.parametrize("advantage, ratio, low, high", [
    (1.0, 1.4, False, True),
    (1.0, 0.7, False, False),  # went the wrong way: keeps its gradient
    (-1.0, 0.7, True, False),
    (-1.0, 1.4, False, False),
    (1.0, 1.29, False, False),
    (-1.0, 0.81, False, False),
    (0.0, 9.0, False, False),
])  # fmt: skip
def test_a_token_is_counted_as_clipped_where_its_gradient_is_zero(advantage, ratio, low, high):
    logps = torch.tensor([ratio]).log().requires_grad_()
    loss, stats = policy_loss(
        logps, torch.zeros(1), None, torch.tensor([advantage]), torch.ones(1), **CLIPS, kl_beta=0
    )
    loss.backward()
    assert (stats["clip_low"].item(), stats["clip_high"].item()) == (low, high)
    assert (logps.grad.item() == 0) == (low or high or advantage == 0)


@pytest.mark.parametrize("kl_beta", [0.0, 0.3])
def test_the_gradient_is_the_central_difference(kl_beta):
    torch.manual_seed(0)
    n, step = 200, 1e-6
    old_logps = -3 * torch.rand(n, dtype=torch.double)
    logps = old_logps + 0.4 * torch.randn(n, dtype=torch.double)
    ref_logps = old_logps + 0.4 * torch.randn(n, dtype=torch.double)
    advantages, weights = torch.randn(n, dtype=torch.double), torch.rand(n, dtype=torch.double)

    def loss_of(logps):
        return policy_loss(
            logps, old_logps, ref_logps, advantages, weights, **CLIPS, kl_beta=kl_beta
        )

    leaf = logps.clone().requires_grad_()
    loss, stats = loss_of(leaf)
    loss.backward()
    assert stats["clip_low"].any() and stats["clip_high"].any()
    for i in range(n):
        up, down = logps.clone(), logps.clone()
        up[i] += step
        down[i] -= step
        slope = (loss_of(up)[0] - loss_of(down)[0]) / (2 * step)
        # Measured: 2.6e-9 at most, which is the rounding of the two losses divided by the step.
        assert slope.item() == pytest.approx(leaf.grad[i].item(), abs=1e-7), i


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


# Of the six tokens of hand_batch, as in test_loss_by_hand: w A is 0.2 and -0.2, and without KL the
# objective of each sequence is 0.1 (2 + 2.6 + 1) and 0.2 (-1 - 1.5 - 0.8).
def loss_and_gradient(**changes):
    logps, old_logps, ref_logps, advantages, weights = hand_batch(torch.double)
    settings = CLIPS | {"kl_beta": 0.0} | changes
    loss, _ = policy_loss(logps, old_logps, ref_logps, advantages, weights, **settings)
    return loss.item(), torch.autograd.grad(loss, logps)[0].tolist()


LOG2, S = math.log(2), 0.75 ** (1 / 3)  # S: (1 x 1.5 x 0.5)^(1/3) = 0.9085603
SEQUENCES = torch.tensor([0, 0, 0, 1, 1, 1])
SAMPLER_LOGPS = hand_batch(torch.double)[1] - torch.tensor([2.0, 4, 1, 1, 0.5, 2]).log()
BY_HAND = {  # -> the settings, loss and gradient
    # MiniMax-M1: the clipped ratio, 1, 1.3 and 0.8, weighs the log-probs, so that no token loses
    # its gradient - w A clip(r). logps are old + log r: -1, -1.594535 and -1.193147, then -1.5,
    # -2.594535 and -1.393147. Times clip(r) they add up to -4.0274131 and -5.9874131.
    "cispo": (
        {"objective": "cispo"},
        0.2 * 4.0274131 - 0.2 * 5.9874131,
        [-0.2, -0.26, -0.16, 0.2, 0.26, 0.16],
    ),
    # DeepSeek-V3.2: k3 times r, whose gradient is r (logp - ref). log(ref / policy) is log 2 at the
    # first token, where r is 1, and at the last, where it is 0.5.
    "unbiased_kl": (
        {"unbiased_kl": True, "kl_beta": 0.5},
        0.1 + 0.5 * (1 - LOG2) * (0.1 * 1 + 0.2 * 0.5),
        [-0.2 - 0.05 * LOG2, 0, -0.1, 0.2, 0.3, -0.05 * LOG2],
    ),
    # A sampler that found tokens 1/2, 1/4, 1, 1, 2 and 1/2 times as likely: the weights 2, 3 (of
    # 4), 1 and 1, 0.5, 2
    "is_cap": (
        {"is_cap": 3.0, "sampler_logps": SAMPLER_LOGPS},
        -0.1 * (2 * 2 + 3 * 2.6 + 1) + 0.2 * (1 + 0.5 * 1.5 + 2 * 0.8),
        [-0.4, 0, -0.1, 0.2, 0.15, 0],
    ),
    # IcePop's mask: the second token, of weight 4, is left out, and those of 2 and 1 / 2 stay
    "is_mask": (
        {"is_cap": 2.1, "is_mask": True, "sampler_logps": SAMPLER_LOGPS},
        -0.1 * (2 * 2 + 1) + 0.2 * (1 + 0.5 * 1.5 + 2 * 0.8),
        [-0.4, 0, -0.1, 0.2, 0.15, 0],
    ),
    "narrow is_mask": (  # without the four tokens of 2, 4, 1 / 2 and 2
        {"is_cap": 1.5, "is_mask": True, "sampler_logps": SAMPLER_LOGPS},
        -0.1 * 1 + 0.2 * 1,
        [0, 0, -0.1, 0.2, 0, 0],
    ),
    # INTELLECT-2's two-sided clip, else a token of A < 0 that the sampler thought impossible weighs
    # without bound: it stops the fifth token, at 1.4 and not 1.5
    "ratio_cap": (
        {"ratio_cap": 1.4},
        0.1 + 0.2 * (1.4 - 1.5),
        [-0.2, 0, -0.1, 0.2, 0, 0],
    ),
    # Below 1 + CLIP_HIGH it stops A > 0 too: the second token at 1.2 x 2, and not 1.3 x 2
    "low ratio_cap": (
        {"ratio_cap": 1.2},
        0.1 + 0.1 * 2 * (1.3 - 1.2) + 0.2 * (1.2 - 1.5),
        [-0.2, 0, -0.1, 0.2, 0, 0],
    ),
    "ratio_cap beyond all ratios": ({"ratio_cap": 2.0}, 0.1, [-0.2, 0, -0.1, 0.2, 0.3, 0]),
    "no ratio_cap": ({"ratio_cap": 0.0}, 0.1, [-0.2, 0, -0.1, 0.2, 0.3, 0]),
    # The KL's r is bounded, too, as a constant: of the first token at 0.9, and not 1; the slope of
    # r k3 stays in the direction of logp - ref, - 0.9 log 2
    "ratio_cap and unbiased_kl": (
        {"ratio_cap": 0.9, "unbiased_kl": True, "kl_beta": 0.5},
        -0.1 * 2 * (0.9 + 0.9 + 0.5) + 0.2 * (0.9 + 0.9 + 0.8) + 0.5 * (1 - LOG2) * (0.09 + 0.1),
        [-0.045 * LOG2, 0, -0.1, 0, 0, -0.05 * LOG2],
    ),
    # GSPO: the ratio of a sequence is the geometric mean of its tokens', here in the range for
    # both; its gradient is s A / 3 for each token, and the weights add up: s A w for each.
    "sequence": (
        {"sequences": SEQUENCES},
        -0.3 * 2 * S + 0.6 * S,
        [-0.2 * S] * 3 + [0.2 * S] * 3,
    ),
    # Clipped at 0.95 it stops the second sequence, which went the way its advantage wants
    "clipped sequence": (
        {"sequences": SEQUENCES, "clip_low": 0.05},
        -0.3 * 2 * S + 0.6 * 0.95,
        [-0.2 * S] * 3 + [0] * 3,
    ),
}


@pytest.mark.parametrize("variant", BY_HAND)
def test_variants_by_hand(variant):
    settings, loss, gradient = BY_HAND[variant]
    found, slopes = loss_and_gradient(**settings)
    assert found == pytest.approx(loss, abs=1e-6) and slopes == pytest.approx(gradient)


def test_cispo_counts_as_clipped_whatever_the_advantages_sign():
    _, stats = policy_loss(*hand_batch(), **CLIPS, kl_beta=0.0, objective="cispo")
    assert stats["clip_low"].tolist() == [False, False, True] * 2
    assert stats["clip_high"].tolist() == [False, True, False] * 2


# Ratios beyond float32, whose exp overflows above 88.7: two tokens of one sequence, w = 0.5.
def of_far_ratios(log_ratios, *, advantage, ref_logps=None, sequence=False, **changes):
    """-> (loss, gradient, stats) of tokens with logp -1; all finite."""
    logps = torch.full((2,), -1.0, requires_grad=True)
    old_logps = logps.detach() - torch.tensor(log_ratios)
    advantages, weights = torch.full((2,), advantage), torch.full((2,), 0.5)
    settings = CLIPS | {"kl_beta": 0.0} | changes
    settings["sequences"] = torch.zeros(2, dtype=torch.int64) if sequence else None
    loss, stats = policy_loss(logps, old_logps, ref_logps, advantages, weights, **settings)
    loss.backward()
    for values in (loss, logps.grad, *stats.values()):
        assert torch.isfinite(values).all(), values
    return loss.item(), logps.grad.tolist(), stats


@pytest.mark.parametrize("far", [88.0, 89.0, 1e4, 1e10])
@pytest.mark.parametrize("sequence", [False, True], ids=["token", "sequence"])
@pytest.mark.parametrize("ratio_cap", [0.0, 2.0])
@pytest.mark.parametrize("advantage", [1.5, 0.0, -1.5])
def test_a_ratio_that_overflows_has_the_gradient_of_a_large_one(
    advantage, ratio_cap, sequence, far
):
    loss, gradient, stats = of_far_ratios(
        [far, far], advantage=advantage, ratio_cap=ratio_cap, sequence=sequence
    )
    bound = math.exp(MAX_LOG_RATIO)
    if advantage >= 0:  # the clip stops it, at 1.3
        expected, slope = -1.3 * advantage, 0
    elif ratio_cap:  # the cap stops it
        expected, slope = 2.0 * 1.5, 0
    else:  # nothing stops it: the slope is that of the largest ratio there is
        expected, slope = bound * 1.5, 0.5 * bound * 1.5
    assert loss == pytest.approx(expected) and gradient == pytest.approx([slope] * 2)
    assert stats["clip_high"].tolist() == [advantage > 0] * 2
    assert stats["ratio"].tolist() == pytest.approx([bound] * 2)


@pytest.mark.parametrize("objective", ["clip", "cispo"])
@pytest.mark.parametrize("advantage", [1.5, -1.5])
def test_the_unbiased_kl_of_ratios_beyond_float32(objective, advantage):
    settings = {"advantage": advantage, "ratio_cap": 2.0, "objective": objective}
    base, slopes, _ = of_far_ratios([100.0, 0.0], **settings)
    kl = settings | {"unbiased_kl": True, "kl_beta": 0.1}
    # The reference is the policy: k3 = 0 and d = 0, so r k3 and its slope - r d are 0.
    loss, gradient, _ = of_far_ratios([100.0, 0.0], ref_logps=-torch.ones(2), **kl)
    assert loss == pytest.approx(base) and gradient == pytest.approx(slopes)
    # d = 1: the slope of r k3 is - r d, where r is 2 at most; without the cap it is huge
    for cap, bound in ((2.0, 2.0), (0.0, math.exp(MAX_LOG_RATIO))):
        capped = {"ref_logps": torch.zeros(2), **kl, "ratio_cap": cap}
        base, slopes, _ = of_far_ratios([100.0, 0.0], **settings | {"ratio_cap": cap})
        loss, gradient, _ = of_far_ratios([100.0, 0.0], **capped)
        expected = base + 0.1 * 0.5 * (bound + 1) * (math.e - 2)
        assert loss == pytest.approx(expected, rel=1e-5)
        assert gradient == pytest.approx([slopes[0] - 0.05 * bound, slopes[1] - 0.05])


def test_the_unbiased_kl_of_a_token_that_became_impossible():
    """exp(ref - logp) overflows where the ratio underflows: their product was NaN."""
    # logp is -1 and old and ref 118: only the differences count, as for -120, -1 and -1
    settings = {"advantage": 1.5, "unbiased_kl": True, "kl_beta": 0.1}
    ref_logps = torch.tensor([118.0, -1.0])
    _, gradient, _ = of_far_ratios([-119.0, 0.0], ref_logps=ref_logps, **settings)
    assert gradient == pytest.approx([0, -0.5 * 1.5])  # - r d is 0; the other token's is - w A


def test_an_objective_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="ppo"):
        loss_and_gradient(objective="ppo")


def test_gradients_flow_through_logps_alone():
    """old_logps = logps is the trap: undetached, the ratio is 1, its gradient 0, nothing learns."""
    logps, old_logps, ref_logps, advantages, weights = hand_batch()
    old_logps.requires_grad_()
    ref_logps.requires_grad_()
    parts = (logps, old_logps, ref_logps, advantages, weights)
    loss, stats = policy_loss(*parts, **CLIPS, kl_beta=0.5)
    loss.backward()
    assert logps.grad.abs().sum() > 0
    assert old_logps.grad is None and ref_logps.grad is None
    assert not any(values.requires_grad for values in stats.values())  # they keep no graph
