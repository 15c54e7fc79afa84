"""How much a decoded token and a micro-batch launch, and how often the host waits for them.

Of tiny models: the numbers go by the number of layers, not by their width.
"""

from collections import Counter
from dataclasses import dataclass

import torch
from families import tiny_model

import grpo_loss_triton
from grpo import loss as plain_loss
from grpo import sampler
from grpo.cached import CachedDecoder
from grpo.forward import CompletionModel
from grpo.options.plain_decoder import PlainDecoder
from rehearsal.cuda import CUDAGraph
from rehearsal.events import counted

EVEN = [[7, 3, 5, 9], [4, 8, 2, 1]]  # prompts of one length: nothing is padded
PADDED = [[7, 3, 5, 9], [4, 8]]
GROUP = 4
FEWER, MORE = 3, 5  # tokens; a graph is recorded at the third


@dataclass
class Cost:
    launches: float
    waits: Counter  # by place
    recorded: int = 0  # kernels of the graph


def model_of(family, layers, dtype=torch.bfloat16):
    """Returns the tiny model of a family with so many layers, on the GPU."""
    name = "n_layer" if family == "gpt2" else "num_hidden_layers"
    return tiny_model(family, **{name: layers}).to("cuda", dtype)


def line(numbers):
    """Returns (a, b), where a + b * layers are the `numbers`, {layers: number}, two of them."""
    (few, low), (many, high) = numbers.items()
    slope = (high - low) / (many - few)
    return low - slope * few, slope


# --- Sampling -------------------------------------------------------------------------
def decoder_of(kind, model, tokens):
    return kind(model) if kind in (PlainDecoder, CachedDecoder) else kind(model, tokens)


def per_token(tokens_drawn):
    """Returns the Cost of one more token; tokens_drawn(n) samples n."""
    tokens_drawn(FEWER)  # trials of kernels, which come but once
    counts = []
    for tokens in (FEWER, MORE):
        with counted() as count:
            tokens_drawn(tokens)
        counts.append(count)
    few, many = counts
    waits = {place: n - few.waits[place] for place, n in many.waits.items()}
    return Cost(
        (many.launches.total() - few.launches.total()) / (MORE - FEWER),
        Counter({place: n / (MORE - FEWER) for place, n in waits.items() if n}),
        CUDAGraph.recorded,
    )


def decoder_cost(model, kind, prompts):
    """Returns the Cost of a token of all sequences, the sampler's turn included."""

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
        CUDAGraph.recorded = 0
        return per_token(sample)
    finally:
        sampler.make_decoder = make


# --- Training -------------------------------------------------------------------------
def micro_batch_cost(model, *, packs, checkpointing):
    """Returns the Costs of forward with the loss, and of the backward pass; of 8 sequences."""
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
    return [Cost(count.launches.total(), count.waits) for count in (forward, backward)]
