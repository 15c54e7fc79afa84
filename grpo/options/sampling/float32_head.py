"""bfloat16 models: the sampler's logits are float32, products of the same bfloat16 weights.

Why. A logit of 20 is off by up to 0.06 if it is rounded to bfloat16, and with it the log-prob that
is trained on. Once a policy is sure of its answers, that looks like a sampler at 1.04 times the
temperature, and check_sampler ends the run (seen with SmolLM2-135M). The loss and the reference
compute float32 logits from the hidden states, too (grpo/chunked.py).
"""

import functools

import torch
from torch.nn.functional import linear

from grpo.devices import is_nvidia
from grpo.forward import has_plain_head


def give_float32_head(model):
    """Makes the model's logits float32 if they are a plain product of its head. Other models train
    on these logits, and torch has no gradient of the product on a GPU."""
    head = model.get_output_embeddings()
    if has_plain_head(model):
        head.forward = functools.partial(float32_logits, head)


def float32_logits(head, hidden):
    """Returns logits (..., V') in float32. On NVIDIA's GPUs this is one product; elsewhere torch
    has no such product, and converts the factors."""
    if is_nvidia(hidden.device):
        rows = hidden.flatten(0, -2)[None]
        return torch.bmm(rows, head.weight.T[None], torch.float32).view(*hidden.shape[:-1], -1)
    weight = getattr(head, "float32_weight", None)
    weight = head.weight.float() if weight is None else weight
    return linear(hidden.float(), weight)


class ConvertedHead:
    """Inside `with`, float32_logits finds the head's weight converted, once for many tokens. The
    weights must not change while the object is used."""

    def __init__(self, model):
        self.head = model.get_output_embeddings()
        needed = "forward" in getattr(self.head, "__dict__", ()) and not is_nvidia(model.device)
        self.weight = self.head.weight.detach().float() if needed else None

    def __enter__(self):
        if self.head is not None:
            self.head.float32_weight = self.weight

    def __exit__(self, *_):
        if self.head is not None:
            del self.head.float32_weight
