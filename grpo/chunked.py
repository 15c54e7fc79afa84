"""Log-probs of tokens from hidden states and the LM head, without the full logits.

For N = 4096 tokens of Qwen2.5 the logits (N, V') take 1.2 GB in bf16, and plain torch holds them
three to seven times (float32, softmax, gradients). Here the tokens pass the LM head W in chunks of
C, which share one buffer Z:

    forward    Z     = H_c W^T   (C, V')  a matrix product: the logits of the chunk's tokens
               logps, entropies           `torch_forward` reads Z
    backward   Z     = H_c W^T   (C, V')  the same product again, as the logits were not kept
               Z    <- dZ        (C, V')  `torch_backward`: the logits' gradient, in place
               dH_c  = dZ W      (C, H)   a matrix product: the gradient of the hidden states
               dW   += dZ^T H_c  (V', H)  a matrix product: the gradient of the head

For a bf16 model Z is float32, as the logits of sampler and server are, and dZ is a second matrix in
bf16. Memory holds only dH, dW, Z and dZ.

The derivation. For a token with logits z = W h, temperature tau and sampled id y:

    logp = z_y / tau - log sum_v exp(z_v / tau)
    d logp / dz_v = (1[v = y] - p_v) / tau      where p = softmax(z / tau)
    dz = slope (1[v = y] - p) / tau             where slope = d loss / d logp, one number a token
    entropy = log sum_v exp(z_v / tau) - sum_v p_v z_v / tau

The objective is in no line of this file: autograd computes the slopes from policy_loss, and brings
them to the backward pass. test_qiudao.py works d logp out by hand (lesson 1). grpo_loss_triton.py
has kernels in the place of torch_forward and torch_backward.
"""

import math

import torch
from torch.autograd.function import once_differentiable

from grpo.devices import is_nvidia

# Memory of a chunk's logits and their gradient on a GPU: 1152 tokens of Qwen2.5 at 6 bytes a logit.
# A chunk reads the head twice and dW once more; from about 1024 tokens on the matrix products take
# longer than that (computed). On a CPU a chunk is as large as dW.
CHUNK_BYTES = 1 << 30
# So many logits are copied to float32 at a time, some three times: on a CPU few, which fit its
# cache, on a GPU enough to keep it busy (0.07 GB a copy). The number for GPUs is a guess
SLAB_ON_CPU, SLAB = 1 << 18, 1 << 24
# Up to this many chunks dW is summed in the head's dtype, beyond it in float32, with a second copy
# of dW. Relative error in bf16: 2.3e-3 with one product, 3.1e-3 over 4 chunks, 6.7e-3 over 32
# (measured on a CPU).
CHUNKS_IN_OWN_DTYPE = 4


# --- What trainer and server call ---------------------------------------------------
def linear_logps(
    hidden, head, ids, *, temperature=1.0, vocab_size=None, entropy=False, kernels=None
):
    """Returns the same as grpo.loss.linear_logps. The backward pass computes the logits again. A
    frozen head (LoRA) then costs no product and no memory for its gradient. `kernels` may be two
    functions in the place of torch_forward and torch_backward."""
    flat = hidden.reshape(-1, hidden.shape[-1]).contiguous()  # given logits may have gaps
    vocab = vocab_size or (flat.shape[1] if head is None else len(head))
    settings = temperature, vocab, kernels or (torch_forward, torch_backward)
    found = LinearLogps.apply(flat, head, ids.reshape(-1).contiguous(), *settings)
    logps, entropies = (values.view(ids.shape) for values in found)
    return (logps, entropies) if entropy else logps


class LinearLogps(torch.autograd.Function):
    """hidden (N, H), head, ids (N,) -> logps, entropies (N,); the latter have no gradient."""

    @staticmethod
    def forward(ctx, hidden, head, ids, temperature, vocab, kernels):
        ctx.settings, (run, ctx.backward_kernel) = (temperature, vocab), kernels
        exact = torch.promote_types(hidden.dtype, torch.float32)
        # top is the largest logit, log_sum the log of sum exp((z - top) / tau). One number for both
        # would round log_sum away where logits are large, and logps to above 0
        found = [hidden.new_empty(len(hidden), dtype=exact) for _ in range(4)]
        for part, logits, _ in chunks(hidden, head):
            run(logits, ids[part], *(values[part] for values in found), *ctx.settings)
        logps, entropies, tops, log_sums = found
        ctx.save_for_backward(hidden, head, ids, tops, log_sums)
        ctx.mark_non_differentiable(entropies)
        return logps, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx, slopes, _):
        hidden, head, *of_tokens = ctx.saved_tensors
        of_tokens.append(slopes.contiguous())
        run = ctx.backward_kernel
        of_hidden, of_head, *_ = ctx.needs_input_grad
        d_hidden = torch.empty_like(hidden) if of_hidden and head is not None else None
        if of_head:
            few = len(hidden) <= chunk_rows(hidden, head) * CHUNKS_IN_OWN_DTYPE
            dtype = head.dtype if few else torch.promote_types(head.dtype, torch.float32)
            d_head = torch.zeros_like(head, dtype=dtype)
        for part, logits, d_logits in chunks(hidden, head, backward=True):
            run(logits, d_logits, *(values[part] for values in of_tokens), *ctx.settings)
            if head is None:
                d_hidden = d_logits
            elif of_hidden:
                torch.mm(d_logits, head, out=d_hidden[part])
            if of_head:
                add_product(d_head, d_logits.t(), hidden[part])
        return d_hidden, d_head.to(head.dtype) if of_head else None, None, None, None, None


# --- Through the head, in chunks ----------------------------------------------------
def chunks(hidden, head, backward=False):
    """Yields (part, logits, d_logits) for each chunk: which tokens, a slice; their logits (C, V');
    memory for the gradient of the logits, which is that of the logits unless their dtypes differ.
    Without `head` the given logits are the only chunk, and are not overwritten.

    A bf16 model's logits are float32 (one product on NVIDIA's GPUs, elsewhere after casts), as the
    sampler's are: rounding them to bf16 would be half of the noise between the two.
    """
    if head is None:
        yield slice(None), hidden, torch.empty_like(hidden) if backward else None
        return
    size, dtype = chunk_rows(hidden, head), torch.promote_types(hidden.dtype, torch.float32)
    logits = hidden.new_empty(min(size, len(hidden)), len(head), dtype=dtype)
    apart = backward and dtype != hidden.dtype  # dZ has the dtype of its two products
    d_logits = torch.empty_like(logits, dtype=hidden.dtype) if apart else logits
    for start in range(0, len(hidden), size):
        h = hidden[start : start + size]
        add_product(logits[: len(h)], h, head.t(), beta=0)
        yield slice(start, start + len(h)), logits[: len(h)], d_logits[: len(h)]


def chunk_rows(hidden, head):
    """Returns the rows per chunk, a multiple of 128, so that all chunks are about equally long. The
    two passes have the same chunks, and so the same logits to the last bit."""
    dtype, count = torch.promote_types(hidden.dtype, torch.float32), max(1, len(hidden))
    itemsize = dtype.itemsize + (hidden.itemsize if dtype != hidden.dtype else 0)
    most = max(128, (head.nbytes if head.is_cpu else CHUNK_BYTES) // (len(head) * itemsize))
    equal = math.ceil(count / math.ceil(count / most))
    return math.ceil(equal / 128) * 128


def add_product(total, a, b, beta=1):
    """total = beta * total + a @ b, where total may be float32 while a and b are bf16."""
    if total.dtype == a.dtype:
        torch.addmm(total, a, b, beta=beta, out=total)
    elif is_nvidia(total.device):
        torch.addmm(total, a, b, beta=beta, out_dtype=torch.float32, out=total)
    else:
        torch.addmm(total, a.float(), b.float(), beta=beta, out=total)


# --- From logits to log-probs, and to their gradient: in torch ------------------------
def torch_forward(logits, ids, logps, entropies, tops, log_sums, temperature, vocab):
    """Writes the results for logits (C, V') into the four tensors (C,) after `ids`."""
    for rows, z in slabs(logits, vocab, logps.dtype):
        tops[rows] = z.amax(1)
        x = (z - tops[rows, None]).div_(temperature).clamp_(min=-1e4)  # finite
        p = x.exp()  # exp(log_sum) times the probabilities
        total, target = p.sum(1), z.gather(1, ids[rows, None]).squeeze(1)
        log_sums[rows] = log_sum = total.log()
        logps[rows] = (target - tops[rows]) / temperature - log_sum
        entropies[rows] = log_sum - torch.linalg.vecdot(p, x) / total


def torch_backward(logits, d_logits, ids, tops, log_sums, slopes, temperature, vocab):
    """Writes the gradient of the logits (C, V') into `d_logits`, which may be `logits`."""
    for rows, z in slabs(logits, vocab, slopes.dtype):
        p = (z - tops[rows, None]).div_(temperature).clamp_(min=-1e4).exp_()
        slope = slopes[rows] / temperature
        p.mul_((-slope / log_sums[rows].exp())[:, None])
        d_logits[rows, :vocab] = p.scatter_add_(1, ids[rows, None], slope[:, None])
        d_logits[rows, vocab:] = 0  # the embedding's padding


def slabs(logits, vocab, dtype):
    """Yields (slice of the rows, their logits (., V)), so few that copies of them are small."""
    size = max(1, (SLAB_ON_CPU if logits.is_cpu else SLAB) // logits.shape[1])
    for start in range(0, len(logits), size):
        rows = slice(start, start + size)
        yield rows, logits[rows, :vocab].to(dtype)
