"""The simulated GPU itself: it refuses what CUDA refuses. The other files show with models that it
computes what a CPU does, and with their bounds that it counts waits."""

import pytest
import torch

# --- What CUDA refuses --------------------------------------------------------------------
MISUSES = {
    "a sum": lambda x: x + torch.ones(3),
    "an index of the GPU into the CPU": lambda x: torch.ones(3)[x.long()],
    "attention": lambda x: torch.nn.functional.scaled_dot_product_attention(
        x.view(1, 3, 1), torch.ones(1, 3, 1), x.view(1, 3, 1)
    ),
    "a generator": lambda x: x.uniform_(generator=torch.Generator()),
    "NumPy": lambda x: x.numpy(),
    "a collective": lambda x: torch.ops.c10d.allreduce_([x.cpu()], None, None, None, False),
}


@pytest.mark.parametrize("misuse", MISUSES)
def test_what_cuda_refuses_raises(misuse):
    with pytest.raises((RuntimeError, TypeError)):
        MISUSES[misuse](torch.ones(3, device="cuda"))
