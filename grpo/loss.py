"""The GRPO loss in plain torch: the readable specification of what is trained.

Three things, in the order in which they are needed: advantages and weights of a step's completions;
the log-probs of their tokens; the loss. `linear_logps` and `grpo_loss` hold the full logits, N x V,
several times over. grpo_loss_triton.py has both again, under the same names and signatures, without
doing so; the trainer takes that file, and the tests hold it to this one.

Symbols: B sequences, G completions of a group, N tokens, H hidden size, V ids of the tokenizer,
V' rows of the LM head (V and the embedding's padding). Per-token tensors may be (N,) or (B, T), if
all are; advantages may also be (B,).
"""

import torch


# --- Advantages and weights ---------------------------------------------------------
def group_advantages(rewards, *, scale_by_std):
    """-> advantages (G,) of one group's weighted rewards (G,): centred, and scaled by their std.

    DeepSeekMath sec. 4.1.2; without the std it is Dr. GRPO's. The 1e-4 keeps an all-equal group
    finite (its advantages are 0). Example: [1, 0, 0, 1] -> [0.866, -0.866, -0.866, 0.866]
    """
    rewards = rewards.double()  # in float32 the mean of equal rewards may differ from them
    centred = rewards - rewards.mean()
    return (centred / (rewards.std() + 1e-4) if scale_by_std else centred).float()


def token_weights(lengths, *, loss_type, sequences, tokens, max_completion_tokens):
    """-> for each sequence, the weight of each of its tokens in the loss, float32 (B,).

    `lengths` (B,) are the trained tokens of each; `sequences` counts all of the step, also those
    masked, `tokens` the trained tokens of the step: over all ranks and micro-batches, so that the
    gradient does not depend on how the step is cut up. Each loss type is a row of LOSS_TYPES.
    """
    weights = LOSS_TYPES[loss_type](lengths.float(), sequences, tokens, max_completion_tokens)
    return torch.as_tensor(weights, dtype=torch.float32).expand(len(lengths))


LOSS_TYPES = {
    # the mean over sequences of the mean over tokens (DeepSeekMath eq. 3): favours short answers
    "grpo": lambda lengths, sequences, tokens, longest: 1 / (sequences * lengths.clamp(min=1)),
    # the mean over all tokens of the step (DAPO eq. 8): a token counts the same in any sequence
    "dapo": lambda lengths, sequences, tokens, longest: 1 / max(tokens, 1),
    # a constant (Dr. GRPO): no length in it at all
    "dr_grpo": lambda lengths, sequences, tokens, longest: 1 / (sequences * longest),
}


# --- Log-probs ----------------------------------------------------------------------
def linear_logps(hidden, weight, ids, *, temperature=1.0, vocab_size=None, entropy=False):
    """-> log softmax(hidden @ weight.T / temperature)[ids], float32, shaped like `ids`.

    `hidden` (..., H) are the states that predict the tokens `ids` (...), int64, each below
    `vocab_size`; `weight` (V', H) is the LM head, in the same dtype. With weight None, `hidden`
    (..., V') are the logits themselves, for models with more than a matrix there. The softmax is
    over the first `vocab_size` columns: a tokenizer never emits the embedding's padding. It is in
    float32 whatever the model's dtype, as bf16 log-probs cost up to 1.6 % in the probability ratio.
    With `entropy`, -> (logps, entropy): of the sampling distribution, in nats, detached.
    """
    logits = hidden if weight is None else hidden @ weight.T  # (..., V')
    exact = torch.promote_types(logits.dtype, torch.float32)
    log_probs = (logits[..., :vocab_size].to(exact) / temperature).log_softmax(-1)
    logps = log_probs.gather(-1, ids[..., None]).squeeze(-1)
    if not entropy:
        return logps
    return logps, torch.special.entr(log_probs.detach().exp()).sum(-1)  # entr(p) = -p log p


# --- Loss ---------------------------------------------------------------------------
OBJECTIVES = ("clip", "cispo")


def policy_loss(
    logps,
    old_logps,
    ref_logps,
    advantages,
    weights,
    *,
    clip_low,
    clip_high,
    kl_beta,
    objective="clip",
    unbiased_kl=False,
    sampler_logps=None,
    is_cap=0.0,
    ratio_cap=0.0,
    sequences=None,
):
    """-> (loss, stats): minus the weighted sum of the GRPO objective over N tokens.

    For a token with ratio r = exp(logp - old_logp), advantage A and weight w it is
    w * (min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) - kl_beta * k3), with
    k3 = exp(ref - logp) - (ref - logp) - 1, an estimate of KL(policy || reference) that is never
    negative (DeepSeekMath eq. 3 and 4). `old_logps` None means those of `logps`: on-policy, r is 1.
    `ref_logps` may be None if kl_beta is 0. All are float32, gradients flow through `logps` alone,
    `stats` has detached tensors of the same shape. What departs from that:

    objective="cispo"  sg(clip(r)) A logp for the min: no token loses its gradient (MiniMax-M1,
                       2506.13585, eq. 4 and 5; it bounds r from above only, which is clip_low = 1)
    unbiased_kl        k3 times r, whose gradient is that of the KL: r (logp - ref) (DeepSeek-V3.2,
                       2512.02556, sec. 3.1)
    is_cap             the objective, not the KL, times min(exp(old - sampler), is_cap), for a
                       sampler that finds other log-probs than the trainer (truncated importance
                       sampling)
    ratio_cap          the min's r is at most this, which for A < 0 has no bound otherwise: for old
                       log-probs of a sampler that may be far off (the two-sided clip of
                       INTELLECT-2, 2505.07291)
    sequences          each token's sequence number (int64): r is the sequence's, exp of the mean of
                       its tokens' logp - old_logp (GSPO, 2507.18071, eq. 7); k3's r stays a token's
    """
    old_logps = (logps if old_logps is None else old_logps).detach()
    log_ratio = logps - old_logps
    token_ratio = torch.exp(log_ratio)
    if sequences is not None:
        log_ratio = mean_of_sequence(log_ratio, sequences)
    ratio = torch.exp(log_ratio)
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    if objective not in OBJECTIVES:
        raise ValueError(f"objective must be one of {', '.join(OBJECTIVES)}, got {objective!r}")
    if objective == "cispo":
        gain = clipped.detach() * advantages * logps
    else:
        # The smaller of the two: a step that already went too far gets no more gradient (clipped),
        # one that went the wrong way keeps its full gradient.
        bounded = ratio.clamp(max=ratio_cap) if ratio_cap else ratio
        clipped = bounded.clamp(1 - clip_low, 1 + clip_high)
        gain = torch.minimum(bounded * advantages, clipped * advantages)
    if is_cap:
        gain = gain * torch.exp(old_logps - sampler_logps).clamp(max=is_cap)
    kl = torch.zeros_like(logps)
    if kl_beta:
        difference = ref_logps.detach() - logps
        kl = torch.expm1(difference) - difference  # exp(d) - 1 - d would round to below 0
        gain = gain - kl_beta * (kl * token_ratio if unbiased_kl else kl)
    either = objective == "cispo"  # clips whatever the sign; the min only the way that A wants
    stats = {
        "ratio": ratio.detach(),
        "kl": kl.detach(),
        "clip_low": (ratio.detach() < 1 - clip_low) & ((advantages < 0) | either),
        "clip_high": (ratio.detach() > 1 + clip_high) & ((advantages > 0) | either),
    }
    return -(weights * gain).sum(), stats


def mean_of_sequence(values, sequences):
    """-> for each token the mean of its sequence. Example: [1, 3, 5], [0, 0, 1] -> [2, 2, 5]"""
    zeros = values.new_zeros(int(sequences.max()) + 1 if len(sequences) else 0)
    sums = zeros.index_add(0, sequences, values)
    counts = zeros.index_add(0, sequences, torch.ones_like(values))
    return (sums / counts.clamp(min=1))[sequences]


def grpo_loss(
    hidden,
    weight,
    ids,
    old_logps,
    ref_logps,
    advantages,
    weights,
    *,
    temperature=1.0,
    vocab_size=None,
    **settings,
):
    """-> (loss, stats): policy_loss, from the hidden states `hidden` and the LM head `weight`.

    The tensors are those of linear_logps and policy_loss, `settings` the latter's. A token of
    weight 0 is masked: it costs nothing, whatever stands there, and its stats are 0. `stats` has
    "logps" and "entropy" too.
    """
    (hidden, ids, *tokens), restore = trained_tokens(
        weights, hidden, ids, old_logps, ref_logps, advantages, weights, *sides(settings)
    )
    logps, entropy = linear_logps(
        hidden, weight, ids, temperature=temperature, vocab_size=vocab_size, entropy=True
    )
    *tokens, settings["sampler_logps"], settings["sequences"] = tokens
    loss, stats = policy_loss(logps, *tokens, **settings)
    return loss, restore(stats | {"logps": logps.detach(), "entropy": entropy})


def sides(settings):
    """-> the two of policy_loss's settings that are per-token tensors, or None."""
    return settings.get("sampler_logps"), settings.get("sequences")


def trained_tokens(weights, hidden, *tensors):
    """-> (tensors, restore): each flat, without the tokens of weight 0; and what undoes that.

    Padding leaves here, before the LM head: of a padded batch it is often half the work. `tensors`
    are shaped like `weights` (B, T), or (B,), or None; `hidden` has a dimension more.
    """
    flat = weights.reshape(-1)
    index = flat.nonzero().squeeze(1)
    whole = len(index) == len(flat)

    def select(tensor):
        if tensor is None:
            return None
        if tensor.dim() < weights.dim():  # (B,): one for each sequence
            tensor = tensor.reshape(*tensor.shape, *[1] * (weights.dim() - tensor.dim()))
        tensor = tensor.expand(weights.shape).reshape(-1)
        return tensor if whole else tensor[index]

    def restore(stats):
        full = {name: values.new_zeros(len(flat)) for name, values in stats.items()}
        return {k: v.index_copy(0, index, stats[k]).view(weights.shape) for k, v in full.items()}

    hidden = hidden.reshape(-1, hidden.shape[-1])
    return [hidden if whole else hidden[index], *map(select, tensors)], restore
