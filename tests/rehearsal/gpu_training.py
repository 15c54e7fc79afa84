"""Forward, loss and backward on the simulated GPU: losses and gradients are the CPU's."""

import pytest
import torch
from families import tiny_model
from oracle import VARIANTS, error, make, run

from grpo import chunked
from grpo import loss as plain_loss
from grpo.forward import CompletionModel

# Float32, over families, ways and losses; measured: 7e-6 relative at most
TOLERANCE = 3e-5
PROMPTS = [[5, 6, 7, 8, 9]] * 3 + [[3, 4, 5]] * 3
COMPLETIONS = [[i + 10] * (1 + 2 * i) for i in range(6)]
LOSSES = {"fused": chunked, "plain": plain_loss}
CLIP = {"clip_low": 0.2, "clip_high": 0.3, "kl_beta": 0.04}


def draw(size, seed):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def loss_of(module, hidden, head, ids):
    """Returns the loss of tokens with made-up log-probs of reference and sampler."""
    size, device = len(ids), ids.device
    ref, sampler = (0.3 * draw(size, seed).to(device) - 3 for seed in (2, 3))
    weights = (draw(size, 5) > -1).float().to(device) / size  # some tokens are masked
    given = None, ref, draw(size, 4).to(device), weights
    logps = module.linear_logps(hidden, head, ids, vocab_size=110)
    return plain_loss.policy_loss(logps, *given, **CLIP, sampler_logps=sampler, is_cap=2.0)


def trained(device, family, module, *, packs, checkpointing):
    """Returns the loss, and the gradients by name, on the CPU."""
    model = tiny_model(family).to(device)
    completion = CompletionModel(model, gradient_checkpointing=checkpointing)
    assert completion.packs, completion.notes
    completion.packs = packs
    hidden, ids = completion(PROMPTS, COMPLETIONS)
    assert hidden.device == ids.device == model.device
    loss, _ = loss_of(module, hidden, completion.head, ids)
    loss.backward()
    return loss.item(), {name: p.grad.cpu() for name, p in model.named_parameters()}


def assert_close(found, expected):
    (loss, gradients), (loss_of_cpu, gradients_of_cpu) = found, expected
    assert loss == pytest.approx(loss_of_cpu, rel=TOLERANCE)
    for name, gradient in gradients_of_cpu.items():
        gap = (gradients[name] - gradient).norm()
        assert gap <= TOLERANCE * gradient.norm() + 1e-7, (name, gap)


@pytest.mark.parametrize("family, loss, packs, checkpointing", [
    ("qwen2", "fused", True, True),
    ("qwen2", "fused", True, False),
    ("qwen2", "fused", False, True),
    ("qwen2", "plain", False, False),
    ("qwen3", "plain", True, True),
    ("gemma2 wide", "fused", True, True),  # the states are the logits
    ("gpt2", "fused", True, False),
])  # fmt: skip
def test_gradients_are_those_of_the_cpu(family, loss, packs, checkpointing):
    way = {"packs": packs, "checkpointing": checkpointing}
    found, expected = (trained(d, family, LOSSES[loss], **way) for d in ("cuda", "cpu"))
    assert_close(found, expected)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_of_the_loss_has_the_cpus_gradient(variant):
    batch, settings = make(VARIANTS[variant])
    there = {name: t if t is None else t.to("cuda") for name, t in batch.items()}
    (found, stats), (expected, _) = (run(b, settings) for b in (there, batch))
    assert {x.device.type for x in stats.values()} == {"cuda"}
    for mine, theirs in zip(found, expected, strict=True):
        assert error(mine.cpu(), theirs) < TOLERANCE
