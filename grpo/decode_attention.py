"""Attention of a few queries to many keys, and the log of each query's sum of exponentials.

shared_prompt.py needs the sums to join parts of one softmax. PyTorch has kernels that return them,
for CPUs and for NVIDIA's GPUs. What neither takes is computed `in_pieces`, by some ten operations.

Symbols: B batch, K key-value heads, Q queries of each, C keys, D width of a head.
"""

import torch

from grpo.devices import is_nvidia

ALIGNED = 8  # elements: heads and a mask's rows must begin at multiples of 16 bytes


def mask_of(where, like):
    """Returns a mask to add to scores: -inf where `where` is True, else 0. It has the dtype of
    `like`, the shape of `where`, and rows that are aligned for the kernel."""
    columns = where.shape[-1]
    rows = like.new_zeros(*where.shape[:-1], -(-columns // ALIGNED) * ALIGNED)
    return rows[..., :columns].masked_fill_(where, -torch.inf)


def attend(query, keys, values, mask, scaling, softcap=None):
    """Returns the attention of queries (B, K, Q, D) to (B, K, C, D), and the log of the sum of
    exponentials, (B, K, Q). `mask` is None or made by mask_of: (B, 1, 1, C), added to scores. The
    width of values may be another one."""
    if softcap is None and query.shape[-1] == values.shape[-1]:
        if query.device.type == "cpu":
            # scaled_dot_product_attention calls it too, but does not return the sums
            flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
            return flash(query.contiguous(), keys, values, attn_mask=mask, scale=scaling)
        if is_nvidia(query.device) and query.shape[-1] % ALIGNED == 0:
            from grpo.options.gpu.decoding import in_one_kernel

            return in_one_kernel(query, keys, values, mask, scaling)
    return in_pieces(query, keys, values, mask, scaling, softcap)


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
