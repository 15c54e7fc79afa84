"""Attention of a few queries to many keys, and the log of each query's sum of exponentials.

shared_prompt.py needs the sums to join parts of one softmax. PyTorch's kernel for CPUs returns
both; options/any_attention.py has what it does not take.

Symbols: B batch, K key-value heads, Q queries of each, C keys, D width of a head.
"""

import torch

ALIGNED = 8  # elements: heads and a mask's rows must begin at multiples of 16 bytes


def mask_of(where, like):
    """Returns a mask to add to scores: -inf where `where` is True, else 0. It has the dtype of
    `like`, the shape of `where`, and rows that are aligned for the kernel."""
    columns = where.shape[-1]
    rows = like.new_zeros(*where.shape[:-1], -(-columns // ALIGNED) * ALIGNED)
    return rows[..., :columns].masked_fill_(where, -torch.inf)


def attend(query, keys, values, mask, scaling):
    """Returns the attention of queries (B, K, Q, D) to (B, K, C, D), and the log of the sum of
    exponentials, (B, K, Q). `mask` is None or made by mask_of: (B, 1, 1, C), added to scores."""
    # scaled_dot_product_attention calls it too, but does not return the sums
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return flash(query.contiguous(), keys, values, attn_mask=mask, scale=scaling)
