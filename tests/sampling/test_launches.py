"""How many kernels a decoded token launches, counted on a CPU; benchmarks/sampling.py has times.

A kernel is a dispatched operation that is neither a view nor an allocation. What a GPU has one
kernel for and a CPU takes apart (attention with its sums, RMS norm) is one operation here, too.
"""

from collections import Counter

import pytest
import torch
from families import tiny_model
from gpu_kernels import efficient_attention, registered
from torch.utils._python_dispatch import TorchDispatchMode

from grpo.sampling.decoders import llama, shared_prompt
from grpo.sampling.decoders.attention import in_one_kernel
from grpo.sampling.decoders.cuda_graph import GraphedDecoder

NO_KERNEL = {"empty", "new_empty", "empty_like", "_unsafe_view", "_reshape_alias", "lift_fresh"}


class Launches(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        views = any(r.alias_info and not r.alias_info.is_write for r in function._schema.returns)
        name = function.overloadpacket.__name__
        if not views and name not in NO_KERNEL:
            self.counts[name] += 1
        return function(*args, **kwargs or {})


def recorded_step(family, layers, prompts, kept):
    """Returns the Counter of a step as GraphedDecoder records it, in bfloat16."""
    model = tiny_model(family, num_hidden_layers=layers).bfloat16()
    decoder = GraphedDecoder(model, 20)
    decoder.admit(prompts, 4)
    tokens = torch.arange(4 * len(prompts)) + 3
    decoder.next_logits(tokens)
    decoder.keep(torch.tensor(kept))
    with Launches() as launches:
        decoder._forward(tokens[: len(kept)], decoder.decoder.columns)
    return launches.counts


@torch.no_grad()
@pytest.mark.parametrize("family", ["qwen2", "llama", "qwen3"])
@pytest.mark.parametrize("left", ["all", "some"])
def test_a_recorded_step_is_40_kernels_a_layer_at_most(family, left, monkeypatch):
    """Prompts of different length, groups that are whole or not. Measured: 31 to 37; 53 to 58 with
    attention in pieces."""
    prompts = [[5, 6, 7, 8], [5, 6], [1, 2, 3], [4]]
    kept = list(range(16)) if left == "all" else [0, 1, 2, 4, 5, 8, 9, 12]
    monkeypatch.setattr(shared_prompt, "attend", lambda *args: in_one_kernel(*args[:-1]))
    monkeypatch.setattr(llama, "rms_norm", lambda x, shape, weight, eps: x * weight)
    with registered(efficient_attention):
        few, more = (recorded_step(family, layers, prompts, kept) for layers in (2, 4))
    a_layer = (more - few).total() / 2
    assert more["_scaled_dot_product_efficient_attention"] == 8  # own tokens and the prompt's
    assert 20 < a_layer <= 40, {name: n / 2 for name, n in (more - few).items()}
    assert few.total() - 2 * a_layer < 25
