"""LoRA: adapters travel, and are merged while tokens are sampled."""

import gc
import itertools
import json
import weakref
from pathlib import Path

import pytest
import torch
from fakes import move, tiny_policy
from families import tiny_model

from grpo.options.lora import MergedAdapters, add_adapters, merge_adapters
from grpo.options.worker_weights import load_weights, trained_weights
from grpo.policy import Policy
from grpo.sample import Prompt

IDS = torch.tensor([[3, 4, 5, 6, 7, 8]])


def with_adapters(model, rank=4):
    add_adapters(model, rank)
    move(model, 0.1)  # B, too, which starts as 0
    return model


def test_adapters_travel_to_a_model_with_adapters():
    mine, theirs = (with_adapters(tiny_model("qwen2")) for _ in range(2))
    move(theirs, 0.1)
    assert (mine(IDS).logits - theirs(IDS).logits).abs().max() > 0.1
    load_weights(mine, trained_weights(theirs))
    assert torch.equal(mine(IDS).logits, theirs(IDS).logits)
    with pytest.raises(ValueError, match="model.layers.0.self_attn.q_proj"):
        dict(merge_adapters(tiny_model("gpt2"), trained_weights(mine)))


def test_a_saved_adapter_finds_its_base_from_elsewhere(tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tiny.parent)
    tiny_policy(Path(tiny.name), lora_rank=4).save(tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(tiny)
    assert "adapters of rank 4 reach " in capsys.readouterr().out


def state_of(model):
    """Returns what may not change: each parameter's identity, memory and values, and the layers."""
    tensors = {name: (id(p), p.data_ptr(), p.clone()) for name, p in model.named_parameters()}
    return tensors, [(name, id(module)) for name, module in model.named_modules()]


def assert_as_before(model, before):
    tensors, modules = state_of(model)
    assert modules == before[1] and tensors.keys() == before[0].keys()
    for name, (identity, memory, values) in tensors.items():
        assert (identity, memory) == before[0][name][:2], name
        assert torch.equal(values, before[0][name][2]), name


@torch.no_grad()
@pytest.mark.parametrize("family", ["qwen2", "gpt2", "llama", "opt"])
def test_merged_adapters_compute_what_the_model_with_adapters_does(family):
    """W + 2 B A, also of GPT-2, which has its matrices transposed, the square ones too."""
    model, base = with_adapters(tiny_model(family)), tiny_model(family)
    expected, before = model(IDS).logits, state_of(model)
    assert (base(IDS).logits - expected).abs().max() > 0.1
    plain = [type(module) for module in base.modules()]
    merged = MergedAdapters(model)
    for _ in range(3):
        with merged:
            assert [type(module) for module in model.modules()] == plain
            torch.testing.assert_close(model(IDS).logits, expected, rtol=0, atol=5e-5)
        assert_as_before(model, before)
        assert torch.equal(model(IDS).logits, expected)
    with pytest.raises(ZeroDivisionError), merged:
        raise ZeroDivisionError
    assert_as_before(model, before)

    # A file is read to the CPU, and the model may be on a GPU: "meta" stands for it
    elsewhere = merge_adapters(tiny_model(family).to("meta"), trained_weights(model))
    assert all(tensor.device.type == "meta" for _, tensor in elsewhere)
    load_weights(base, dict(merge_adapters(base, trained_weights(model))))
    # Measured: 6e-6 at most
    torch.testing.assert_close(base(IDS).logits, expected, rtol=0, atol=5e-5)


@torch.no_grad()
@pytest.mark.parametrize("family", ["qwen2", "gpt2"])
def test_updates_far_below_the_spacing_of_bfloat16_reach_the_sampler(family):
    """Rounded to the nearest, 1 % of the movement arrives: the sampler would keep MODEL's weights
    while the trainer's move."""
    model = tiny_model(family).bfloat16()
    with_adapters(model)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            weight.copy_(2e-4 * weight.sign())
    for *_, layer, _, old, new in MergedAdapters(model).layers:
        (a,), (b,) = layer.lora_A.values(), layer.lora_B.values()
        moved = 2 * (b.weight.double() @ a.weight.double())
        moved = moved if old.shape == moved.shape and family != "gpt2" else moved.T
        arrived = ((new.double() - old.double()) * moved.sign()).sum() / moved.abs().sum()
        nearest = ((old + moved).bfloat16().double() - old.double()).abs().sum()
        assert abs(arrived - 1) < 0.15, arrived
        assert nearest < 0.4 * moved.abs().sum()


@pytest.mark.parametrize("end", ["exhausted", "closed", "dropped", "an error"])
def test_a_stream_leaves_the_model_as_it_is_trained(end, monkeypatch):
    """Also between two groups: then rewards are found, and whoever stops there may save it."""
    model = with_adapters(tiny_model("qwen2"))
    before, copies = state_of(model), weakref.WeakSet()

    def noted(model):
        copies.add(merged := MergedAdapters(model))
        return merged

    prompts = itertools.starmap(Prompt, enumerate([[5, 6, 7], [8], [4, 9]]))
    settings = {"max_sequences": 4, "max_new_tokens": 5, "temperature": 1.0}
    how = {"lora": True, "contexts": [lambda: noted(model)]}
    sampler = Policy(model, None, {500}, 110, "float32", 0.0, **how)
    groups = sampler.stream(prompts, seed=0, group_size=2, **settings)
    next(groups)
    assert_as_before(model, before)
    assert [len(merged.layers) for merged in copies] == [2 * 7]
    if end == "exhausted":
        assert len(list(groups)) == 2
    elif end == "closed":
        groups.close()
    elif end == "an error":
        monkeypatch.setattr(torch, "isin", None)
        with pytest.raises(TypeError):
            list(groups)
    assert_as_before(model, before)
    del groups
    gc.collect()
    assert not copies
