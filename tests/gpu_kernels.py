"""The kernel of _scaled_dot_product_efficient_attention, on a CPU: what it refuses and returns.

By PyTorch 2.13's kernel_forward.h (check_supported, kAlignLSE, TileSmemLoader), cutlassF.h and
_efficient_attention_forward in attention.cu, for GPUs from sm80 on.
"""

import contextlib

import torch


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
