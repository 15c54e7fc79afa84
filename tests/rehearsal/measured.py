"""How often the host waits for a decoded token and a micro-batch, of tiny models."""

from collections import Counter

import torch
from families import tiny_model

import grpo_loss_triton
from grpo import loss as plain_loss
from grpo import sampler
from grpo.cached import CachedDecoder
from grpo.forward import CompletionModel
from grpo.options.plain_decoder import PlainDecoder
from rehearsal.events import counted

EVEN = [[7, 3, 5, 9], [4, 8, 2, 1]]  # prompts of one length: nothing is padded
PADDED = [[7, 3, 5, 9], [4, 8]]
GROUP = 4
FEWER, MORE = 3, 5  # tokens; a graph is recorded at the third


def qwen2(layers):
    """Returns a tiny model with so many layers, on the GPU."""
    return tiny_model("qwen2", num_hidden_layers=layers).to("cuda", torch.bfloat16)


# --- Sampling -------------------------------------------------------------------------
def decoder_of(kind, model, tokens):
    return kind(model) if kind in (PlainDecoder, CachedDecoder) else kind(model, tokens)


def per_token(tokens_drawn):
    """Returns how often the host waits for one more token, by place; tokens_drawn(n) samples n."""
    tokens_drawn(FEWER)  # trials of kernels, which come but once
    counts = []
    for tokens in (FEWER, MORE):
        with counted() as count:
            tokens_drawn(tokens)
        counts.append(count)
    few, many = counts
    return Counter({place: n / (MORE - FEWER) for place, n in (many - few).items()})


def decoder_waits(model, kind, prompts):
    """Returns the waits for a token of all sequences, the sampler's turn included."""

    def sample(tokens):
        sampler.sample_groups(
            model,
            prompts,
            group_size=GROUP,
            max_new_tokens=tokens,
            temperature=1.0,
            eos_ids={-1},  # no sequence ends
            vocab_size=110,
            generator=torch.Generator("cuda").manual_seed(0),
        )

    make = sampler.make_decoder
    sampler.make_decoder = lambda model, tokens, longest: decoder_of(kind, model, tokens)
    try:
        return per_token(sample)
    finally:
        sampler.make_decoder = make


# --- Training -------------------------------------------------------------------------
def micro_batch_waits(model, *, packs, checkpointing):
    """Returns the waits in forward with the loss, and in the backward pass; of 8 sequences."""
    completion = CompletionModel(model, gradient_checkpointing=checkpointing)
    assert completion.packs and completion.varlen == (model.dtype == torch.bfloat16)
    completion.packs = packs
    prompts = [[5, 6, 7, 8, 9]] * 4 + [[3, 4, 5]] * 4
    completions = [[i + 10] * (3 + i) for i in range(8)]
    size = sum(map(len, completions))
    given = [torch.full((size,), value, device="cuda") for value in (-3.0, 0.5, 1 / size)]
    clip = {"clip_low": 0.2, "clip_high": 0.2, "kl_beta": 0.04, "is_cap": 2.0}
    grpo_loss_triton.use_triton(completion.head)  # trials, which come but once
    with counted() as forward:
        hidden, ids = completion(prompts, completions)
        logps = grpo_loss_triton.linear_logps(hidden, completion.head, ids, vocab_size=110)
        loss, _ = plain_loss.policy_loss(logps, None, *given, sampler_logps=given[0], **clip)
    with counted() as backward:
        loss.backward()
    return forward, backward
