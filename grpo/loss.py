"""The GRPO loss in plain torch: the readable specification of what is trained.

The file follows the order of a step. A group's rewards become advantages, the completions' lengths
become a weight for each token, and hidden states become log-probs. The loss is minus the sum over
tokens of weight * objective. This sum is never divided, because the weights hold every denominator.
So however a step is cut into micro-batches and ranks, its parts add up to the same gradient.

`linear_logps` holds the (N, V) logits several times over. chunked.py has a function of the
same name and signature that never holds them; the trainer uses it, and the tests compare the two.
All the rest is plain torch on one number per token, and is written nowhere else.

Symbols: B sequences, G completions in a group, T tokens of a completion, N completion tokens, flat;
H hidden size, V ids of the tokenizer, V' >= V rows of the LM head (the embedding may be padded).
Of a token: r its ratio, A its advantage, w its weight, k3 its estimate of the KL to the reference.
Per-token tensors are all (N,); float32, but ids int64.
"""

import torch

LOSS_TYPES = ("grpo", "dapo", "dr_grpo")
OBJECTIVES = ("clip", "cispo")  # grpo/checks.py names them, too
MAX_LOG_RATIO = 80.0  # exp(80) = 5.5e34; a higher one leaves A and KL less of float32's 3.4e38


# --- Advantages and token weights ---------------------------------------------------
def group_advantages(rewards, *, scale_by_std):
    """Returns the advantages (G,) of one group's rewards (G,): (reward - mean) / (std + 1e-4).

    DeepSeekMath (2402.03300), sec. 4.1.2; without the std it is Dr. GRPO (2503.20783, sec. 3.2).
    The 1e-4, and a std that divides by G - 1, are TRL's.
    Why the mean: it is the baseline. A completion is made likelier for being better than the
    others of its prompt, not for a prompt on which every completion earns much.
    Why the std: rewards that differ little then teach as much as rewards that differ much.
    Why 1e-4: in a zero-variance group the std is 0, and its advantages must be 0, not NaN.
    A reward of NaN (no reward applies) counts in neither mean nor std, and its advantage is 0.

    >>> group_advantages(torch.tensor([1, 0, 0, 1]), scale_by_std=True)
    tensor([ 0.8659, -0.8659, -0.8659,  0.8659])
    """
    rewards = rewards.double()  # in float32 the mean of equal rewards may differ from them
    judged = rewards[~rewards.isnan()]
    centred = (rewards - judged.mean()).nan_to_num(0)
    std = judged.std() if len(judged) > 1 else 0
    return (centred / (std + 1e-4) if scale_by_std else centred).float()


def token_weights(lengths, *, loss_type, sequences, tokens, max_completion_tokens):
    """Returns w, the weight of each token in the loss: a float32 (B,), one number per sequence.

    `lengths` (B,) counts the model's tokens of each of these sequences. `sequences` and `tokens`
    count those of the whole step, over all ranks and micro-batches; `sequences` includes the masked
    ones, of which no token is trained on. (TRL's loss_type has the same names.)
    """
    if loss_type == "grpo":
        # Mean over sequences of the mean over tokens (DeepSeekMath, eq. 3): a token weighs less in
        # a long completion than in a short one.
        denominator = sequences * lengths.float().clamp(min=1)
    elif loss_type == "dapo":
        # Mean over all tokens: the step's, as in TRL; in DAPO (2503.14476, eq. 8) a group's
        denominator = max(tokens, 1)
    elif loss_type == "dr_grpo":  # a constant, whatever the lengths (Dr. GRPO, sec. 3.2)
        denominator = max(sequences, 1) * max_completion_tokens
    else:
        raise ValueError(f"loss_type must be one of {', '.join(LOSS_TYPES)}, got {loss_type!r}")
    return torch.as_tensor(1 / denominator, dtype=torch.float32).expand(lengths.shape)


# --- Log-probs ----------------------------------------------------------------------
def linear_logps(hidden, head, ids, *, temperature=1.0, vocab_size=None, entropy=False):
    """Returns log softmax(hidden @ head.T / temperature)[ids], float32, shaped like `ids`.

    `hidden` (..., H) are the states that predict the tokens `ids` (...), each below `vocab_size`;
    `head` (V', H) is the matrix of the LM head, in the same dtype. With head None, `hidden`
    (..., V') are the logits themselves, for models whose head is more than a matrix.
    With `entropy`, returns (logps, entropy): the distribution's entropy in nats, detached.
    Why `vocab_size`: a sampler never draws the padding of the embedding; the softmax leaves it out.
    Why float32, whatever the dtype: bf16 rounds a log-prob between -4 and -8 by up to 0.016, which
    is 1.6% in the ratio of the loss, and those below -8 by twice that and more.
    """
    exact = torch.promote_types(hidden.dtype, torch.float32)
    logits = hidden if head is None else hidden.to(exact) @ head.to(exact).T  # (..., V')
    log_probs = (logits[..., :vocab_size].to(exact) / temperature).log_softmax(-1)  # (..., V)
    logps = log_probs.gather(-1, ids[..., None]).squeeze(-1)
    if not entropy:
        return logps
    return logps, torch.special.entr(log_probs.detach().exp()).sum(-1)  # entr(p) = -p log p


# --- Loss ---------------------------------------------------------------------------
def policy_loss(
    logps, old_logps, ref_logps, advantages, weights, *,
    clip_low, clip_high, kl_beta, objective="clip", unbiased_kl=False,
    sampler_logps=None, is_cap=0.0, ratio_cap=0.0, sequences=None,
):  # fmt: skip
    """Returns (loss, stats): minus the sum over tokens of w * objective, a scalar.

    For a token with the ratio r = exp(logp - old_logp) and the advantage A the objective is

        min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) - kl_beta * k3
        k3 = exp(d) - d - 1, where d = ref_logp - logp              (DeepSeekMath, eq. 3 and 4)

    Why r: the tokens were sampled by an old policy; r reweighs them to the one that is trained. At
    a rollout's first update, on-policy, the two are the same, and r is 1.
    Why the min: a token whose r has left the range in the direction that A wants went far enough
    and gets no gradient; in the other direction its slope stays r A, smaller for a good token that
    became rare, larger for a bad one that became likely (PPO, 1707.06347).
    Why k3: for tokens drawn from the policy both k3 and -d average to KL(policy || reference); k3
    is never negative, and has less variance where the two are near (Schulman,
    joschu.net/blog/kl-approx.html); far apart it can have more, as exp(d) is unbounded.

    All tensors are float32 of one shape. `logps` are the policy's; only they get a gradient.
    `old_logps` None means logps.detach(): r is 1, and its gradient is that of logp. `ref_logps` may
    be None if kl_beta is 0. `stats` holds detached tensors of the same shape: ratio, kl (k3), k1
    (-d), and (bool) where the clip stopped the gradient, clip_low and clip_high. Options:

    objective="cispo"  sg(clip(r)) A logp for the min, where sg stops the gradient of r: each
                       token keeps one (MiniMax-M1, 2506.13585, eq. 4 and 5; there r has no lower
                       bound, and the mean is that of loss_type dapo)
    unbiased_kl        k3 times r, whose gradient is the KL's, r (logp - ref) (DeepSeek-V3.2,
                       2512.02556, sec. 3.1)
    is_cap             truncated importance sampling, for a sampler that computes other log-probs
                       than the trainer: the objective, not the KL, times
                       min(exp(old_logp - sampler_logp), is_cap); 0: off
                       (Yao et al. 2025, fengyao.notion.site/off-policy-rl)
    ratio_cap          the min's r is at most this, for old_logps of a sampler that may be far off:
                       r A is unbounded where A < 0 (INTELLECT-2, 2505.07291); beyond it a token
                       with A < 0 has no gradient, and is not in clip_high; 0: off. It also caps
                       the r by which unbiased_kl weighs (logp - ref): a teacher's gradient is that
    sequences          the number of each token's sequence, int64: r is then the sequence's, exp of
                       the mean of its logp - old_logp (GSPO, 2507.18071, eq. 7); k3's r stays

    Deviation: r is at most exp(MAX_LOG_RATIO), so that float32 holds it. A token that the clip or
    the cap stops then has the gradient 0, not NaN. One that nothing stops keeps the slope r A,
    about 1e35: the norm of such a gradient overflows, and the trainer skips the step.
    """
    old_logps = (logps if old_logps is None else old_logps).detach()
    log_ratio = logps - old_logps
    token_ratio = bounded_exponent(log_ratio).exp()
    if sequences is not None:
        log_ratio = mean_of_sequence(log_ratio, sequences)
    ratio = bounded_exponent(log_ratio).exp()
    if ratio_cap:  # a constant factor: beyond the cap the KL keeps its direction
        token_ratio = token_ratio * (ratio_cap / token_ratio.detach()).clamp(max=1)
    low, high = 1 - clip_low, 1 + clip_high
    is_low, is_high = ratio < low, ratio > high
    if objective == "clip":
        bounded = ratio.clamp(max=ratio_cap) if ratio_cap else ratio
        gain = torch.minimum(bounded * advantages, bounded.clamp(low, high) * advantages)
        is_low, is_high = is_low & (advantages < 0), is_high & (advantages > 0)
    elif objective == "cispo":  # clips whatever the sign of the advantage
        gain = ratio.detach().clamp(low, high) * advantages * logps
    else:
        raise ValueError(f"objective must be one of {', '.join(OBJECTIVES)}, got {objective!r}")
    if is_cap:
        gain = gain * (old_logps - sampler_logps).detach().exp().clamp(max=is_cap)
    kl = k1 = torch.zeros_like(logps)
    if kl_beta:
        d = ref_logps.detach() - logps
        k1 = -d
        if unbiased_kl:  # for so large a d the ratio is near 0, and 0 x inf would be NaN
            d = bounded_exponent(d)
        kl = torch.expm1(d) - d  # exp(d) - 1 - d would round to below 0
        gain = gain - kl_beta * (kl * token_ratio if unbiased_kl else kl)
    stats = {"ratio": ratio.detach(), "kl": kl.detach(), "k1": k1.detach()}
    return -(weights * gain).sum(), stats | {"clip_low": is_low, "clip_high": is_high}


def bounded_exponent(values):
    """Returns the values, limited to MAX_LOG_RATIO, with the gradient of the values themselves.

    Why: exp overflows to inf above 88.7. If the clip or the cap then stops a token, autograd
    multiplies 0 by inf, which is NaN.
    Why not torch.clamp: it would stop the gradient too. Only the clip and the cap may.

    >>> bounded_exponent(torch.tensor([0.5, 100.0])).exp()
    tensor([1.6487e+00, 5.5406e+34])
    """
    bound = values - values.detach() + MAX_LOG_RATIO  # the 0 brings the gradient
    return torch.where(values > MAX_LOG_RATIO, bound, values)


def mean_of_sequence(values, sequences):
    """Returns, for each token, the mean over its sequence, (N,).

    >>> mean_of_sequence(torch.tensor([1.0, 3.0, 5.0]), torch.tensor([0, 0, 1]))
    tensor([2., 2., 5.])
    """
    zeros = values.new_zeros(int(sequences.max()) + 1 if len(sequences) else 0)
    sums = zeros.index_add(0, sequences, values)
    counts = zeros.index_add(0, sequences, torch.ones_like(values))
    return (sums / counts.clamp(min=1))[sequences]
