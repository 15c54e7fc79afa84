"""linear_logps of grpo/loss.py, with the same signature, without the full logits.

How it avoids the logits. For N = 4096 tokens of Qwen2.5 the logits (N, V') take 1.2 GB in
bf16, and plain torch holds them three to seven times (float32, softmax, gradients). Here the tokens
pass the LM head W in chunks of C, which share one buffer Z:

    forward    Z     = H_c W^T   (C, V')  a matrix product: the logits of the chunk's tokens
               logps, entropies           `forward_kernel` reads Z once
    backward   Z     = H_c W^T   (C, V')  the same product again, as the logits were not kept
               Z    <- dZ        (C, V')  `backward_kernel`: the logits' gradient, in place
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
them to the backward pass. test_qiudao.py works an example by hand (lesson 10).
"""

import functools
import math
import warnings

import torch
from torch.autograd.function import once_differentiable

from grpo.devices import is_nvidia, is_out_of_memory

try:
    import triton
    import triton.language as tl
except ImportError:  # not Linux, or torch without CUDA: torch_forward and torch_backward
    triton = None

# Memory of a chunk's logits and their gradient on a GPU: 1152 tokens of Qwen2.5 at 6 bytes a logit.
# A chunk reads the head twice and dW once more; from about 1024 tokens on the matrix products take
# longer than that (computed). On a CPU a chunk is as large as dW.
CHUNK_BYTES = 1 << 30
# Up to this many chunks dW is summed in the head's dtype, beyond it in float32, with a second copy
# of dW. Relative error in bf16: 2.3e-3 with one product, 3.1e-3 over 4 chunks, 6.7e-3 over 32
# (measured on a CPU).
CHUNKS_IN_OWN_DTYPE = 4


# --- What trainer, sampler and server call ------------------------------------------
def linear_logps(hidden, head, ids, *, temperature=1.0, vocab_size=None, entropy=False):
    """Returns the same as grpo.loss.linear_logps. The backward pass computes the logits again. A
    frozen head (LoRA) then costs no product and no memory for its gradient."""
    flat = hidden.reshape(-1, hidden.shape[-1]).contiguous()  # given logits may have gaps
    width = flat.shape[1] if head is None else len(head)
    vocab = width if vocab_size is None else vocab_size
    if not 0 < vocab <= width:
        raise ValueError(f"vocab_size = {vocab_size} must be 1 to {width} (the logits)")
    found = LinearLogps.apply(flat, head, ids.reshape(-1).contiguous(), temperature, vocab)
    logps, entropies = (values.view(ids.shape) for values in found)
    return (logps, entropies) if entropy else logps


class LinearLogps(torch.autograd.Function):
    """hidden (N, H), head, ids (N,) -> logps, entropies (N,); the latter have no gradient."""

    @staticmethod
    def forward(ctx, hidden, head, ids, temperature, vocab):
        ctx.settings, ctx.in_triton = (temperature, vocab), use_triton(hidden)
        run = triton_forward if ctx.in_triton else torch_forward
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
        run = triton_backward if ctx.in_triton else torch_backward
        of_hidden, of_head, *_ = ctx.needs_input_grad
        d_hidden = torch.empty_like(hidden) if of_hidden and head is not None else None
        d_head = torch.zeros_like(head, dtype=sum_dtype(hidden, head)) if of_head else None
        for part, logits, d_logits in chunks(hidden, head, backward=True):
            run(logits, d_logits, *(values[part] for values in of_tokens), *ctx.settings)
            if head is None:
                d_hidden = d_logits
            elif of_hidden:
                torch.mm(d_logits, head, out=d_hidden[part])
            if of_head:
                add_product(d_head, d_logits.t(), hidden[part])
        return d_hidden, d_head.to(head.dtype) if of_head else None, None, None, None


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
    size, dtype = chunk_rows(hidden, head), logits_dtype(hidden.dtype)
    logits = hidden.new_empty(min(size, len(hidden)), len(head), dtype=dtype)
    apart = backward and dtype != hidden.dtype  # dZ has the dtype of its two products
    d_logits = torch.empty_like(logits, dtype=hidden.dtype) if apart else logits
    for start in range(0, len(hidden), size):
        h = hidden[start : start + size]
        add_product(logits[: len(h)], h, head.t(), beta=0)
        yield slice(start, start + len(h)), logits[: len(h)], d_logits[: len(h)]


def logits_dtype(dtype):
    return torch.float32 if dtype.itemsize == 2 else dtype


def chunk_rows(hidden, head):
    """Returns the rows per chunk, a multiple of 128, so that all chunks are about equally long. The
    two passes have the same chunks, and so the same logits to the last bit."""
    dtype, count = logits_dtype(hidden.dtype), max(1, len(hidden))
    itemsize = dtype.itemsize + (hidden.itemsize if dtype != hidden.dtype else 0)
    most = max(128, (head.nbytes if head.is_cpu else CHUNK_BYTES) // (len(head) * itemsize))
    equal = math.ceil(count / math.ceil(count / most))
    return math.ceil(equal / 128) * 128


def sum_dtype(hidden, head):
    """Returns the dtype in which dW is summed over the chunks."""
    few = len(hidden) <= chunk_rows(hidden, head) * CHUNKS_IN_OWN_DTYPE
    return head.dtype if few else torch.promote_types(head.dtype, torch.float32)


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
    """Yields (slice of the rows, their logits (., V)): few, so that their copies fit a CPU's
    cache; on a GPU without Triton enough to keep it busy, 0.27 GB of float32 for a copy."""
    size = max(1, (1 << (18 if logits.is_cpu else 26)) // logits.shape[1])
    for start in range(0, len(logits), size):
        rows = slice(start, start + size)
        yield rows, logits[rows, :vocab].to(dtype)


# --- The same in Triton: one program handles one row of logits ------------------------
def use_triton(tensor):
    possible = triton is not None and is_nvidia(tensor.device) and tensor.dtype != torch.float64
    return possible and kernels_work(tensor.device, tensor.dtype)


@functools.cache
def kernels_work(device, dtype):
    """Returns whether the kernels agree with torch, on three rows, for hidden states of `dtype`."""
    z = torch.linspace(-4, 4, 600).view(3, 200).to(device, logits_dtype(dtype))
    ids, settings, results = torch.arange(3, device=device), (0.9, 190), []
    ways = (torch_forward, torch_backward), (triton_forward, triton_backward)
    try:
        for forward, backward in ways:
            found = [z.new_empty(3, dtype=torch.float32) for _ in range(4)]
            forward(z, ids, *found, *settings)
            grad = torch.empty_like(z, dtype=dtype)
            backward(z, grad, ids, *found[2:], torch.ones_like(found[0]), *settings)
            results.append(torch.cat([*found[:2], grad.float().flatten()]))
        gap = (results[0] - results[1]).abs().max().item()
        if not gap < (1e-4 if dtype == torch.float32 else 1e-2):
            raise ArithmeticError(f"their result differs by {gap:.1g}")
    except Exception as why:
        if is_out_of_memory(why):
            raise
        warnings.warn(f"the Triton kernels fail, so slower torch code runs: {why!r}", stacklevel=2)
        return False
    return True


def triton_forward(logits, ids, logps, entropies, tops, log_sums, temperature, vocab):
    constants = constants_of(logits, temperature, vocab)
    forward_kernel[(len(logits),)](logits, ids, logps, entropies, tops, log_sums, **constants)


def triton_backward(logits, d_logits, ids, tops, log_sums, slopes, temperature, vocab):
    constants = constants_of(logits, temperature, vocab)
    backward_kernel[(len(logits),)](logits, d_logits, ids, tops, log_sums, slopes, **constants)


def constants_of(logits, temperature, vocab):
    """Returns what is fixed when a kernel is compiled. A program reads 16 KB at once, at most."""
    width, itemsize = logits.shape[1], logits.element_size()
    block = min(16384 // itemsize, triton.next_power_of_2(width))
    sizes = {"VOCAB": vocab, "WIDTH": width, "BLOCK": block, "INV_TAU": 1 / temperature}
    return sizes | {"num_warps": max(1, block * itemsize // 1024)}


if triton:
    LOG2E = tl.constexpr(1.4426950408889634)

    @triton.jit
    def columns_of(row, columns, VOCAB: tl.constexpr, WIDTH: tl.constexpr):
        # Masked at WIDTH, in most models a multiple of 8: at VOCAB loads may go one by one
        z = tl.load(row + columns, mask=columns < WIDTH, other=float("-inf"))
        return tl.where(columns < VOCAB, z.to(tl.float32), float("-inf"))

    @triton.jit
    def forward_kernel(
        logits,  # (C, WIDTH), any float dtype
        ids,  # (C,), int64; all that follow are float32 (C,)
        logps,
        entropies,
        tops,
        log_sums,
        VOCAB: tl.constexpr,
        WIDTH: tl.constexpr,
        BLOCK: tl.constexpr,
        INV_TAU: tl.constexpr,
    ):
        """A float32 logit is 4 bytes of memory traffic."""
        row = tl.program_id(0).to(tl.int64)  # row * WIDTH exceeds 32 bits from 14 000 rows on
        logits += row * WIDTH
        # Online softmax (1805.02867): total = sum exp((z - top) / tau), moment the same with
        # each term times z - top. When a larger logit turns up, both are rewritten for it.
        top = tl.full((), -3.0e38, tl.float32)
        total = tl.full((), 0.0, tl.float32)
        moment = tl.full((), 0.0, tl.float32)
        for start in tl.range(0, VOCAB, BLOCK):
            z = columns_of(logits, start + tl.arange(0, BLOCK), VOCAB, WIDTH)
            new_top = tl.maximum(top, tl.max(z, 0))
            below = z - new_top  # exact near the top, also for logits of 1e4
            e = tl.exp2(below * (INV_TAU * LOG2E))
            shrink = tl.exp2((top - new_top) * (INV_TAU * LOG2E))
            moment = (moment + total * (top - new_top)) * shrink
            moment += tl.sum(tl.where(e > 0, e * below, 0.0), 0)  # 0 x -inf would be NaN
            total = total * shrink + tl.sum(e, 0)
            top = new_top
        log_sum = tl.log(total)
        target = tl.load(logits + tl.load(ids + row)).to(tl.float32)
        tl.store(logps + row, (target - top) * INV_TAU - log_sum)
        tl.store(entropies + row, log_sum - moment * INV_TAU / total)
        tl.store(tops + row, top)
        tl.store(log_sums + row, log_sum)

    @triton.jit
    def backward_kernel(
        logits,  # (C, WIDTH), any float dtype
        d_logits,  # the same shape, may be the same memory
        ids,  # (C,), int64; all that follow are float32 (C,)
        tops,
        log_sums,
        slopes,
        VOCAB: tl.constexpr,
        WIDTH: tl.constexpr,
        BLOCK: tl.constexpr,
        INV_TAU: tl.constexpr,
    ):
        """A logit of a bf16 model is 6 bytes of memory traffic: float32 in, bf16 out."""
        row = tl.program_id(0).to(tl.int64)
        logits += row * WIDTH
        d_logits += row * WIDTH
        target, top = tl.load(ids + row), tl.load(tops + row)
        log_sum, slope = tl.load(log_sums + row), tl.load(slopes + row) * INV_TAU
        for start in tl.range(0, WIDTH, BLOCK):  # the embedding's padding gets zeros
            columns = start + tl.arange(0, BLOCK)
            z = columns_of(logits, columns, VOCAB, WIDTH)
            p = tl.exp2((z - top) * (INV_TAU * LOG2E) - log_sum * LOG2E)
            dz = slope * (tl.where(columns == target, 1.0, 0.0) - p)
            tl.store(d_logits + columns, dz.to(d_logits.dtype.element_ty), mask=columns < WIDTH)
