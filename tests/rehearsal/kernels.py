"""What is one kernel on CUDA, and what CUDA's kernels take, where a CPU build does otherwise."""

import functools

import torch
from gpu_kernels import efficient_attention, varlen_attn
from torch.nn import functional

from rehearsal.events import Recording

aten = torch.ops.aten
attention_of_torch = functional.scaled_dot_product_attention


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
class OneKernel(torch.autograd.Function):
    """call(*tensors) of the simulated GPU, recorded as one; the backward pass computes it again."""

    @staticmethod
    def forward(ctx, call, *tensors):
        ctx.call = call
        ctx.save_for_backward(*tensors)
        out = Recording.call(call, *(x.detach().inner for x in tensors))
        return type(tensors[0].detach())(out)

    @staticmethod
    def backward(ctx, grad):
        inner = [x.detach().inner.detach().requires_grad_() for x in ctx.saved_tensors]
        with torch.enable_grad():
            out = ctx.call(*inner)
        return None, *(type(grad)(x) for x in torch.autograd.grad(out, inner, grad.inner))


def attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, **settings):
    """torch.nn.functional.scaled_dot_product_attention"""
    settings |= {"dropout_p": dropout_p, "is_causal": is_causal}
    tensors = [x for x in (query, key, value, attn_mask) if x is not None]
    if not any(x.is_cuda for x in tensors):
        return attention_of_torch(query, key, value, attn_mask=attn_mask, **settings)
    if not all(x.is_cuda for x in tensors):
        raise RuntimeError("Expected all tensors to be on the same device (attention)")
    mask = None if attn_mask is None else attn_mask.inner
    call = functools.partial(attention_of_torch, attn_mask=mask, **settings)
    return OneKernel.apply(call, query, key, value)


def varlen(query, key, value, cu_seq_q, cu_seq_k, *longest, **settings):
    """torch.nn.attention.varlen.varlen_attn"""
    if not all(x.is_cuda for x in (query, key, value, cu_seq_q, cu_seq_k)):
        raise RuntimeError("Expected all tensors to be on the same device (varlen_attn)")
    others = cu_seq_q.inner, cu_seq_k.inner, *longest
    call = lambda q, k, v: varlen_attn(q, k, v, *others, **settings)
    return OneKernel.apply(call, query, key, value)
