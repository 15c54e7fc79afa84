"""Weights that travel: those that do not fit change nothing; adapters are merged."""

import pytest
import torch
from fakes import move
from families import tiny_model

from grpo.sampling.policy import ALL
from grpo.weights import load_weights, merge_adapters, trained_weights


def test_weights_that_do_not_fit_change_nothing():
    model, good = tiny_model("qwen2"), trained_weights(tiny_model("qwen2", seed=1))
    name, before = "model.layers.1.mlp.up_proj.weight", trained_weights(model)
    for bad, reason in (
        ({k: v for k, v in good.items() if k != name}, "another model, or another LORA_RANK"),
        (good | {"extra.weight": torch.zeros(1)}, "extra.weight"),
        (good | {name: good[name][:-1]}, f"{name} is .63, 32., not .64, 32."),
    ):
        with pytest.raises(ValueError, match=reason):
            load_weights(model, bad)
        now = trained_weights(model)
        assert all(torch.equal(now[k], before[k]) for k in before)
    load_weights(model, good)
    assert all(torch.equal(v, good[k]) for k, v in trained_weights(model).items())


def test_a_frozen_model_takes_all_and_in_its_own_dtype():
    """The reference: nothing of it is trained. And a worker may be in bfloat16."""
    model, good = tiny_model("gpt2"), trained_weights(tiny_model("gpt2", seed=1))
    model.requires_grad_(False)
    model.bfloat16()
    load_weights(model, good)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, good[name].bfloat16()), name
    with pytest.raises(ValueError, match="another model"):
        load_weights(model, {})


def with_adapters(model, rank=4):
    from peft import LoraConfig

    model.add_adapter(LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=ALL))
    move(model, 0.1)  # B, too, which starts as 0
    return model


def test_adapters_travel_to_a_model_with_adapters():
    mine, theirs = (with_adapters(tiny_model("qwen2")) for _ in range(2))
    move(theirs, 0.1)
    ids = torch.tensor([[3, 4, 5, 6]])
    assert (mine(ids).logits - theirs(ids).logits).abs().max() > 0.1
    load_weights(mine, trained_weights(theirs))
    assert torch.equal(mine(ids).logits, theirs(ids).logits)
    with pytest.raises(ValueError, match="another LORA_RANK"):
        load_weights(mine, trained_weights(tiny_model("qwen2")))
    with pytest.raises(ValueError, match="is .2, 64., not .4, 64."):
        load_weights(mine, trained_weights(with_adapters(tiny_model("qwen2"), rank=2)))


@torch.no_grad()
@pytest.mark.parametrize("family", ["qwen2", "gpt2", "llama", "opt"])
def test_merged_adapters_compute_what_the_model_with_adapters_does(family):
    """W + 2 B A. GPT-2 has its matrices transposed, the square ones too."""
    ids, adapted = torch.tensor([[3, 4, 5, 6, 7, 8]]), with_adapters(tiny_model(family))
    expected = adapted(ids).logits
    base = tiny_model(family)
    assert (base(ids).logits - expected).abs().max() > 0.1
    tensors = trained_weights(adapted)
    merged = merge_adapters(base, tensors)
    load_weights(base, merged)
    # Measured: 6e-6 at most
    torch.testing.assert_close(base(ids).logits, expected, rtol=0, atol=5e-5)


def test_an_adapter_of_another_model_is_refused():
    with pytest.raises(ValueError, match="no layer model.layers.0.self_attn.q_proj"):
        merge_adapters(tiny_model("gpt2"), trained_weights(with_adapters(tiny_model("qwen2"))))


def test_adapters_from_a_file_are_merged_on_the_models_device():
    """A file is read to the CPU, and the reference may be on a GPU: "meta" stands for it."""
    tensors = trained_weights(with_adapters(tiny_model("qwen2")))
    merged = merge_adapters(tiny_model("qwen2").to("meta"), tensors)
    assert all(tensor.device.type == "meta" for tensor in merged.values())
