"""What only a real card can show (pytest -m gpu): the CPU's gradient, and the computed memory.

With it go test_bfloat16.py's runs, and test_loss_triton.py's kernels against torch's code."""

import copy
import functools

import pytest
import torch
from fakes import a_recipe
from families import tiny_model
from test_sizes import memory, random_policy, train_longest

import grpo_ref_split as trainer
from grpo import rehearsal
from grpo.bfloat16 import float32_logits
from grpo.chunked import linear_logps
from grpo.forward import CompletionModel
from grpo.sample import Group, Sample

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]


def gradient_of(model, fused, checkpointing):
    """-> the gradient (all parameters) of a micro-batch's loss, float64 on the CPU."""
    ours = CompletionModel(copy.deepcopy(model), gradient_checkpointing=checkpointing)
    assert ours.packs, ours.notes
    draw, batch = torch.Generator().manual_seed(0), []
    for prompt, length in [([5, 6, 7, 8, 9], 1 + 2 * i) for i in range(4)] + [([3, 4], 9)]:
        numbers = lambda length=length: (torch.rand(length, generator=draw) - 5).tolist()
        ids = torch.randint(100, (length,), generator=draw).tolist()
        more = {"ref_logps": numbers(), "advantage": 1.0 - 0.5 * length % 3, "weight": 0.1}
        batch += Group(0, None, prompt, [Sample(ids, numbers(), **more)]).samples
    hidden, ids = ours([s.group.prompt for s in batch], [s.ids for s in batch])
    c = a_recipe(FUSED_LOSS=fused, KL_BETA=0.04).c
    trainer.batch_loss(c, hidden, ours.head, ids, batch, 110)[0].backward()
    return torch.cat([p.grad.flatten().double().cpu() for p in ours.parameters()])


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("family, checkpointing", [("qwen2", True), ("gpt2", False)])
def test_the_gradient_is_the_cpus(family, checkpointing, fused):
    model = tiny_model(family)
    exact = gradient_of(model, False, checkpointing)
    gap = lambda found: ((found - exact).norm() / exact.norm()).item()
    assert gap(gradient_of(model.cuda(), fused, checkpointing)) < 3e-5
    rounded = tiny_model(family).bfloat16()
    limit = 2 * gap(gradient_of(rounded, False, checkpointing))  # the CPU's rounding
    assert gap(gradient_of(rounded.cuda(), fused, checkpointing)) < limit


@torch.no_grad()
def test_log_probs_of_sampler_and_reference_are_not_rounded_to_bfloat16():
    draw = torch.Generator("cuda").manual_seed(0)
    like = {"generator": draw, "device": "cuda", "dtype": torch.bfloat16}
    head = torch.nn.Linear(64, 1000, bias=False, dtype=torch.bfloat16, device="cuda")
    head.weight.copy_(torch.randn(1000, 64, **like))  # logits of some 8, as a real model's
    hidden, ids = torch.randn(32, 64, **like), torch.arange(32, device="cuda")
    exact = (hidden.double() @ head.weight.T.double()).log_softmax(-1)
    exact = exact.gather(1, ids[:, None]).squeeze(1)
    sampled = float32_logits(head, hidden)
    assert sampled.dtype == torch.float32
    sampled = sampled.log_softmax(-1).gather(1, ids[:, None]).squeeze(1)
    for found in (sampled, linear_logps(hidden, head.weight, ids)):
        assert (found - exact).abs().max() < 1e-4  # rounded logits: 0.03


@pytest.mark.parametrize("rank, checkpointing", [(0, True), (8, False)])
def test_memory_is_as_computed(rank, checkpointing):
    """Of tensors: without the optimizer and what DeepSpeed adds."""
    config = memory.config_of(*memory.MODELS["Qwen2.5-0.5B"][:7])
    m, policy = memory.Sizes(config, rank), random_policy(config, rank)
    policy.model.cuda()
    sizes = {"SAMPLE_BATCH": 64, "MICRO_BATCH_TOKENS": 4096, "LORA_RANK": rank}
    c = memory.shipped(256, 256, **sizes, GRADIENT_CHECKPOINTING=checkpointing)
    model = CompletionModel(policy.model, gradient_checkpointing=checkpointing)
    phases, measured = memory.phases_with(m, c, 1), {}
    waves = functools.partial(rehearsal.sample_longest, c, policy, 64, 256, False)
    for name, run in {"evaluation": waves, "loss": lambda: train_longest(c, policy, model)}.items():
        torch.cuda.reset_peak_memory_stats()
        run()
        measured[name] = torch.cuda.max_memory_allocated() - m.weights
    left_out = (*memory.STATES, "DeepSpeed's sums")
    sums = {n: sum(b for p, b in x.items() if p not in left_out) for n, x in phases.items()}
    waves = sums.pop("sampling"), sums.pop("evaluation")
    assert measured["evaluation"] == pytest.approx(max(waves), rel=0.2)
    assert measured["loss"] == pytest.approx(max(sums.values()), rel=0.2)
