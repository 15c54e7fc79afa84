"""Attention of a few queries to many keys, and the log of each query's sum of exponentials.

shared_prompt.py needs the sums to join parts of one softmax. PyTorch has a kernel for CPUs and one
for GPUs that return both. Soft-capped scores, and inputs that these kernels do not take, are
computed `in_pieces`, by some ten operations.

Symbols: B batch, K key-value heads, Q queries of each, C keys, D width of a head.
"""

import functools

import torch

from grpo.devices import is_nvidia
from grpo.log import say

ALIGNED = 8  # elements: a mask's rows must begin at multiples of 16 bytes


def mask_of(where, like):
    """Returns a mask to add to scores: -inf where `where` is True, else 0. It has the dtype of
    `like`, the shape of `where`, and rows that are aligned for the kernel."""
    columns = where.shape[-1]
    rows = like.new_zeros(*where.shape[:-1], -(-columns // ALIGNED) * ALIGNED)
    return rows[..., :columns].masked_fill_(where, -torch.inf)


def attend(query, keys, values, mask, scaling, softcap):
    """Returns the attention of queries (B, K, Q, D) to (B, K, C, D), and the log of the sum of
    exponentials, (B, K, Q). `mask` is None or made by mask_of: (B, 1, 1, C), added to scores."""
    if softcap is None and query.shape[-1] == values.shape[-1]:
        if query.device.type == "cpu":
            # scaled_dot_product_attention calls it too, but does not return the sums
            flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
            return flash(query.contiguous(), keys, values, attn_mask=mask, scale=scaling)
        kind = query.device, query.dtype, query.shape[-1]
        if is_nvidia(query.device) and kernel_works(*kind):
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


# --- Whether there is a kernel ------------------------------------------------------
@functools.cache
@torch.no_grad()
def kernel_works(device, dtype, width):
    """Returns whether in_one_kernel takes heads of this width and agrees with in_pieces in float32.
    It is tried once, before anything is recorded. If it fails, logs why; then in_pieces is used."""
    reason, limit, scaling = None, 1e-4 if dtype == torch.float32 else 1e-2, width**-0.5
    try:
        for case in trial(device, dtype, width):
            exact = in_pieces(*(None if x is None else x.float() for x in case), scaling, None)
            pairs = zip(in_one_kernel(*case, scaling), exact, strict=True)
            gap = max((found - due).abs().max().item() for found, due in pairs)
            if not gap < limit:
                reason = f"is {gap:.1g} off"
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001 (no kernel for this GPU or width: anything is raised)
        reason = f"fails ({type(error).__name__})"
    if reason:
        of = f"{str(dtype).removeprefix('torch.')} and heads of {width}"
        say(f"attention is computed in pieces, which is slower: its kernel for {of} {reason}")
    return not reason


def trial(device, dtype, width):
    """Yields (query, keys, values, mask) as decoders use them: few and many queries, a part of the
    allocated columns, without a mask and with whole blocks of keys masked."""

    def numbers(first, count):
        size = (2, 3, count, width)
        return (first + torch.arange(2 * 3 * count * width, device=device)).sin().view(size)

    query, keys, values = (numbers(i, 256).to(dtype) for i in range(3))
    keys, values = keys[:, :, :203], values[:, :, :203]
    column = torch.arange(203, device=device)
    unseen = torch.stack([column < 150, column > 7]).view(2, 1, 1, 203)
    for count, mask in ((7, None), (7, mask_of(unseen, keys)), (70, mask_of(unseen, keys))):
        yield query[:, :, :count], keys, values, mask
