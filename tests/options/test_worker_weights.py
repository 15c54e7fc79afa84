"""Weights that travel: those that do not fit change nothing."""

import pytest
import torch
from families import tiny_model

from grpo.options.worker_weights import load_weights, trained_weights


def test_weights_that_do_not_fit_change_nothing():
    model, good = tiny_model("qwen2"), trained_weights(tiny_model("qwen2", seed=1))
    name, before = "model.layers.1.mlp.up_proj.weight", trained_weights(model)
    for bad, reason in (
        ({k: v for k, v in good.items() if k != name}, "another MODEL or LORA_RANK"),
        (good | {"extra.weight": torch.zeros(1)}, "extra.weight"),
        (good | {name: good[name][:-1]}, f"{name} is .63, 32., expected .64, 32."),
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
    with pytest.raises(ValueError, match="another MODEL"):
        load_weights(model, {})
