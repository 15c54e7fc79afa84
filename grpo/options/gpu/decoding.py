"""GPUs: a decoder's attention in one kernel, and a draw that does not wait for the device."""

import torch


def in_one_kernel(query, keys, values, mask, scaling):
    """Returns the same as `attend`, by the kernel that scaled_dot_product_attention uses on a GPU
    if there is a mask (CUTLASS's, not cuDNN's). It takes any strides that are multiples of 16
    bytes, also 0. Its scores are float32."""
    if mask is not None:
        mask = mask.expand(*query.shape[:3], -1)
    kernel = torch.ops.aten._scaled_dot_product_efficient_attention
    out, log_sums, _, _ = kernel(query, keys, values, mask, True, scale=scaling)
    return out, log_sums[..., : query.shape[2]]  # which the kernel pads to a multiple of 32


def race(logits, generator):
    """Returns the same as `draw`, by an exponential race: with E_i ~ Exp(1), argmax p_i / E_i is i
    with probability p_i (the Gumbel-max trick, 1411.0030, as -log E_i is Gumbel). It takes three
    kernels after the softmax, whereas torch.multinomial waits for the device.
    """
    probs = torch.softmax(logits, dim=-1)  # (S, V)
    times = torch.empty_like(probs).exponential_(generator=generator)
    tokens = torch.div(probs, times, out=times).argmax(-1)  # NaN counts as the largest
    return tokens, probs.gather(1, tokens[:, None]).squeeze(1).log()
