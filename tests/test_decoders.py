"""Decoders: each gives the plain one's log-probs, or is detected and not used."""

from dataclasses import replace

import pytest
import torch
from families import (
    FAMILIES,
    PROMPTS,
    SLOW,
    TOLERANCE,
    UNSHARED,
    WIDE,
    assert_plain_logps,
    sample,
    tiny_model,
)
from peft import LoraConfig
from transformers import AttentionInterface

from grpo import shared_prompt
from grpo.cached import CachedDecoder
from grpo.decoder import is_right, make_decoder
from grpo.options.sampling.plain_decoder import PlainDecoder
from grpo.shared_prompt import SharedDecoder

SHARING = {"qwen2", "llama", "qwen3", "gemma", "gpt2", "opt", "mixtral", *WIDE}


@pytest.mark.parametrize("family", FAMILIES | WIDE)
def test_which_families_share_prompts(family, model_of):
    """ALiBi (BLOOM) is of no attention interface, and a window may hide a part of the prompt."""
    kind = type(make_decoder(model_of(family), 12, longest_prompt=9))
    slow = PlainDecoder if family in SLOW else CachedDecoder
    assert kind is (SharedDecoder if family in SHARING else slow)
    if family in WIDE:  # 64 tokens of window are just enough for these
        assert type(make_decoder(model_of(family), 12, longest_prompt=52)) is SharedDecoder
        assert type(make_decoder(model_of(family), 12, longest_prompt=53)) is CachedDecoder


@pytest.mark.parametrize("family", [*UNSHARED, "gemma"])
def test_a_slower_decoder_is_taken_and_why_is_said(family, monkeypatch, capsys):
    model, reason = tiny_model(family), "TypeError("
    if family in UNSHARED:
        *_, reason = UNSHARED[family]
    else:
        monkeypatch.setattr(SharedDecoder, "next_logits", None)
    assert type(make_decoder(model, 12, 9)) is CachedDecoder
    assert reason in capsys.readouterr().out
    make_decoder(model, 12, 9)
    assert capsys.readouterr().out == ""  # once for a model
    assert_plain_logps(model, PROMPTS, sample(model, PROMPTS))


def test_a_long_completion_outgrows_its_room_and_keeps_its_past(model_of):
    """Room is 64 tokens at first, then doubled."""
    model = model_of("qwen2")
    groups = sample(model, PROMPTS, group_size=2, max_new_tokens=150, eos_ids={500})
    assert {len(c.ids) for group in groups for c in group} == {150}
    assert_plain_logps(model, PROMPTS, groups, tolerance=5 * TOLERANCE)  # measured: 8e-6


def without_softcap(module, query, key, value, mask, scaling=None, softcap=None, **others):
    return shared_prompt.shared_attention(module, query, key, value, mask, scaling, None, **others)


def without_own(module, query, key, value, mask, **others):
    out, _ = shared_prompt.shared_attention(module, query, key, value, mask, **others)
    return out * 0.99, None


@pytest.mark.parametrize("family, wrong", [
    ("gemma2 wide", without_softcap),
    ("gpt2", without_own),
    ("qwen2", "positions"),
    ("qwen2", "padding"),
    ("qwen2", "ages"),
    ("gpt2", "positions"),
])  # fmt: skip
def test_shared_prompts_that_would_be_wrong_are_found_out(family, wrong, monkeypatch):
    """It is tried on every model, for nobody has tried it on all architectures."""
    model, arrange, slots = tiny_model(family), SharedDecoder._arrange, SharedDecoder.slots_for
    assert is_right(SharedDecoder, model)
    if callable(wrong):
        AttentionInterface.register(shared_prompt.SHARED, wrong)

    def arrange_wrongly(self):
        arrange(self)
        if wrong == "positions":
            self.layout = replace(self.layout, start=self.layout.start + 1)
        elif wrong == "padding":
            self.layout = replace(self.layout, padding=None)

    monkeypatch.setattr(SharedDecoder, "_arrange", arrange_wrongly)
    if wrong == "ages":  # rows that joined late see what was never written
        seeing = lambda *arguments: replace(slots(*arguments), unwritten=None)
        monkeypatch.setattr(SharedDecoder, "slots_for", seeing)
    try:
        assert not is_right(SharedDecoder, model)
        assert type(make_decoder(model, 12, 9)) is CachedDecoder
    finally:
        AttentionInterface.register(shared_prompt.SHARED, shared_prompt.shared_attention)


def test_special_tokens_take_no_part_in_the_trial():
    """They are the first or the last ids, and often untrained."""
    model = tiny_model("qwen2")
    embedding = model.get_input_embeddings().weight.data
    embedding[1:21] = embedding[-21:] = torch.nan  # 0 is padding
    assert is_right(SharedDecoder, model)


@pytest.mark.parametrize("family, changes", [
    ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 16}),
    ("llama", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}}),
    ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 1, "hidden_act": "gelu"}),
    ("qwen2", "adapters"),
])  # fmt: skip
def test_other_shapes_and_adapters_share_prompts(family, changes):
    if changes == "adapters":
        model, layers = tiny_model(family), ["q_proj", "v_proj", "down_proj"]
        config = LoraConfig(r=4, target_modules=layers, init_lora_weights=False)
        model.add_adapter(config)
        model.eval()
    else:
        model = tiny_model(family, **changes)
    assert type(make_decoder(model, 12, 9)) is SharedDecoder
    assert_plain_logps(model, PROMPTS, sample(model, PROMPTS))
