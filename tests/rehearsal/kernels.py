"""What is one kernel on CUDA, and what CUDA's kernels take, where a CPU build does otherwise."""

import functools

import torch
from gpu_kernels import efficient_attention, varlen_attn
from torch.nn import functional

from rehearsal.events import Recording

aten = torch.ops.aten
attention_of_torch = functional.scaled_dot_product_attention
rms_norm_of_torch = torch.rms_norm


# --- Dtypes that only CUDA takes ------------------------------------------------------
def softmax(op, x, dim, half_to_float):
    return op(x.float() if half_to_float else x, dim, False)


def softmax_backward(op, grad, out, dim, dtype):
    return op(grad, out, dim, grad.dtype).to(dtype)


def product(op, a, b, dtype):
    return op(a.to(dtype), b.to(dtype))


def product_onto(x, a, b, dtype, beta=1, alpha=1, out=None):
    return torch.addmm(x, a.to(dtype), b.to(dtype), beta=beta, alpha=alpha, out=out)


ONLY_CUDA = {
    op: functools.partial(function, op)
    for op, function in {
        aten._softmax.default: softmax,
        aten._log_softmax.default: softmax,
        aten._softmax_backward_data.default: softmax_backward,
        aten._log_softmax_backward_data.default: softmax_backward,
    }.items()
}
ONLY_CUDA |= {
    aten.bmm.dtype: functools.partial(product, torch.bmm),
    aten.mm.dtype: functools.partial(product, torch.mm),
    aten.addmm.dtype_out: product_onto,
    aten._scaled_dot_product_efficient_attention.default: efficient_attention,
}


# --- Attention ------------------------------------------------------------------------
class Attention(torch.autograd.Function):
    """scaled_dot_product_attention as one kernel."""

    @staticmethod
    def forward(ctx, query, key, value, mask, settings):
        ctx.save_for_backward(query, key, value, mask)
        ctx.settings = settings
        inner = [x.detach().inner for x in (query, key, value)]
        mask = None if mask is None else mask.inner
        call = functools.partial(attention_of_torch, attn_mask=mask, **settings)
        return type(query.detach())(Recording.call(call, *inner))

    @staticmethod
    def backward(ctx, grad):
        *inputs, mask = ctx.saved_tensors
        inner = [x.detach().inner.detach().requires_grad_() for x in inputs]
        mask = None if mask is None else mask.inner
        with torch.enable_grad():
            out = attention_of_torch(*inner, attn_mask=mask, **ctx.settings)
        grads = torch.autograd.grad(out, inner, grad.inner)
        return *(type(grad)(x) for x in grads), None, None


def attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, **settings):
    """torch.nn.functional.scaled_dot_product_attention"""
    settings |= {"dropout_p": dropout_p, "is_causal": is_causal}
    tensors = [x for x in (query, key, value, attn_mask) if x is not None]
    if not any(x.is_cuda for x in tensors):
        return attention_of_torch(query, key, value, attn_mask=attn_mask, **settings)
    if not all(x.is_cuda for x in tensors):
        raise RuntimeError("Expected all tensors to be on the same device (attention)")
    return Attention.apply(query, key, value, attn_mask, settings)


class Varlen(torch.autograd.Function):
    """varlen_attn as one kernel."""

    @staticmethod
    def forward(ctx, query, key, value, others, settings):
        ctx.save_for_backward(query, key, value)
        ctx.call = functools.partial(varlen_of_inner, others=others, settings=settings)
        inner = [x.detach().inner for x in (query, key, value)]
        return type(query.detach())(Recording.call(ctx.call, *inner))

    @staticmethod
    def backward(ctx, grad):
        inner = [x.detach().inner.detach().requires_grad_() for x in ctx.saved_tensors]
        with torch.enable_grad():
            out = ctx.call(*inner)
        grads = torch.autograd.grad(out, inner, grad.inner)
        return *(type(grad)(x) for x in grads), None, None


def varlen_of_inner(query, key, value, *, others, settings):
    return varlen_attn(query, key, value, *others, **settings)


def varlen(query, key, value, cu_seq_q, cu_seq_k, *longest, **settings):
    """torch.nn.attention.varlen.varlen_attn"""
    if not all(x.is_cuda for x in (query, key, value, cu_seq_q, cu_seq_k)):
        raise RuntimeError("Expected all tensors to be on the same device (varlen_attn)")
    others = cu_seq_q.inner, cu_seq_k.inner, *longest
    return Varlen.apply(query, key, value, others, settings)


def rms_norm(x, shape, weight=None, eps=None):
    """torch.rms_norm: one kernel without a gradient; with one it is taken apart, as by torch."""
    tensors = [t for t in (x, weight) if t is not None]
    if not x.is_cuda or torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return rms_norm_of_torch(x, shape, weight, eps)
    if not all(t.is_cuda for t in tensors):
        raise RuntimeError("Expected all tensors to be on the same device (rms_norm)")
    inner = [None if t is None else t.detach().inner for t in (x, weight)]
    return type(x.detach())(Recording.call(rms_norm_of_torch, inner[0], list(shape), inner[1], eps))
