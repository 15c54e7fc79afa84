"""How often the host waits for a decoded token, of tiny models."""

from collections import Counter

import torch
from families import tiny_model

from grpo import sampler
from grpo.cached import CachedDecoder
from grpo.options.plain_decoder import PlainDecoder
from rehearsal.events import counted

EVEN = [[7, 3, 5, 9], [4, 8, 2, 1]]  # prompts of one length: nothing is padded
PADDED = [[7, 3, 5, 9], [4, 8]]
GROUP = 4
FEWER, MORE = 3, 5  # tokens; a graph is recorded at the third


def qwen2(layers):
    """Returns a tiny model with so many layers, on the GPU."""
    return tiny_model("qwen2", num_hidden_layers=layers).to("cuda", torch.bfloat16)


def decoder_of(kind, model, tokens):
    return kind(model) if kind in (PlainDecoder, CachedDecoder) else kind(model, tokens)


def per_token(tokens_drawn):
    """Returns how often the host waits for one more token, by place; tokens_drawn(n) samples n."""
    tokens_drawn(FEWER)  # trials of kernels, which happen but once
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
