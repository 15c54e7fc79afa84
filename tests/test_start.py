"""What a run says that it uses, on models that lack something."""

from types import SimpleNamespace

import pytest
from fakes import a_recipe, tiny_policy
from families import tiny_model

from grpo.forward import CompletionModel
from grpo.prepare import decoder_of
from grpo.start import uses_of

CACHED, PLAIN = "torch, CachedDecoder", "torch, PlainDecoder"
PADDED, WHOLE = "each completion with its prompt", "all logits at once"


@pytest.mark.parametrize("family, expected", [
    ("qwen2", {"sampler": CACHED, "loss": "in chunks, by torch"}),
    ("gemma2", {"sampler": CACHED, "attention": "packed, in buckets", "loss": WHOLE}),  # soft-caps
    ("bloom", {"sampler": CACHED, "attention": PADDED, "loss": "in chunks, by torch"}),
    ("mamba", {"sampler": PLAIN, "attention": PADDED}),  # no KV cache
])  # fmt: skip
def test_what_a_model_can_not_do_is_not_what_a_run_uses(tiny, alone, family, expected):
    policy, recipe = tiny_policy(tiny), a_recipe(MAX_PROMPT_TOKENS=9)
    policy.model = tiny_model(family)
    policy.decoder = decoder_of(policy.model)
    engine = SimpleNamespace(module=CompletionModel(policy.model))
    reference = SimpleNamespace(what="a copy of MODEL")
    uses = uses_of(recipe.c, policy, policy, engine, reference)
    assert uses["sampler"].startswith(expected.pop("sampler"))
    assert uses | expected == uses and uses["dtype"] == "float32"
