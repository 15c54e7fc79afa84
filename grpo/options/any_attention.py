"""GPUs, and transformers' layers: `attend` for any device, soft-capped scores and values of another
width than keys. PyTorch has a kernel for GPUs, too, that returns the sums. What neither kernel
takes is computed `in_pieces`, by some ten operations."""

import torch

from grpo.decode_attention import ALIGNED, attend
from grpo.devices import is_nvidia


def attend_any(query, keys, values, mask, scaling, softcap=None):
    """Returns the same as `attend`."""
    if softcap is None and query.shape[-1] == values.shape[-1]:
        if query.device.type == "cpu":
            return attend(query, keys, values, mask, scaling)
        if is_nvidia(query.device) and query.shape[-1] % ALIGNED == 0:
            return in_one_kernel(query, keys, values, mask, scaling)
    return in_pieces(query, keys, values, mask, scaling, softcap)


def in_one_kernel(query, keys, values, mask, scaling):
    """Returns the same as `attend`, by the kernel that scaled_dot_product_attention uses on a GPU
    if there is a mask (CUTLASS's, not cuDNN's). It takes any strides that are multiples of 16
    bytes, also 0. Its scores are float32. Without dropout a CUDA graph can record it."""
    if mask is not None:
        mask = mask.expand(*query.shape[:3], -1)
    kernel = torch.ops.aten._scaled_dot_product_efficient_attention
    out, log_sums, _, _ = kernel(query, keys, values, mask, True, scale=scaling)
    return out, log_sums[..., : query.shape[2]]  # which the kernel pads to a multiple of 32


def in_pieces(query, keys, values, mask, scaling, softcap):
    # Scores are float32, as in PyTorch's kernels: in bfloat16 a score of 30 is off by 0.1
    if is_nvidia(query.device) and query.dtype != torch.float32:
        flat = query.flatten(0, 1), keys.flatten(0, 1).transpose(1, 2)
        scores = torch.bmm(*flat, torch.float32).unflatten(0, query.shape[:2])
    else:
        scores = (query @ keys.transpose(-1, -2)).float()
    scores *= scaling
    if softcap is not None:  # Gemma 2, 2408.00118
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores += mask
    top = scores.amax(-1, keepdim=True)
    exps = scores.sub_(top).exp_()
    sums = exps.sum(-1, keepdim=True)
    return (exps / sums).to(values.dtype) @ values, (top + sums.log()).squeeze(-1)
