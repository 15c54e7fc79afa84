"""The GRPO loss of grpo/loss.py, with the same names and results, without the full logits.

How it avoids the logits. For N = 4096 tokens of Qwen2.5 the logits (N, V') take 1.2 GB in
bf16, and plain torch holds them three to seven times (float32, softmax, gradients). Here the tokens
pass the LM head W in chunks of C, which share one buffer Z:

    Z     = H_c W^T   (C, V')  a matrix product: the logits of the chunk's tokens
    Z    <- dZ        (C, V')  `row_kernel`: their log-probs and, in place, the logits' gradient
    dH_c  = dZ W      (C, H)   a matrix product: the gradient of the hidden states
    dW   += dZ^T H_c  (V', H)  a matrix product: the gradient of the head

For a bf16 model Z is float32, as the logits of sampler and server are, and dZ is a second matrix in
bf16. Memory holds only dH, dW, Z and dZ. All four steps run in the forward pass. This is possible
because the loss is a sum over tokens: a token's logits alone determine their gradient, up to the
factor that `backward` receives. Tokens of weight 0 (padding) are removed first. Without Triton,
class Rows uses torch.

The derivation. For a token with logits z = W h, temperature tau and sampled id y:

    logp = z_y / tau - log sum_v exp(z_v / tau)
    d logp / dz_v = (1[v = y] - p_v) / tau      where p = softmax(z / tau)
    dz = slope (1[v = y] - p) / tau             where slope = d loss / d logp, one number a token
    entropy = log sum_v exp(z_v / tau) - sum_v p_v z_v / tau

Only the slope depends on the objective (see `row_kernel`). With GSPO the slope needs all tokens of
the sequence. Then linear_logps returns the log-probs, autograd finds the slopes, and the backward
pass computes the logits again: four matrix products and the same memory.
"""

import functools
import math
import warnings
from collections import namedtuple

import torch
from torch.autograd.function import once_differentiable

from grpo.devices import is_nvidia, is_out_of_memory
from grpo.loss import MAX_LOG_RATIO, policy_loss, trained_tokens

try:
    import triton
    import triton.language as tl
except ImportError:  # not Linux, or torch without CUDA: class Rows uses torch
    triton = None

# Memory of a chunk's logits and their gradient on a GPU: 1152 tokens of Qwen2.5 at 6 bytes a logit.
# A chunk reads the head twice and dW once more; from about 1024 tokens on the matrix products take
# longer than that (computed). A larger chunk only needs more memory. On a CPU a chunk is as large
# as dW.
CHUNK_BYTES = 1 << 30
# Up to this many chunks dW is summed in the head's dtype, beyond it in float32, with a second copy
# of dW. Relative error in bf16: 2.3e-3 with one product, 3.1e-3 over 4 chunks, 6.7e-3 over 32
# (measured on a CPU).
CHUNKS_IN_OWN_DTYPE = 4


# --- What the trainer and the server call -------------------------------------------
def grpo_loss(
    hidden, head, ids, old_logps, ref_logps, advantages, weights, *,
    clip_low, clip_high, kl_beta, objective="clip", unbiased_kl=False,
    sampler_logps=None, is_cap=0.0, is_mask=False, ratio_cap=0.0, sequences=None,
    temperature=1.0, vocab_size=None,
):  # fmt: skip
    """Returns (loss, stats) of grpo.loss.grpo_loss, differentiable in `hidden` and `head`.

    The forward pass computes the gradients, and they can be used once: a second backward through
    the same loss raises RuntimeError. A frozen head (LoRA) costs no matrix product and no memory.
    """
    (hidden, ids, *tokens), restore = trained_tokens(
        weights, hidden, ids, old_logps, ref_logps, advantages, weights, sampler_logps, sequences
    )
    numbers = clip_low, clip_high, kl_beta, objective, unbiased_kl, is_cap, is_mask, ratio_cap
    given = LossArguments(*tokens, *numbers)
    rows = Rows(hidden, head, ids, temperature, vocab_size, use_triton(hidden), given)
    if sequences is None:
        loss = FusedLoss.apply(hidden, head, rows, torch.is_grad_enabled())
        logps, stats = rows.logps, rows.stats
    else:
        logps = LinearLogps.apply(hidden, head, rows)
        loss, stats = rows.loss(logps)
    return loss, restore(stats | {"logps": logps.detach(), "entropy": rows.entropy})


def linear_logps(hidden, head, ids, *, temperature=1.0, vocab_size=None, entropy=False):
    """Returns the same as grpo.loss.linear_logps. The backward pass computes the logits again."""
    flat = hidden.reshape(-1, hidden.shape[-1])
    rows = Rows(flat, head, ids.reshape(-1), temperature, vocab_size, use_triton(flat))
    logps = LinearLogps.apply(flat, head, rows).view(ids.shape)
    return (logps, rows.entropy.view(ids.shape)) if entropy else logps


# --- Autograd -----------------------------------------------------------------------
class FusedLoss(torch.autograd.Function):
    """hidden, head -> loss; the gradients of the two are finished in the forward pass."""

    @staticmethod
    def forward(ctx, hidden, head, rows, grad_enabled):
        needs = [needed and grad_enabled for needed in ctx.needs_input_grad[:2]]
        ctx.grads = through_head(hidden, head, rows, needs)
        loss, rows.stats = rows.loss(rows.logps)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream):
        if ctx.grads is None:
            raise RuntimeError("grpo_loss: call backward once; an earlier call used its gradients")
        grads, ctx.grads = ctx.grads, None
        return *(grad if grad is None else grad.mul_(upstream) for grad in grads), None, None


class LinearLogps(torch.autograd.Function):
    """hidden, head -> logps; the backward pass computes the logits again."""

    @staticmethod
    def forward(ctx, hidden, head, rows):
        through_head(hidden, head, rows, (False, False))
        ctx.save_for_backward(hidden, head)
        ctx.rows = rows
        logps, rows.logps = rows.logps, None  # a cycle would never be freed
        return logps

    @staticmethod
    @once_differentiable
    def backward(ctx, slopes):
        hidden, head = ctx.saved_tensors
        ctx.rows.slopes = slopes.contiguous()
        return *through_head(hidden, head, ctx.rows, ctx.needs_input_grad[:2], forward=False), None


# --- Through the head, in chunks ----------------------------------------------------
def through_head(hidden, head, rows, needs, forward=True):
    """Runs `rows` on their logits, chunk by chunk; returns (dH, dW), each None if not needed.

    A bf16 model's logits are float32 on NVIDIA's GPUs (one product) and on a CPU (after casts),
    because rounding them to bf16 would be half of the noise between trainer and sampler. On other
    GPUs they are bf16. Without `forward`, the softmax of an earlier run is used.
    """
    hidden = hidden.contiguous()  # given logits may be a slice, with gaps
    backward = any(needs)
    d_hidden = torch.empty_like(hidden) if needs[0] else None
    if head is None:
        rows.run(hidden, d_hidden, slice(0, len(hidden)), forward=forward, backward=backward)
        return d_hidden, None
    exact = hidden.itemsize == 2 and (hidden.is_cpu or is_nvidia(hidden.device))
    dtype = torch.float32 if exact else hidden.dtype
    apart = exact and backward  # dZ is bf16, for its two products
    chunk = chunk_rows(len(hidden), head, dtype.itemsize + apart * hidden.itemsize)
    few = len(hidden) <= chunk * CHUNKS_IN_OWN_DTYPE
    sums = head.dtype if few else torch.promote_types(head.dtype, torch.float32)
    d_head = torch.zeros_like(head, dtype=sums) if needs[1] else None
    buffer = hidden.new_empty(min(chunk, len(hidden)), len(head), dtype=dtype)
    d_buffer = torch.empty_like(buffer, dtype=hidden.dtype) if apart else buffer
    for start in range(0, len(hidden), chunk):
        h = hidden[start : start + chunk]
        part = slice(start, start + len(h))
        logits, d_logits = buffer[: len(h)], d_buffer[: len(h)]
        add_product(logits, h, head.t(), beta=0)
        rows.run(logits, d_logits, part, forward=forward, backward=backward)
        if needs[0]:
            torch.mm(d_logits, head, out=d_hidden[part])
        if needs[1]:
            add_product(d_head, d_logits.t(), h)
    return d_hidden, None if d_head is None else d_head.to(head.dtype)


def chunk_rows(size, head, itemsize):
    """Returns the rows per chunk, a multiple of 128, so that all chunks are about equally long."""
    most = max(128, (head.nbytes if head.is_cpu else CHUNK_BYTES) // (len(head) * itemsize))
    equal = math.ceil(size / math.ceil(max(1, size) / most))
    return max(128, math.ceil(equal / 128) * 128)


def add_product(total, a, b, beta=1):
    """total = beta * total + a @ b, where total may be float32 while a and b are bf16."""
    if total.dtype == a.dtype:
        torch.addmm(total, a, b, beta=beta, out=total)
    elif is_nvidia(total.device):
        torch.addmm(total, a, b, beta=beta, out_dtype=torch.float32, out=total)
    else:
        torch.addmm(total, a.float(), b.float(), beta=beta, out=total)


# --- Rows: from logits to log-probs, and to their own gradient ----------------------
# The arguments of policy_loss except logps: tensors (N,) or None, and numbers. Default: no loss.
LossArguments = namedtuple("LossArguments", [
    "old_logps", "ref_logps", "advantages", "weights", "sampler_logps", "sequences",
    "clip_low", "clip_high", "kl_beta", "objective", "unbiased_kl", "is_cap", "is_mask",
    "ratio_cap",
], defaults=[*[None] * 6, 0.0, 0.0, 0.0, "clip", False, 0.0, False, 0.0])  # fmt: skip


class Rows:
    """What is known of the logits' N rows, one per token: float32 tensors (N,).

    `top` is the largest logit, `log_sum` the log of sum_v exp((z_v - top) / tau): one number would
    round log_sum away where logits are large, and logps to above 0. `slopes`: d loss / d logp.
    """

    def __init__(self, hidden, head, ids, temperature, vocab_size, in_triton, given=None):
        self.width = hidden.shape[1] if head is None else len(head)
        self.vocab_size = self.width if vocab_size is None else vocab_size
        if not 0 < self.vocab_size <= self.width:
            raise ValueError(f"vocab_size = {vocab_size} must be 1 to {self.width} (the logits)")
        self.ids = ids.contiguous()
        self.temperature, self.in_triton = temperature, in_triton
        self.given = given or LossArguments()
        self.stats = {}  # policy_loss's
        self.exact = torch.promote_types(hidden.dtype, torch.float32)
        self.logps, self.entropy, self.top, self.log_sum, self.slopes = (
            hidden.new_empty(len(hidden), dtype=self.exact) for _ in range(5)
        )

    def loss(self, logps, part=slice(None)):
        """Returns policy_loss of the tokens `part`; `logps` are their log-probs."""
        given = self.given._asdict().items()
        return policy_loss(logps, **{k: v[part] if torch.is_tensor(v) else v for k, v in given})

    def run(self, logits, grad, part, *, forward, backward):
        """Does the work of row_kernel on the rows `part`, a slice, given their logits (C, V').

        `forward` finds all but the slopes, `backward` writes the gradient of the logits to `grad`,
        which may be `logits`; with both, the slopes in between are those of `loss`.
        """
        if self.in_triton:
            return launch(self, logits, grad, part, forward=forward, backward=backward)
        for rows, z in self.slabs(logits, part):
            if forward:
                self.top[rows] = z.amax(1)
            x = (z - self.top[rows, None]).div_(self.temperature).clamp_(min=-1e4)  # finite
            p = x.exp()  # exp(log_sum) times the probabilities
            if forward:
                total, target = p.sum(1), z.gather(1, self.ids[rows, None]).squeeze(1)
                self.log_sum[rows] = log_sum = total.log()
                self.logps[rows] = (target - self.top[rows]) / self.temperature - log_sum
                self.entropy[rows] = log_sum - torch.linalg.vecdot(p, x) / total
            if forward and backward:
                with torch.enable_grad():
                    logps = self.logps[rows].detach().requires_grad_()
                    loss, _ = self.loss(logps, rows)
                (self.slopes[rows],) = torch.autograd.grad(loss, logps)
            if backward:
                out = grad[rows.start - part.start :][: len(z)]
                slope = self.slopes[rows] / self.temperature
                p.mul_((-slope / self.log_sum[rows].exp())[:, None])
                out[:, : self.vocab_size] = p.scatter_add_(1, self.ids[rows, None], slope[:, None])
                out[:, self.vocab_size :] = 0  # the embedding's padding

    def slabs(self, logits, part):
        """Yields (slice of the rows, their logits (., V)): few, so that their copies fit a CPU's
        cache; on a GPU without Triton enough to keep it busy, 0.27 GB of float32 for a copy."""
        size = max(1, (1 << (18 if logits.device.type == "cpu" else 26)) // self.width)
        for start in range(0, len(logits), size):
            z = logits[start : start + size, : self.vocab_size].to(self.exact)
            yield slice(part.start + start, part.start + start + len(z)), z


def use_triton(tensor):
    possible = triton is not None and is_nvidia(tensor.device) and tensor.dtype != torch.float64
    return possible and kernel_works(tensor.device, tensor.dtype)


@functools.cache
def kernel_works(device, dtype):
    """Returns whether the kernel runs and agrees with torch. Tries it once, on three rows."""
    z = torch.linspace(-4, 4, 600).view(3, 200).to(device, dtype)
    results = []
    try:
        for in_triton in (False, True):
            rows = Rows(z, None, torch.arange(3, device=device), 0.9, 190, in_triton)
            through_head(z, None, rows, (False, False))
            rows.slopes.fill_(1.0)
            grad, _ = through_head(z, None, rows, (True, False), forward=False)
            results.append(torch.cat([rows.logps, rows.entropy, grad.float().flatten()]))
        gap = (results[0] - results[1]).abs().max().item()
        if not gap < (1e-4 if dtype == torch.float32 else 1e-2):
            raise ArithmeticError(f"its result differs by {gap:.1g}")
    except Exception as why:
        if is_out_of_memory(why):
            raise
        warnings.warn(f"the Triton kernel fails, so slower torch code runs: {why!r}", stacklevel=2)
        return False
    return True


# --- The kernel ---------------------------------------------------------------------
if triton:

    @triton.jit
    def row_kernel(
        logits, grad,  # (C, WIDTH), any float dtype; may be the same memory
        ids,  # (C,) int64; all that follow are float32 (C,)
        logps, entropies, tops, log_sums, slopes,
        old_logps, ref_logps, advantages, weights, sampler_logps,
        VOCAB: tl.constexpr, WIDTH: tl.constexpr, INV_TAU: tl.constexpr, BLOCK: tl.constexpr,
        FORWARD: tl.constexpr, BACKWARD: tl.constexpr, ON_POLICY: tl.constexpr, CISPO: tl.constexpr,
        CLIP_LOW: tl.constexpr, CLIP_HIGH: tl.constexpr, RATIO_CAP: tl.constexpr,
        IS_CAP: tl.constexpr, IS_MASK: tl.constexpr, KL_BETA: tl.constexpr,
        UNBIASED_KL: tl.constexpr, MAX_LOG_RATIO: tl.constexpr,
    ):  # fmt: skip
        """One program handles one row of logits; FORWARD and BACKWARD are those of Rows.run.

        A bf16 logit is 2 bytes of memory traffic forward, 4 backward, 4 to 6 with both: the second
        read may hit the L2 cache (a row of Qwen2.5 is 304 KB, an SM has two in flight).
        """
        LOG2E: tl.constexpr = 1.4426950408889634
        row = tl.program_id(0).to(tl.int64)  # row * WIDTH exceeds 32 bits from 14 000 rows on
        logits += row * WIDTH
        grad += row * WIDTH
        target = tl.load(ids + row)
        z_target = tl.load(logits + target).to(tl.float32)  # before a gradient takes its place
        if FORWARD:
            # Online softmax (1805.02867): total = sum exp((z - top) / tau), moment the same with
            # each term times z - top. When a larger logit turns up, both are rewritten for it.
            top = tl.full((), -3.0e38, tl.float32)
            total = tl.full((), 0.0, tl.float32)
            moment = tl.full((), 0.0, tl.float32)
            for start in tl.range(0, VOCAB, BLOCK):
                columns = start + tl.arange(0, BLOCK)
                # Masked at WIDTH, in most models a multiple of 8: at VOCAB loads may go one by one
                z = tl.load(logits + columns, mask=columns < WIDTH, other=float("-inf"))
                z = tl.where(columns < VOCAB, z.to(tl.float32), float("-inf"))
                new_top = tl.maximum(top, tl.max(z, 0))
                below = z - new_top  # exact near the top, also for logits of 1e4
                e = tl.exp2(below * (INV_TAU * LOG2E))
                shrink = tl.exp2((top - new_top) * (INV_TAU * LOG2E))
                moment = (moment + total * (top - new_top)) * shrink
                moment += tl.sum(tl.where(e > 0, e * below, 0.0), 0)  # 0 x -inf would be NaN
                total = total * shrink + tl.sum(e, 0)
                top = new_top
            log_sum = tl.log(total)
            logp = (z_target - top) * INV_TAU - log_sum
            tl.store(logps + row, logp)
            tl.store(entropies + row, log_sum - moment * INV_TAU / total)
            tl.store(tops + row, top)
            tl.store(log_sums + row, log_sum)
        if BACKWARD:
            if FORWARD:
                # slope = d loss / d logp, where loss = w (KL_BETA kl - c gain), c of IS_CAP:
                #   gain = min(r A, clip(r) A)   d gain = r A; 0 if clip(r) A < r A or r > RATIO_CAP
                #   gain = sg(clip(r)) A logp    d gain = clip(r) A                          (CISPO)
                #   kl = exp(d) - d - 1 = k3     d kl = 1 - exp(d)       with d = ref_logp - logp
                #   kl = r k3                    d kl = r k3 + r (1 - exp(d)) = - r d     (unbiased;
                #                                     there RATIO_CAP caps the factor r)
                advantage = tl.load(advantages + row)
                old = logp if ON_POLICY else tl.load(old_logps + row)
                ratio = tl.exp(tl.minimum(logp - old, MAX_LOG_RATIO))  # inf x 0 would be NaN
                clipped = tl.minimum(tl.maximum(ratio, 1.0 - CLIP_LOW), 1.0 + CLIP_HIGH)
                slope = clipped * advantage
                if not CISPO:
                    slope = tl.where(ratio * advantage <= slope, ratio * advantage, 0.0)
                    if RATIO_CAP > 0:
                        slope = tl.where(ratio > RATIO_CAP, 0.0, slope)
                if IS_CAP > 0:
                    factor = tl.exp(old - tl.load(sampler_logps + row))
                    if IS_MASK:
                        is_far = (factor > IS_CAP) | (factor < 1 / IS_CAP)
                        slope *= tl.where(is_far, 0.0, factor)
                    else:
                        slope *= tl.minimum(factor, IS_CAP)
                if KL_BETA != 0:
                    d = tl.load(ref_logps + row) - logp
                    if UNBIASED_KL:
                        if RATIO_CAP > 0:
                            ratio = tl.minimum(ratio, RATIO_CAP)
                        slope += KL_BETA * ratio * d
                    else:
                        # exp(d) - 1 loses the digits of a small d: its series to d^7, good to 1e-9
                        series = 1 + d / 3 * (1 + d / 4 * (1 + d / 5 * (1 + d / 6 * (1 + d / 7))))
                        series = d * (1 + d / 2 * series)
                        slope += KL_BETA * tl.where(tl.abs(d) < 0.25, series, tl.exp(d) - 1)
                slope *= -tl.load(weights + row)
            else:
                slope = tl.load(slopes + row)
                top = tl.load(tops + row)
                log_sum = tl.load(log_sums + row)
            slope *= INV_TAU
            for start in tl.range(0, WIDTH, BLOCK):  # the embedding's padding gets zeros
                columns = start + tl.arange(0, BLOCK)
                z = tl.load(logits + columns, mask=columns < WIDTH, other=float("-inf"))
                z = tl.where(columns < VOCAB, z.to(tl.float32), float("-inf"))
                p = tl.exp2((z - top) * (INV_TAU * LOG2E) - log_sum * LOG2E)
                dz = slope * (tl.where(columns == target, 1.0, 0.0) - p)
                tl.store(grad + columns, dz.to(grad.dtype.element_ty), mask=columns < WIDTH)


def launch(rows, logits, grad, part, *, forward, backward):
    """Runs row_kernel on the rows `part`; `top` replaces each tensor that the kernel won't read."""
    given = rows.given if forward and backward else LossArguments()
    fields = rows.logps, rows.entropy, rows.top, rows.log_sum, rows.slopes, *given[:5]
    row_kernel[(len(logits),)](
        logits, logits if grad is None else grad, rows.ids[part],
        *(rows.top if field is None else field[part].float().contiguous() for field in fields),
        VOCAB=rows.vocab_size, WIDTH=rows.width, INV_TAU=1 / rows.temperature,
        FORWARD=forward, BACKWARD=backward,
        ON_POLICY=given.old_logps is None, CISPO=given.objective == "cispo",
        CLIP_LOW=given.clip_low, CLIP_HIGH=given.clip_high, RATIO_CAP=given.ratio_cap,
        IS_CAP=given.is_cap, IS_MASK=given.is_mask, KL_BETA=given.kl_beta,
        UNBIASED_KL=given.unbiased_kl, MAX_LOG_RATIO=MAX_LOG_RATIO,
        **block_of(rows.width, logits.element_size()),
    )  # fmt: skip


def block_of(width, itemsize):
    """Returns the columns that a program reads at once, 16 KB at most, and its warps."""
    block = min(16384 // itemsize, triton.next_power_of_2(width))
    return {"BLOCK": block, "num_warps": max(1, block * itemsize // 1024)}
