"""bfloat16 models: weights are rounded at random, and the sampler's logits are float32.

Weights. Adam moves a master weight by about LEARNING_RATE in an update. bfloat16 numbers have 8
significant bits: near 0.1 they are 5e-4 apart. MODEL's weights are such numbers, so an update of
1e-6 leaves the nearest one where it was, and so do hundreds more in the same direction. The policy
hardly moves, and no check notices, because sampler, trainer and workers share its weights.

So a float32 master w between the neighbors a < b becomes b with the probability (w - a) / (b - a),
and its mean is w (stochastic rounding, 1502.02551; of bfloat16 weights: 2010.06192). An update of
1e-6 then changes 1% of the weights, which together move as far as the masters; rounded to the
nearest they move 0.5% of that (experiments/rounding.py moved, SmolLM2-135M).

Deviation: a weight's random number does not change from step to step. It is a hash of SEED and of
the weight's place in the row of all trained weights. So a weight changes only when its master has
passed its threshold, and the policy that the next update sees has no fresh noise. A run that
resumes gives its model the same bits. MODEL itself does not change, as its weights need no
rounding.

Logits. A logit of 20 is off by up to 0.06 if it is rounded to bfloat16, and with it the log-prob
that is trained. Once a policy is sure of its answers, that looks like a sampler at 1.04 times the
temperature, and check_sampler ends the run (seen with SmolLM2-135M). The loss and the reference
compute float32 logits from the hidden states, too (grpo/chunked.py).
"""

import functools

import torch
from torch.nn.functional import linear

from grpo.devices import is_nvidia
from grpo.forward import has_plain_head
from grpo.rollout import seed_of

BLOCK = 1 << 20  # weights that are rounded at once; the hash counts places within a block


# --- Rounded at random ----------------------------------------------------------------
def blocks(place, size):
    """Yields (first, end) of parts of `size` weights that do not cross a block's border; the first
    weight has this place.

    >>> BLOCK, list(blocks(BLOCK - 3, 5))
    (1048576, [(0, 3), (3, 5)])
    """
    first = 0
    while first < size:
        end = min(size, first + BLOCK - (place + first) % BLOCK)
        yield first, end
        first = end


def rounded_to(dtype, weights):
    """Returns a float32 tensor in `dtype`: in bfloat16 at random, by the places of its entries, in
    others rounded to the nearest number."""
    if dtype != torch.bfloat16:
        return weights.to(dtype)
    flat = weights.flatten()
    parts = [rounded(flat[first:end], first, seed=0) for first, end in blocks(0, len(flat))]
    return torch.cat(parts).view_as(weights)


def rounded(weights, place, seed):
    """Returns float32 weights (N,) of one block, the first of which has this place, as bfloat16.

    A bfloat16 is the upper half of a float32. We add a random number of 16 bits to the lower half,
    which carries over with the probability that the lower half stands for, and cut it off.
    """
    bits = weights.view(torch.int32) + noise(place, len(weights), seed, weights.device)
    cut = (bits & -0x10000).view(torch.float32)
    return torch.where(
        weights.isnan(), weights, cut
    ).bfloat16()  # NaN + noise might wrap around to 0


def noise(place, count, seed, device):
    """Returns random numbers from 0 to 65 535 of `count` places of one block, int32 (count,).

    The hash is lowbias32 (github.com/skeeto/hash-prospector), with shifts that keep the sign. It
    takes half the time of torch.randint on a CPU, and gives the same numbers on every device.
    """
    block, first = divmod(place, BLOCK)
    x = torch.arange(first, first + count, dtype=torch.int32, device=device)
    x *= 0x9E3779B1 - 2**32
    x ^= seed_of(seed, block) % 2**32 - 2**31
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B - 2**32)):
        x ^= x >> shift
        x *= factor
    return (x >> 16).bitwise_and_(0xFFFF)


# --- The sampler's logits --------------------------------------------------------------
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
