"""Every decoder on the simulated GPU: its logits are the CPU's, and it waits as often as it may."""

import itertools
from collections import Counter

import families
import pytest
import torch
from families import DYNAMIC, PROMPTS, TOLERANCE, assert_plain_logps, tiny_model

from grpo import sampler, shared_prompt
from grpo.cached import CachedDecoder
from grpo.decoder import make_decoder
from grpo.options.gpu.cuda_graph import GraphedDecoder, can_record
from grpo.options.sampling.plain_decoder import PlainDecoder
from grpo.shared_prompt import SharedDecoder
from rehearsal.events import counted

EOS = set(range(10, 20))  # from 13 on isin() waits; models have one to three
EVEN = [[7, 3, 5, 9], [4, 8, 2, 1]]  # prompts of one length: nothing is padded
PADDED = [[7, 3, 5, 9], [4, 8]]
GROUP = 4
FEWER, MORE = 3, 5  # tokens; a graph is recorded at the third

CASES = [
    ("qwen2", PlainDecoder),
    ("qwen2", CachedDecoder),
    ("qwen2", SharedDecoder),
    ("qwen2", GraphedDecoder),
    ("gpt2", SharedDecoder),
    ("gemma2 wide", GraphedDecoder),  # scores are capped: attention in pieces
]


def sample(model, prompts=PROMPTS, **changes):
    settings = {"max_new_tokens": 8, "eos_ids": EOS}
    settings["generator"] = torch.Generator("cuda").manual_seed(0)
    return families.sample(model, prompts, **settings | changes)


def qwen2(layers):
    """Returns a tiny model with so many layers, on the GPU."""
    return tiny_model("qwen2", num_hidden_layers=layers).to("cuda", torch.bfloat16)


def decoder_of(kind, model, tokens):
    return kind(model) if kind in (PlainDecoder, CachedDecoder) else kind(model, tokens)


def use(monkeypatch, kind):
    make = lambda model, tokens, longest: decoder_of(kind, model, tokens)
    monkeypatch.setattr(sampler, "make_decoder", make)


@pytest.mark.parametrize(("family", "kind"), CASES)
def test_samples_of_the_gpu_have_plain_log_probs(family, kind, monkeypatch):
    """While rows end, groups join, and the room is doubled."""
    use(monkeypatch, kind)
    monkeypatch.setattr(shared_prompt, "ROOM", 4)
    groups = sample(tiny_model(family).to("cuda"), max_sequences=6)
    assert_plain_logps(tiny_model(family), PROMPTS, groups, tolerance=5 * TOLERANCE)
    assert len({len(c.ids) for c in itertools.chain(*groups)}) > 1


@pytest.mark.parametrize("family, kind, changes", [
    ("qwen2", GraphedDecoder, {}),
    ("llama", SharedDecoder, {"rope_parameters": DYNAMIC}),  # it looks at the largest position
    ("gpt2", SharedDecoder, {}),  # it looks for padding where there is a pad id and no mask
    ("gpt2", GraphedDecoder, {"pad_token_id": None}),
    ("gemma2", CachedDecoder, {}),
    ("gemma", GraphedDecoder, {}),
    ("opt", GraphedDecoder, {}),
])  # fmt: skip
def test_the_fastest_decoder_passes_its_trial(family, kind, changes):
    model = tiny_model(family, **changes).to("cuda", torch.bfloat16)
    assert type(make_decoder(model, 12, 9)) is kind
    assert can_record(model) != (kind is SharedDecoder)  # whose layers wait


# --- Bounds -------------------------------------------------------------------------------
KINDS = [SharedDecoder, GraphedDecoder]


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


@pytest.mark.parametrize("kind, prompts", [
    *itertools.product(KINDS, (EVEN, PADDED)),
    (CachedDecoder, EVEN),
])  # fmt: skip
def test_a_token_waits_once(kind, prompts, monkeypatch):
    """The sampler asks which rows have ended."""
    use(monkeypatch, kind)
    model, endless = qwen2(1), {"group_size": GROUP, "eos_ids": {-1}}  # no sequence ends
    waits = per_token(lambda tokens: sample(model, prompts, max_new_tokens=tokens, **endless))
    assert waits.total() == 1, waits
    (place,) = waits
    assert place.startswith("nonzero at grpo/sampler.py:")


def test_joining_and_leaving_wait_a_bounded_number_of_times():
    decoder = SharedDecoder(qwen2(2), 8)
    with torch.no_grad(), counted() as admitting:
        decoder.admit(PADDED, [4] * len(PADDED))
    indices = torch.tensor([0, 2, 3, 5, 6], device="cuda")
    with torch.no_grad(), counted() as leaving:
        decoder.keep(indices)
    assert admitting.total() <= 8, admitting
    assert leaving.total() <= 6, leaving
