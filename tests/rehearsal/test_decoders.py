"""Every decoder on the pretended GPU: its logits are the CPU's, and it waits as often as it may."""

import itertools

import pytest
import torch
from families import PROMPTS, TOLERANCE, plain_logps, tiny_model

from grpo.sampling import sampler
from grpo.sampling.decoders import shared_prompt
from grpo.sampling.decoders.cached import CachedDecoder, PlainDecoder
from grpo.sampling.decoders.choice import make_decoder
from grpo.sampling.decoders.cuda_graph import GraphedDecoder
from grpo.sampling.decoders.llama import LlamaDecoder
from grpo.sampling.decoders.shared_prompt import SharedDecoder
from grpo.sampling.sampler import sample_groups

SIMPLE = {PlainDecoder: lambda model, n: PlainDecoder(model)}
SIMPLE |= {CachedDecoder: lambda model, n: CachedDecoder(model)}
EOS = set(range(10, 20))  # from 13 on isin() waits; models have one to three
CASES = [
    ("qwen2", PlainDecoder),
    ("qwen2", CachedDecoder),
    ("qwen2", SharedDecoder),
    ("qwen2", LlamaDecoder),
    ("qwen2", GraphedDecoder),
    ("llama", GraphedDecoder),
    ("qwen3", GraphedDecoder),
    ("gpt2", SharedDecoder),
    ("gemma2 wide", SharedDecoder),
    ("mamba", PlainDecoder),
]


def sample(model, **changes):
    settings = {"group_size": 3, "max_new_tokens": 12, "temperature": 1.0, "eos_ids": EOS}
    settings |= {"vocab_size": 110, "generator": torch.Generator("cuda").manual_seed(0)}
    return sample_groups(model, PROMPTS, **(settings | changes))


def use(monkeypatch, kind):
    make = SIMPLE.get(kind, kind)
    monkeypatch.setattr(sampler, "make_decoder", lambda model, n, longest: make(model, n))


@pytest.mark.parametrize(("family", "kind"), CASES)
def test_samples_of_the_gpu_have_plain_log_probs(family, kind, monkeypatch):
    """While rows end, groups join, and the room is doubled."""
    use(monkeypatch, kind)
    monkeypatch.setattr(shared_prompt, "ROOM", 8)
    model = tiny_model(family).to("cuda")
    groups = sample(model, max_rows=6)
    model = tiny_model(family)
    for prompt, group in zip(PROMPTS, groups, strict=True):
        for c in group:
            gap = torch.tensor(c.logps) - plain_logps(model, prompt, c.ids, 1.0)
            assert gap.abs().max() < 5 * TOLERANCE
    assert len({len(c.ids) for c in itertools.chain(*groups)}) > 1


CHOICES = [("qwen2", GraphedDecoder), ("gpt2", SharedDecoder), ("gemma2", CachedDecoder)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("family", "kind"), CHOICES)
def test_the_fastest_decoder_passes_its_trial(family, kind, dtype):
    model = tiny_model(family).to("cuda", dtype)
    assert type(make_decoder(model, 12, 9)) is kind
