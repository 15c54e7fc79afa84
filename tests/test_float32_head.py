"""bfloat16 models give float32 logits to the sampler, from every decoder."""

import copy

import pytest
import torch
from fakes import tiny_policy
from families import PROMPTS

from grpo.bfloat16 import ConvertedHead, give_float32_head
from grpo.forward import CompletionModel, has_plain_head
from grpo.options.plain_decoder import PlainDecoder
from grpo.sample import Prompt
from grpo.sampler import CachedDecoder


@pytest.fixture
def model(model_of):
    found = copy.deepcopy(model_of("qwen2")).bfloat16()
    with torch.no_grad():
        found.lm_head.weight *= 40  # logits of some 20, as of a policy that is sure
    give_float32_head(found)
    return found


@torch.no_grad()
@pytest.mark.parametrize("converted", [False, True])
def test_logits_are_not_rounded(model, converted):
    hidden = torch.randn(3, 5, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    exact = hidden.double() @ model.lm_head.weight.double().T
    rounded = torch.nn.functional.linear(hidden, model.lm_head.weight)
    assert (rounded - exact).abs().max() > 0.05
    if converted:
        with ConvertedHead(model):
            found = model.lm_head(hidden)
        assert "float32_weight" not in vars(model.lm_head)
    else:
        found = model.lm_head(hidden)
    assert found.dtype == torch.float32 and (found - exact).abs().max() < 1e-4


@torch.no_grad()
def test_every_decoder_gives_float32_logits_and_the_head_stays_plain(model):
    for kind in (CachedDecoder, PlainDecoder):
        one = kind(model)
        assert one.begin(PROMPTS[:2], 2).dtype == torch.float32, kind
        assert one.next_logits(torch.tensor([3, 4, 5, 6])).dtype == torch.float32, kind
    assert has_plain_head(model)


@torch.no_grad()
def test_a_copy_has_a_head_of_its_own(model):
    """The reference is a copy of the policy."""
    other = copy.deepcopy(model)
    other.lm_head.weight.zero_()
    hidden = torch.ones(1, 32).bfloat16()
    assert not other.lm_head(hidden).any() and model.lm_head(hidden).any()


def test_a_policy_converts_its_head_once_and_forgets_it(tiny):
    policy = tiny_policy(tiny, "bfloat16")
    head, seen = policy.model.get_output_embeddings(), []
    forward = head.forward
    head.forward = lambda hidden: seen.append(vars(head).get("float32_weight")) or forward(hidden)
    settings = {"group_size": 2, "max_sequences": 4, "max_new_tokens": 4}
    groups = list(
        policy.stream(map(Prompt, *zip(*enumerate(PROMPTS))), seed=0, temperature=1.0, **settings)
    )
    assert len(groups) == len(PROMPTS) and len(seen) > 4
    assert len({id(weight) for weight in seen}) == 1 and seen[0].dtype == torch.float32
    assert "float32_weight" not in vars(head)


@pytest.mark.parametrize("family", ["gemma2", "gpt2", "qwen2"])
def test_packed_sequences_stay_and_a_head_that_is_not_plain_keeps_its_logits(family, model_of):
    model = copy.deepcopy(model_of(family)).bfloat16()
    before = CompletionModel(model).packs
    give_float32_head(model)
    assert CompletionModel(model).packs == before
    assert ("forward" in vars(model.get_output_embeddings())) == (family != "gemma2")
    with ConvertedHead(model):
        pass
