"""The pretended GPU itself: it refuses what CUDA refuses, and counts waits. The other files show
with models that it computes what a CPU does."""

import pytest
import torch

from grpo.options.cuda_graph import record
from rehearsal.events import counted


def on_gpu(*numbers):
    return torch.tensor(numbers, device="cuda")


# --- What CUDA refuses --------------------------------------------------------------------
MISUSES = {
    "a sum": lambda x: x + torch.ones(3),
    "an index of the GPU into the CPU": lambda x: torch.ones(3)[x.long()],
    "attention": lambda x: torch.nn.functional.scaled_dot_product_attention(
        x.view(1, 3, 1), torch.ones(1, 3, 1), x.view(1, 3, 1)
    ),
    "a generator": lambda x: x.uniform_(generator=torch.Generator()),
    "NumPy": lambda x: x.numpy(),
    "a kernel of the CPU": lambda x: torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *[x.view(1, 1, 3, 1)] * 3
    ),
    "a wait in a recording": lambda x: record(x.sum().item),
    "a collective": lambda x: torch.ops.c10d.allreduce_([x.cpu()], None, None, None, False),
}


@pytest.mark.parametrize("misuse", MISUSES)
def test_what_cuda_refuses_raises(misuse):
    with pytest.raises((RuntimeError, TypeError)):
        MISUSES[misuse](torch.ones(3, device="cuda"))


# --- What is counted ----------------------------------------------------------------------
WAITS = {  # how often
    "item": (1, lambda x: x.sum().item()),
    "tolist": (1, lambda x: x.tolist()),
    "numbers": (1, lambda x: torch.tensor([1, 2], device="cuda")),
    "a list as index": (1, lambda x: x[[0, 1]]),
    "nonzero": (1, lambda x: x.nonzero()),
    "a mask as index": (1, lambda x: x[x > 0]),
    "repeat_interleave": (1, lambda x: x.repeat_interleave(x.long())),
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
    assert counts.total() == times, counts
    assert all("at tests/rehearsal/test_device.py:" in place for place in counts)


# --- Graphs -------------------------------------------------------------------------------
def test_a_graph_computes_again_on_the_memory_that_it_was_recorded_with():
    x, total = on_gpu(1.0, 2.0), on_gpu(0.0)

    def step():
        total.add_(x.sum())
        return x * 2

    replay, out = record(step)
    assert out.isnan().all() and total.item() == 0  # nothing has run
    x.copy_(on_gpu(5.0, 6.0))
    replay()
    assert out.tolist() == [10, 12] and total.item() == 11
