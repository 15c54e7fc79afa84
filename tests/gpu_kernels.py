"""Kernels for GPUs, on a CPU: what _scaled_dot_product_efficient_attention and varlen_attn refuse
and return.

By PyTorch 2.13's kernel_forward.h (check_supported, kAlignLSE, TileSmemLoader), cutlassF.h and
_efficient_attention_forward in attention.cu, for GPUs from sm80 on.
"""

import contextlib
from itertools import pairwise

import torch
from torch.nn.functional import scaled_dot_product_attention as attention_of_torch


@contextlib.contextmanager
def registered(kernel):
    """PyTorch takes `kernel` for CPU tensors, and counts it as one operation."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_scaled_dot_product_efficient_attention", kernel, "CPU")
    try:
        yield
    finally:
        library._destroy()


def efficient_attention(
    query, key, value, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, *, scale=None
):
    assert compute_log_sumexp and not dropout_p and not is_causal
    batch, heads, queries, _ = query.shape
    for x in (query, key, value):
        assert x.dim() == 4 and x.shape[:2] == (batch, heads) and x.dtype == query.dtype
        check_aligned(x)
    scores = query.float() @ key.float().mT * scale
    if attn_bias is not None:
        assert attn_bias.shape == scores.shape, "attn_bias: wrong shape"
        assert attn_bias.dtype == query.dtype, "invalid dtype for bias"
        check_aligned(attn_bias)
        check_read_in_full(attn_bias)
        scores += attn_bias.float()
    log_sums = scores.new_full((batch, heads, -(-queries // 32) * 32), torch.inf)
    log_sums[..., :queries] = scores.logsumexp(-1)
    out = (scores.softmax(-1) @ value.float()).to(query.dtype)
    out = out.transpose(1, 2).contiguous().transpose(1, 2)  # (B, Q, K, D) in memory
    return out, log_sums, torch.empty(()), torch.empty(())


def check_aligned(x):
    """Loads are of 16 bytes."""
    elements = 16 // x.element_size()
    assert x.stride(-1) == 1 and x.data_ptr() % 16 == 0, "not correctly aligned"
    strides = [step for step, n in zip(x.stride()[:-1], x.shape[:-1], strict=True) if n > 1]
    assert not any(step % elements for step in strides), f"strides {strides} are not aligned"


def check_read_in_full(bias):
    """Also behind the last column, up to the next 16 bytes: the tensor's memory must go so far."""
    elements = 16 // bias.element_size()
    columns = -(-bias.shape[-1] // elements) * elements
    last = sum(step * (n - 1) for step, n in zip(bias.stride()[:-1], bias.shape[:-1], strict=True))
    end = bias.storage_offset() + last + columns
    assert end * bias.element_size() <= bias.untyped_storage().nbytes(), "read beyond its memory"


def varlen_parts(query, key, value, ends, others, scale, window, aligned="end"):
    """Returns (tokens, heads, width): FlashAttention's variable-length attention, part by part.
    `aligned` "start" has a causal mask's corner at a part's first key: a kernel that is wrong."""
    parts = []
    for (begin, end), (first, last) in zip(pairwise(ends), pairwise(others), strict=True):
        q, k, v = (
            x.transpose(0, 1)[None] for x in (query[begin:end], key[first:last], value[first:last])
        )
        place = torch.arange(end - begin)[:, None]
        if aligned == "end":
            place = place + (last - first) - (end - begin)
        seen = torch.arange(last - first) <= place
        if window[0] >= 0:
            seen &= torch.arange(last - first) >= place - window[0]
        out = attention_of_torch(q, k, v, seen, scale=scale, enable_gqa=True)
        parts.append(out[0].transpose(0, 1))
    return torch.cat(parts)


class Varlen(torch.autograd.Function):
    """Keeps what the kernel keeps: its inputs, its output, and the log-sum of each head's query."""

    @staticmethod
    def forward(ctx, query, key, value, settings):
        with torch.no_grad():
            out = varlen_parts(query, key, value, *settings)
        ctx.settings = settings
        ctx.save_for_backward(
            query, key, value, out, query.new_zeros(query.shape[:2], dtype=torch.float32)
        )
        return out

    @staticmethod
    def backward(ctx, grad):
        inputs = [x.detach().requires_grad_() for x in ctx.saved_tensors[:3]]
        with torch.enable_grad():
            out = varlen_parts(*inputs, *ctx.settings)
        return *torch.autograd.grad(out, inputs, grad), None


def varlen_attn(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *,
    scale=None, window_size=(-1, -1), enable_gqa=False, aligned="end",
):  # fmt: skip
    """torch.nn.attention.varlen.varlen_attn of torch 2.13, and what FlashAttention 2 refuses."""
    assert enable_gqa and window_size[1] == 0
    assert query.dtype == key.dtype == value.dtype == torch.bfloat16, "FlashAttention takes 16 bits"
    assert query.shape[2] == key.shape[2] == value.shape[2] <= 256 and not query.shape[2] % 8
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    ends, others = cu_seq_q.tolist(), cu_seq_k.tolist()
    assert (ends[0], ends[-1]) == (0, len(query)) and (others[0], others[-1]) == (0, len(key))
    for sizes, longest in ((ends, max_q), (others, max_k)):
        assert max(b - a for a, b in pairwise(sizes)) == longest
    for x in (query, key, value):
        assert x.stride(-1) == 1
    return Varlen.apply(query, key, value, (ends, others, scale, window_size, aligned))
