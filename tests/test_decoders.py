"""Decoders: each gives the plain one's log-probs, or is detected and not used."""

from dataclasses import replace

import pytest
import torch
from families import (
    FAMILIES,
    OWN_STEP,
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

from grpo import shared_prompt as llama_step
from grpo.cached import CachedDecoder
from grpo.decoder import is_right, make_decoder
from grpo.options import shared_layers
from grpo.options.plain_decoder import PlainDecoder
from grpo.options.shared_layers import SharedDecoder
from grpo.shared_prompt import GroupDecoder, LlamaDecoder

# --- Decoders ----------------------------------------------------------------------
SHARING = {*OWN_STEP, "gemma", "gpt2", "opt", "mixtral", *WIDE}


@pytest.mark.parametrize("family", FAMILIES | WIDE)
def test_which_families_share_prompts(family, model_of):
    """ALiBi (BLOOM) is of no attention interface, and a window may hide a part of the prompt."""
    kind = type(make_decoder(model_of(family), 12, longest_prompt=9))
    slow = PlainDecoder if family in SLOW else CachedDecoder
    sharing = LlamaDecoder if family in OWN_STEP else SharedDecoder
    assert kind is (sharing if family in SHARING else slow)
    if family in WIDE:  # 64 tokens of window are just enough for these
        assert type(make_decoder(model_of(family), 12, longest_prompt=52)) is sharing
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
    return shared_layers.shared_attention(module, query, key, value, mask, scaling, None, **others)


def without_own(module, query, key, value, mask, **others):
    out, _ = shared_layers.shared_attention(module, query, key, value, mask, **others)
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
    model, arrange, slots = tiny_model(family), GroupDecoder._arrange, GroupDecoder.slots_for
    kinds = [SharedDecoder] + ([LlamaDecoder] if family in OWN_STEP else [])
    assert all(is_right(kind, model) for kind in kinds)
    if callable(wrong):
        AttentionInterface.register(shared_layers.SHARED, wrong)

    def arrange_wrongly(self):
        arrange(self)
        if wrong == "positions":
            self.layout = replace(self.layout, start=self.layout.start + 1)
        elif wrong == "padding":
            self.layout = replace(self.layout, padding=None)

    monkeypatch.setattr(GroupDecoder, "_arrange", arrange_wrongly)
    if wrong == "ages":  # rows that joined late see what was never written
        seeing = lambda *arguments: replace(slots(*arguments), unwritten=None)
        monkeypatch.setattr(GroupDecoder, "slots_for", seeing)
    try:
        assert not any(is_right(kind, model) for kind in kinds)
        assert type(make_decoder(model, 12, 9)) is CachedDecoder
    finally:
        AttentionInterface.register(shared_layers.SHARED, shared_layers.shared_attention)


def test_special_tokens_take_no_part_in_the_trial():
    """They are the first or the last ids, and often untrained."""
    model = tiny_model("qwen2")
    embedding = model.get_input_embeddings().weight.data
    embedding[1:21] = embedding[-21:] = torch.nan  # 0 is padding
    assert is_right(LlamaDecoder, model)


# --- This project's step -----------------------------------------------------------
@pytest.mark.parametrize("family", sorted(OWN_STEP))
@pytest.mark.parametrize("part", ["norm", "rotated"])
def test_an_own_step_that_would_be_wrong_is_found_out(family, part, monkeypatch, capsys):
    """Such a model is sampled by transformers' layers."""
    wrong = {"norm": lambda module, x: x * module.weight, "rotated": lambda x, cos, sin: x * cos}
    monkeypatch.setattr(llama_step, part, wrong[part])
    model = tiny_model(family)
    own = model.config._attn_implementation
    decoder = make_decoder(model, 12, 9)
    assert type(decoder) is SharedDecoder and "differ by" in capsys.readouterr().out
    decoder.admit(PROMPTS, [2] * 4)
    decoder.next_logits(torch.arange(8))
    assert model.config._attn_implementation == own != shared_layers.SHARED  # it is back


@pytest.mark.parametrize("family, changes", [
    ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 16}),
    ("llama", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}}),
    ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 1, "hidden_act": "gelu"}),
    ("qwen2", "adapters"),
])  # fmt: skip
def test_other_shapes_and_adapters_take_our_step(family, changes):
    if changes == "adapters":
        model, layers = tiny_model(family), ["q_proj", "v_proj", "down_proj"]
        config = LoraConfig(r=4, target_modules=layers, init_lora_weights=False)
        model.add_adapter(config)
        model.eval()
    else:
        model = tiny_model(family, **changes)
    assert type(make_decoder(model, 12, 9)) is LlamaDecoder
    assert_plain_logps(model, PROMPTS, sample(model, PROMPTS))
