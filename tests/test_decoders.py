"""Which models have a decoder with a cache; other shapes and positions that a model can't leave."""

import pytest
from families import (
    DYNAMIC,
    FAMILIES,
    OTHERS,
    PROMPTS,
    SLOW,
    TOLERANCE,
    WIDE,
    assert_plain_logps,
    sample,
    settings_for,
    tiny_model,
)
from peft import LoraConfig

from grpo.options.plain_decoder import PlainDecoder
from grpo.prepare import decoder_of
from grpo.sample import Prompt
from grpo.sampler import CachedDecoder, stream_groups


@pytest.mark.parametrize("family", FAMILIES | WIDE | OTHERS)
def test_which_families_have_a_cache(family):
    model = tiny_model(family)
    assert decoder_of(model) is (PlainDecoder if family in SLOW else CachedDecoder)
    if family in OTHERS | WIDE:
        assert_plain_logps(model, PROMPTS, sample(model, PROMPTS))


def test_a_long_completion_keeps_its_past(model_of):
    model = model_of("qwen2")
    groups = sample(model, PROMPTS, group_size=2, max_new_tokens=150, eos_ids={500})
    assert {len(c.ids) for group in groups for c in group} == {150}
    assert_plain_logps(model, PROMPTS, groups, tolerance=5 * TOLERANCE)  # measured: 8e-6


@pytest.mark.parametrize("family, changes", [
    ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 16}),
    ("llama", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}}),
    ("llama", {"rope_parameters": DYNAMIC}),
    ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 1, "hidden_act": "gelu"}),
    ("qwen2", "adapters"),
])  # fmt: skip
def test_other_shapes_and_adapters_are_sampled(family, changes):
    if changes == "adapters":
        model, layers = tiny_model(family), ["q_proj", "v_proj", "down_proj"]
        config = LoraConfig(r=4, target_modules=layers, init_lora_weights=False)
        model.add_adapter(config)
        model.eval()
    else:
        model = tiny_model(family, **changes)
    assert_plain_logps(model, PROMPTS, sample(model, PROMPTS))


@pytest.mark.parametrize("family", ["gpt2", "gpt1", "opt"])  # which have a table of 64 positions
def test_an_ended_sequence_does_not_leave_the_models_positions(family, model_of):
    """One of few tokens that begins late in the table stays in the batch of longer ones."""
    model, long = model_of(family), [5 + i % 90 for i in range(60)]
    asked = [Prompt("late", long, 4), *(Prompt(i, [7 + i] * 9, 55) for i in range(9))]
    own = {"group_size": 1, "max_sequences": 16, "max_new_tokens": 55, "eos_ids": {500}}
    groups = dict(stream_groups(model, iter(asked), **settings_for(model, **own)))
    assert {key: len(c.ids) for key, (c,) in groups.items()} == {p.key: p.limit for p in asked}
    assert_plain_logps(model, [p.ids for p in asked], [groups[p.key] for p in asked])
