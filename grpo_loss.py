"""The GRPO loss in plain torch: from a model's logits to log-probs, advantages, weights, loss.

Functions without state or constants of their own: the readable specification of what is trained.
The reference server takes its log-probs from here as well, so both sides compute the same thing.

Symbols: B sequences, G completions of a group, N completion tokens of a batch (one sequence after
another, no padding), V ids of the tokenizer, V' rows of the embedding (V and its padding).
"""

import torch

from sampler import accepts


# --- Log-probs ----------------------------------------------------------------------
def completion_logits(model, prompts, completions):
    """-> logits (N, V') in the model's dtype, and targets (N,), of all completion tokens.

    `prompts` and `completions` are lists of id lists. Rows are padded on the right, where causal
    attention can't see it, so there is no mask to get wrong, and the padding's logits are dropped
    before the softmax.
    """
    rows = [p + c for p, c in zip(prompts, completions, strict=True)]
    width = max(map(len, rows)) - 1  # the last token has no successor to predict
    ids = torch.tensor([row[:-1] + [0] * (width + 1 - len(row)) for row in rows])
    first = min(map(len, prompts)) - 1  # row t of the logits predicts token t + 1
    wanted = torch.zeros(len(rows), width, dtype=torch.bool)
    for row, prompt, completion in zip(wanted, prompts, completions, strict=True):
        row[len(prompt) - 1 : len(prompt) - 1 + len(completion)] = True
    device = next(model.parameters()).device
    inputs = {"input_ids": ids.to(device), "use_cache": False}
    if accepts(model, "logits_to_keep"):  # spares the logits of the shared part of the prompts
        inputs["logits_to_keep"] = torch.arange(first, width, device=device)
    logits = model(**inputs).logits
    if logits.shape[1] == width:
        logits = logits[:, first:]
    targets = torch.tensor([token for c in completions for token in c], device=device)
    return logits[wanted[:, first:].to(device)], targets


def token_logps(logits, targets, *, temperature, vocab_size):
    """-> log softmax(logits / temperature)[target], float32 (N,), over the tokenizer's ids.

    In float32 whatever the model's dtype: bf16 log-probs cost up to 1.6 % in the probability ratio.
    """
    logits = logits[:, :vocab_size].float() / temperature  # (N, V)
    return logits.gather(1, targets[:, None]).squeeze(1) - logits.logsumexp(1)


@torch.no_grad()
def token_entropy(logits, *, temperature, vocab_size):
    """-> entropy in nats of the sampling distribution at each token, (N,)."""
    entropies = []
    for slab in logits[:, :vocab_size].split(1024):  # float32 copies of a slab at a time
        log_probs = torch.log_softmax(slab.float() / temperature, dim=-1)
        entropies.append(-(log_probs.exp() * log_probs).sum(-1))
    return torch.cat(entropies)


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


# --- Loss ---------------------------------------------------------------------------
def grpo_loss(logps, old_logps, ref_logps, advantages, weights, *, clip_low, clip_high, kl_beta):
    """-> (loss, stats): minus the weighted sum of the GRPO objective over N tokens.

    For a token with ratio r = exp(logp - old_logp), advantage A and weight w it is
    w * (min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) - kl_beta * k3), with
    k3 = exp(ref - logp) - (ref - logp) - 1, an estimate of KL(policy || reference) that is never
    negative (DeepSeekMath eq. 3 and 4). All tensors are float32 (N,); `ref_logps` may be None if
    kl_beta is 0. Gradients flow through `logps` alone. `stats` has detached (N,) tensors.
    """
    ratio = torch.exp(logps - old_logps.detach())
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    # The smaller of the two: a step that already went too far gets no more gradient (clipped), one
    # that went the wrong way keeps its full gradient.
    objective = torch.minimum(ratio * advantages, clipped * advantages)
    kl = torch.zeros_like(logps)
    if kl_beta:
        difference = ref_logps.detach() - logps
        kl = torch.expm1(difference) - difference  # exp(d) - 1 - d would round to below 0
        objective = objective - kl_beta * kl
    stats = {
        "ratio": ratio.detach(),
        "kl": kl.detach(),
        "clip_low": (ratio.detach() < 1 - clip_low) & (advantages < 0),
        "clip_high": (ratio.detach() > 1 + clip_high) & (advantages > 0),
    }
    return -(weights * objective).sum(), stats


# --- Micro-batches ------------------------------------------------------------------
def pack_by_tokens(lengths, budget):
    """Batches of row numbers, longest rows first, each of at most `budget` padded tokens.

    A row longer than the budget gets a batch of its own.
    Example: [3, 9, 4], 10 -> [[1], [2, 0]]
    """
    batches, width = [], 0
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        if not batches or (len(batches[-1]) + 1) * width > budget:
            batches.append([])
            width = lengths[row]  # the first row of a batch is its longest
        batches[-1].append(row)
    return batches


def plan_micro_batches(lengths, world, budget):
    """-> for each rank a list of micro-batches (lists of row numbers), equally many for each rank.

    Rows are dealt out by length, so ranks get about the same work. ZeRO-2 communicates in every
    backward: a rank with fewer micro-batches would hang the others, so it gets empty ones on top.
    Example: [5, 9, 7], 2 ranks, budget 9 -> [[[1], [0]], [[2], []]]
    """
    longest_first = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    plans = []
    for rank in range(world):
        mine = longest_first[rank::world]
        batches = pack_by_tokens([lengths[row] for row in mine], budget)
        plans.append([[mine[i] for i in batch] for batch in batches])
    most = max(map(len, plans))
    return [plan + [[]] * (most - len(plan)) for plan in plans]
