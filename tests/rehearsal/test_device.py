"""The pretended GPU itself: it computes, it refuses what CUDA refuses, it counts."""

import copy
import io

import pytest
import torch

from grpo.sampling.decoders.cuda_graph import record
from rehearsal.cuda import CUDAGraph
from rehearsal.events import counted


def on_gpu(*numbers):
    return torch.tensor(numbers, device="cuda")


# --- Tensors ------------------------------------------------------------------------------
def test_a_tensor_says_that_it_is_on_the_gpu_and_has_its_values():
    x = torch.arange(6.0).view(2, 3).to("cuda")
    assert x.is_cuda and x.device == torch.device("cuda:0") and (x + 1).device == x.device
    assert torch.zeros(2, device="cuda").is_cuda and torch.zeros_like(x, device="cpu").is_cpu
    assert x.mT.is_cuda and x.mT.stride() == (1, 3) and x[1:].storage_offset() == 3
    x[1:] += 10  # a view is the same memory
    assert x.tolist() == [[0, 1, 2], [13, 14, 15]] and x.cpu().is_cpu
    y = torch.zeros(2, 1, device="cuda").squeeze_(1)
    assert y.shape == (2,) and y.resize_(4).shape == y.cpu().shape == (4,)
    assert x[:, [2, 0]].tolist() == [[2, 0], [15, 13]]
    assert torch.equal(copy.deepcopy(x), x)
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    assert torch.load(file, weights_only=False).is_cuda


def test_gradients_and_tied_parameters_are_those_of_the_cpu():
    def gradients(device):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
        model[1].weight = model[0].weight
        model.to(device)
        assert model[1].weight is model[0].weight
        x = torch.arange(6.0).view(2, 3).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
        for _ in range(2):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
        return [p.grad.cpu() for p in model.parameters()] + [p.cpu() for p in model.parameters()]

    for a, b in zip(gradients("cuda"), gradients("cpu"), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_a_generator_of_the_gpu_draws_what_its_seed_says():
    def drawn():
        generator = torch.Generator("cuda").manual_seed(3)
        return [torch.rand(2, device="cuda", generator=generator).tolist() for _ in range(2)]

    first, second = drawn()
    assert first != second and drawn() == [first, second]


# --- What CUDA refuses --------------------------------------------------------------------
MISUSES = {
    "a sum": lambda x: x + torch.ones(3),
    "an assignment": lambda x: torch.ones(3).add_(x),
    "cat": lambda x: torch.cat([x, torch.ones(3)]),
    "a product": lambda x: torch.ones(3, 3) @ x,
    "an index of the GPU into the CPU": lambda x: torch.ones(3)[x.long()],
    "attention": lambda x: torch.nn.functional.scaled_dot_product_attention(
        x.view(1, 3, 1), torch.ones(1, 3, 1), x.view(1, 3, 1)
    ),
    "a generator": lambda x: x.uniform_(generator=torch.Generator()),
    "NumPy": lambda x: x.numpy(),
    "a product of integers": lambda x: x.long().view(1, 3) @ x.long(),
    "a kernel of the CPU": lambda x: torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *[x.view(1, 1, 3, 1)] * 3
    ),
    "a collective": lambda x: torch.ops.c10d.allreduce_([x.cpu()], None, None, None, False),
}


@pytest.mark.parametrize("misuse", MISUSES)
def test_what_cuda_refuses_raises(misuse):
    with pytest.raises((RuntimeError, TypeError)):
        MISUSES[misuse](torch.ones(3, device="cuda"))


def test_what_cuda_takes_does_not_raise():
    x = on_gpu(1.0, 2.0, 3.0)
    assert (x * torch.tensor(2.0)).tolist() == [2, 4, 6]  # a scalar of the CPU
    assert x[torch.tensor([2, 0])].tolist() == [3, 1]  # an index of the CPU
    x[torch.tensor([True, False, True]).cuda()] = 0.0
    assert x.tolist() == [0, 2, 0] and torch.where(x > 1, x, 9.0).tolist() == [9, 2, 9]


# --- What is counted ----------------------------------------------------------------------
WAITS = {  # how often
    "item": (1, lambda x: x.sum().item()),
    "bool": (1, lambda x: bool((x > 0).all())),
    "tolist": (1, lambda x: x.tolist()),
    "cpu": (1, lambda x: x.cpu()),
    "numbers": (1, lambda x: torch.tensor([1, 2], device="cuda")),
    "a list as index": (1, lambda x: x[[0, 1]]),
    "nonzero": (1, lambda x: x.nonzero()),
    "a mask as index": (1, lambda x: x[x > 0]),
    "filling by a mask": (0, lambda x: x.masked_fill_(x > 0, 1.0)),
    "repeat_interleave": (1, lambda x: x.repeat_interleave(x.long())),
    "repeat_interleave by a number": (0, lambda x: x.repeat_interleave(2)),
    "isin of few": (0, lambda x: torch.isin(x, x)),
    "isin of many": (1, lambda x: torch.isin(x, x.repeat(9))),
    "synchronize": (1, lambda x: torch.cuda.synchronize()),
    "an asynchronous copy": (0, lambda x: x.copy_(torch.ones(3), non_blocking=True)),
    "arithmetic": (0, lambda x: (x @ x.view(3, 1)).exp().add_(1).argmax()),
}


@pytest.mark.parametrize("what", WAITS)
def test_waits_are_counted_by_their_line(what):
    times, function = WAITS[what]
    x = on_gpu(1.0, 2.0, 3.0)
    with counted() as counts:
        function(x)
    assert counts.waits.total() == times, counts
    assert all("at tests/rehearsal/test_device.py:" in place for place in counts.waits)


def test_launches_are_counted_but_not_views_and_allocations():
    x = on_gpu(1.0, 2.0, 3.0, 4.0)
    with counted() as counts:
        y = x.view(2, 2).mT[0]
        torch.empty_like(x)
    assert not counts.launches
    with counted() as counts:
        (y * 2).exp_()
        torch.zeros(3, device="cuda")
    assert counts.launches == {"mul": 1, "exp_": 1, "zeros": 1}


# --- Graphs -------------------------------------------------------------------------------
def test_a_graph_computes_again_on_the_memory_that_it_was_recorded_with():
    x, total = on_gpu(1.0, 2.0), on_gpu(0.0)

    def step():
        total.add_(x.sum())
        return x * 2

    replay, out = record(step)
    assert CUDAGraph.recorded == 3 and out.isnan().all() and total.item() == 0  # nothing has run
    replay()
    assert out.tolist() == [2, 4] and total.item() == 3
    x.copy_(on_gpu(5.0, 6.0))
    replay()
    assert out.tolist() == [10, 12] and total.item() == 14


@pytest.mark.parametrize("wait", ["item", "numbers", "cpu", "nonzero", "synchronize"])
def test_the_debug_mode_and_a_graph_refuse_what_waits(wait):
    x, function = on_gpu(1.0, 2.0, 3.0), WAITS[wait][1]
    with pytest.raises(RuntimeError, match="when stream is capturing"):
        record(lambda: function(x))
    if wait != "synchronize":
        torch.cuda.set_sync_debug_mode("error")
        try:
            with pytest.raises(RuntimeError, match="synchronizing"):
                function(x)
        finally:
            torch.cuda.set_sync_debug_mode(0)
    assert x.sum().item() == 6 and torch.cuda.get_sync_debug_mode() == 0  # both have ended
