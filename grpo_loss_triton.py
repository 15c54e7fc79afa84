"""The GRPO loss from hidden states and the LM head, without ever holding the full logits.

    loss, stats = grpo_loss(hidden, weight, ids, old_logps, ref_logps, advantages, weights,
                            temperature=1.0, clip_low=0.2, clip_high=0.2, kl_beta=0.04)

Names, arguments and results are those of grpo_loss.py, whose plain torch is the specification. It
runs on any device: the matrix products are torch's, and what lies between them is one Triton kernel
on CUDA and a few lines of torch elsewhere.

Why it is small. The logits of 4096 tokens of Qwen2.5 are 1.2 GB in bf16, and plain torch holds them
three to seven times (float32, softmax, gradients). Here tokens pass the head in chunks: logits of a
chunk, their log-probs and, in their place, their gradient; then the two products that carry it to
the hidden states and to the head. What is ever held is dH, dW and one chunk.

Why it is fast. The loss is a weighted sum over tokens, so when the forward pass has a token's
logits their gradient is known too, but for the factor that `backward` gets: three products in all,
where computing the logits again costs four. Padding (weight 0) leaves before the first of them.

The derivation. For a token with logits z = W h, temperature T and sampled id y:

    logp = z_y / T - log sum_v exp(z_v / T)   d logp / dz_v = (1[v = y] - p_v) / T, p = softmax(z/T)
    dz = g (1[v = y] - p) / T                 with g = d loss / d logp, one number for each token
    dH = dZ W,   dW = dZ^T H                  for all tokens, as Z = H W^T

Only g knows of GRPO: see `row_kernel`. Where g needs other tokens first (GSPO's ratio of a whole
sequence), `linear_logps` gives the log-probs, autograd g, and the backward pass makes the logits a
second time: four products, the same memory.
"""

import functools
import math
import warnings

import torch
from torch.autograd.function import once_differentiable

from grpo.loss import policy_loss, sides, trained_tokens

try:
    import triton
    import triton.language as tl
except ImportError:  # no Linux, no GPU build: the torch rows below do everything
    triton = None

# Logits of one chunk on a GPU: 2048 tokens of Qwen2.5 in bf16. A chunk reads the head twice and dW
# once more, which hides behind the products from about 1024 tokens on. On a CPU: as large as dW.
CHUNK_BYTES = 640 << 20
# dW is summed over so many chunks in the head's own dtype, over more in float32: bf16 loses 2.3e-3
# in one product, 3.1e-3 over 4 chunks, 6.7e-3 over 32 (measured on a CPU). It is then held twice.
CHUNKS_IN_OWN_DTYPE = 4


# --- The two entries ----------------------------------------------------------------
def grpo_loss(
    hidden,
    weight,
    ids,
    old_logps,
    ref_logps,
    advantages,
    weights,
    *,
    temperature=1.0,
    vocab_size=None,
    **settings,
):
    """-> (loss, stats): grpo_loss.grpo_loss, with gradients for `hidden` and `weight`.

    The gradients are finished in the forward pass and given out once: a second backward through the
    same loss raises RuntimeError. A head that needs no gradient (LoRA) gets no product for it.
    """
    (hidden, ids, *tokens), restore = trained_tokens(
        weights, hidden, ids, old_logps, ref_logps, advantages, weights, *sides(settings)
    )
    *tokens, settings["sampler_logps"], settings["sequences"] = tokens
    if settings["sequences"] is not None:
        logps, entropy = linear_logps(
            hidden, weight, ids, temperature=temperature, vocab_size=vocab_size, entropy=True
        )
        loss, stats = policy_loss(logps, *tokens, **settings)
        return loss, restore(stats | {"logps": logps.detach(), "entropy": entropy})
    stats, rows = {}, Rows(hidden, weight, ids, temperature, vocab_size, use_triton(hidden))
    loss = FusedLoss.apply(hidden, weight, rows, tokens, settings, stats, torch.is_grad_enabled())
    return loss, restore(stats)


def linear_logps(hidden, weight, ids, *, temperature=1.0, vocab_size=None, entropy=False):
    """-> grpo_loss.linear_logps. Keeps no logits: the backward pass computes them again."""
    flat = hidden.reshape(-1, hidden.shape[-1])
    rows = Rows(flat, weight, ids.reshape(-1), temperature, vocab_size, use_triton(flat))
    logps, entropies = LinearLogps.apply(flat, weight, rows)
    logps, entropies = logps.view(ids.shape), entropies.view(ids.shape)
    return (logps, entropies) if entropy else logps


# --- Autograd -----------------------------------------------------------------------
class FusedLoss(torch.autograd.Function):
    """hidden, weight -> loss; their gradients are made in the forward pass, chunk by chunk."""

    @staticmethod
    def forward(ctx, hidden, weight, rows, tokens, settings, stats, differentiable):
        needs = [needed and differentiable for needed in ctx.needs_input_grad[:2]]

        def row_op(logits, grad, part):
            if any(needs):
                rows.read_and_write(logits, grad, part, tokens, settings)
            else:
                rows.read(logits, part)

        ctx.grads = through_head(hidden, weight, row_op, needs)
        loss, of_tokens = policy_loss(rows.logps, *tokens, **settings)
        stats.update(of_tokens, logps=rows.logps, entropy=rows.entropy)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream):
        if ctx.grads is None:
            raise RuntimeError("grpo_loss: its gradients were handed out by an earlier backward")
        grads, ctx.grads = ctx.grads, None
        grads = [grad if grad is None else grad.mul_(upstream) for grad in grads]
        return *grads, None, None, None, None, None


class LinearLogps(torch.autograd.Function):
    """hidden, weight -> logps, entropy; the backward pass makes the logits again."""

    @staticmethod
    def forward(ctx, hidden, weight, rows):
        through_head(hidden, weight, lambda z, _, part: rows.read(z, part), (False, False))
        ctx.save_for_backward(hidden, weight)
        ctx.mark_non_differentiable(rows.entropy)
        outputs = rows.logps, rows.entropy
        ctx.rows, rows.logps, rows.entropy = rows, None, None  # a cycle would never be freed
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx, slopes, _):
        hidden, weight = ctx.saved_tensors
        ctx.rows.slopes = slopes.contiguous()
        return *through_head(hidden, weight, ctx.rows.write, ctx.needs_input_grad[:2]), None


# --- Through the head, in chunks ----------------------------------------------------
def through_head(hidden, weight, row_op, needs):
    """Calls row_op(logits, grad, part) for chunks of rows; -> (dH, dW), None where not needed.

    `logits` (C, V') are those of the rows `part`, a slice. row_op writes their gradient into `grad`
    of the same shape: the same memory, if there is a head. Where nothing is needed, logits are in
    float32 if a GPU gives them at once: the reference's log-probs, and half of their noise in bf16.
    """
    half = hidden.dtype in (torch.bfloat16, torch.float16)
    exact = half and not any(needs) and hidden.is_cuda and sums_in_float32(hidden.device)
    dtype = torch.float32 if exact else hidden.dtype
    size, chunk = len(hidden), chunk_rows(len(hidden), weight, dtype.itemsize)
    hidden = hidden.contiguous()  # a slice of logits may not be: the kernel wants rows end to end
    d_hidden = torch.empty_like(hidden) if needs[0] else None
    d_weight = None
    if needs[1]:
        few = size <= chunk * CHUNKS_IN_OWN_DTYPE
        sums = weight.dtype if few else torch.promote_types(weight.dtype, torch.float32)
        d_weight = torch.zeros_like(weight, dtype=sums)
    if weight is not None:
        buffer = hidden.new_empty(min(chunk, size), len(weight), dtype=dtype)
    for start in range(0, size, chunk):
        part = slice(start, min(start + chunk, size))
        h = hidden[part]
        if weight is None:
            row_op(h, d_hidden[part] if needs[0] else None, part)
            continue
        logits, product = buffer[: len(h)], (h, weight.t())
        if exact:
            torch.addmm(logits, *product, beta=0, out_dtype=torch.float32, out=logits)
        else:
            torch.mm(*product, out=logits)
        row_op(logits, logits, part)
        if needs[0]:
            torch.mm(logits, weight, out=d_hidden[part])
        if needs[1]:
            add_product(d_weight, logits.t(), h)
    return d_hidden, None if d_weight is None else d_weight.to(weight.dtype)


def chunk_rows(size, weight, itemsize):
    """-> rows of a chunk, about equal, so that no short one is left over; all, without a head. A
    logit takes `itemsize` bytes."""
    if weight is None:
        return max(1, size)
    budget = CHUNK_BYTES if weight.is_cuda else weight.nbytes
    most = max(128, budget // (len(weight) * itemsize))
    equal = math.ceil(size / math.ceil(max(1, size) / most))
    return max(128, math.ceil(equal / 128) * 128)


def add_product(total, a, b):
    """total += a @ b, where total may be float32 while a and b are bf16."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    elif sums_in_float32(total.device):
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total += a @ b


@functools.cache
def sums_in_float32(device):
    """Whether this torch adds a bf16 product to a float32 matrix at once (CUDA, from 2.8 on)."""
    ones = torch.ones(16, 16, device=device)
    half = ones.bfloat16()
    try:
        torch.addmm(ones, half, half, out_dtype=torch.float32, out=ones)
    except (TypeError, RuntimeError):  # NotImplementedError is a RuntimeError
        return False
    return bool((ones == 17).all())


# --- Rows: logits to log-probs, and to their own gradient ---------------------------
class Rows:
    """What is known of each of N rows of logits, float32 (N,), and how to learn it.

    `top` is the largest logit, `log_sum` the log of sum_v exp((z_v - top) / T): kept apart, as in
    their sum large logits would round log_sum away. So logps can't be positive by rounding either.
    `slopes` are d loss / d logp.
    """

    def __init__(self, hidden, weight, ids, temperature, vocab_size, in_triton):
        self.width = hidden.shape[1] if weight is None else len(weight)
        self.vocab_size = self.width if vocab_size is None else vocab_size
        if not 0 < self.vocab_size <= self.width:
            raise ValueError(f"vocab_size = {vocab_size}, but there are {self.width} logits")
        self.ids, self.temperature = ids.contiguous(), temperature
        self.exact = torch.promote_types(hidden.dtype, torch.float32)
        self.logps, self.entropy, self.top, self.log_sum, self.slopes = (
            hidden.new_empty(len(hidden), dtype=self.exact) for _ in range(5)
        )
        self.in_triton = in_triton

    def read(self, logits, part):
        """Fills in all but `slopes` of the rows `part`, a slice, whose logits these are."""
        if self.in_triton:
            return launch(self, logits, logits, part, READ=True, WRITE=False)
        for rows, z in self.slabs(logits, part):
            self.softmax(rows, z)

    def softmax(self, rows, z):
        """Fills in a few rows; -> their exp((z - top) / T), whose sum is exp(log_sum)."""
        top, target = z.amax(1), z.gather(1, self.ids[rows, None]).squeeze(1)
        x = (z - top[:, None]).div_(self.temperature).clamp_(min=-1e4)  # 0 x -inf would be NaN
        p = x.exp()
        total = p.sum(1)
        self.top[rows], self.log_sum[rows] = top, total.log()
        self.logps[rows] = (target - top) / self.temperature - total.log()
        self.entropy[rows] = total.log() - torch.linalg.vecdot(p, x) / total
        return p

    def write(self, logits, grad, part):
        """Writes the gradient of the rows' logits, from their slopes, into `grad`."""
        if self.in_triton:
            return launch(self, logits, grad, part, READ=False, WRITE=True)
        for rows, z in self.slabs(logits, part):
            p = (z - self.top[rows, None]).div_(self.temperature).exp_()
            self.store(rows, p, grad, part)

    def store(self, rows, p, grad, part):
        """Writes a few rows; `p` is what softmax gives, and is used up."""
        out = grad[rows.start - part.start : rows.stop - part.start]
        g = self.slopes[rows] / self.temperature
        p.mul_((-g / self.log_sum[rows].exp())[:, None])
        out[:, : self.vocab_size] = p.scatter_add_(1, self.ids[rows, None], g[:, None])
        out[:, self.vocab_size :] = 0  # the embedding's padding

    def read_and_write(self, logits, grad, part, tokens, settings):
        """Both at once: the slopes in between are those of policy_loss."""
        if self.in_triton:
            return launch(self, logits, grad, part, tokens, settings, READ=True, WRITE=True)
        for rows, z in self.slabs(logits, part):
            p = self.softmax(rows, z)
            *fields, sampler_logps = (cut(t, rows) for t in (*tokens, settings["sampler_logps"]))
            with torch.enable_grad():
                logps = self.logps[rows].detach().requires_grad_()
                loss, _ = policy_loss(logps, *fields, **settings | {"sampler_logps": sampler_logps})
            (self.slopes[rows],) = torch.autograd.grad(loss, logps)
            self.store(rows, p, grad, part)

    def slabs(self, logits, part):
        """Yields (slice of the rows, their logits): few, whose copies fit a CPU's cache, or on a
        GPU that can't use Triton as many as keep it busy, 0.27 GB of float32 for each copy."""
        step = max(1, (1 << (18 if logits.device.type == "cpu" else 26)) // self.width)
        for start in range(0, len(logits), step):
            stop = min(start + step, len(logits))
            rows = slice(part.start + start, part.start + stop)
            yield rows, logits[start:stop, : self.vocab_size].to(self.exact)


def cut(tensor, part):
    return None if tensor is None else tensor[part]


def use_triton(tensor):
    if triton is None or not tensor.is_cuda or tensor.dtype == torch.float64:
        return False
    return kernel_works(tensor.device, tensor.dtype)


@functools.cache
def kernel_works(device, dtype):
    """Whether the kernel runs here and finds what the torch rows find: tried once; if not, said."""
    z = torch.linspace(-4, 4, 600).view(3, 200).to(device, dtype)
    part, results = slice(0, 3), []
    try:
        for in_triton in (False, True):
            rows = Rows(z, None, torch.arange(3, device=device), 0.9, 190, in_triton)
            grad = torch.empty_like(z)
            rows.read(z, part)
            rows.slopes.fill_(1.0)
            rows.write(z, grad, part)
            results.append(torch.cat([rows.logps, rows.entropy, grad.float().flatten()]))
        gap = (results[0] - results[1]).abs().max().item()
        why = f"it is {gap:.1g} off" if not gap < (1e-4 if dtype == torch.float32 else 1e-2) else ""
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001 (a card too old, no compiler: Triton raises anything)
        why = repr(error)
    if why:
        warnings.warn(f"the Triton kernel can't be used, torch is slower: {why}", stacklevel=2)
    return not why


# --- The kernel ---------------------------------------------------------------------
if triton:

    @triton.jit
    def row_kernel(
        logits, grad,  # (C, WIDTH), any float dtype; may be the same memory
        ids,  # (C,) int64; all that follow are float32 (C,)
        logps, entropies, tops, log_sums, slopes,
        old_logps, ref_logps, advantages, weights, sampler_logps,
        VOCAB: tl.constexpr, WIDTH: tl.constexpr, INV_T: tl.constexpr,
        READ: tl.constexpr, WRITE: tl.constexpr,
        CLIP_LOW: tl.constexpr, CLIP_HIGH: tl.constexpr, KL_BETA: tl.constexpr,
        CISPO: tl.constexpr, UNBIASED_KL: tl.constexpr,
        ON_POLICY: tl.constexpr, IS_CAP: tl.constexpr, RATIO_CAP: tl.constexpr,
        BLOCK: tl.constexpr,
    ):  # fmt: skip
        """One program, one row of logits; READ and WRITE are Rows.read and Rows.write.

        Memory per bf16 logit: READ reads 2 bytes, WRITE reads and writes 4. With both it is 4 to 6:
        the second read comes from the L2 cache as far as the rows in flight fit there, which for
        Qwen2.5 (304 KB a row, two rows per SM) they do in part. Not measured.
        """
        LOG2E: tl.constexpr = 1.4426950408889634
        row = tl.program_id(0).to(tl.int64)  # row * WIDTH exceeds 32 bits from 14 000 rows on
        logits += row * WIDTH
        grad += row * WIDTH
        target = tl.load(ids + row)
        z_target = tl.load(logits + target).to(tl.float32)  # before a gradient takes its place
        if READ:
            # Online softmax: total = sum exp((z - top) / T), moment = sum (z - top) exp(same).
            # When a larger logit turns up, both are rewritten for it.
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
                e = tl.exp2(below * (INV_T * LOG2E))
                shrink = tl.exp2((top - new_top) * (INV_T * LOG2E))
                moment = (moment + total * (top - new_top)) * shrink
                moment += tl.sum(tl.where(e > 0, e * below, 0.0), 0)  # 0 x -inf would be NaN
                total = total * shrink + tl.sum(e, 0)
                top = new_top
            log_sum = tl.log(total)
            logp = (z_target - top) * INV_T - log_sum
            tl.store(logps + row, logp)
            tl.store(entropies + row, log_sum - moment * INV_T / total)
            tl.store(tops + row, top)
            tl.store(log_sums + row, log_sum)
        if WRITE:
            if READ:
                # g = d loss / d logp of policy_loss, whose loss is weight * (KL_BETA kl - gain):
                #   gain = min(r A, clip(r) A)   d gain = r A, or 0 where the clipped one is smaller
                #   gain = sg(clip(r)) A logp    d gain = clip(r) A                          (CISPO)
                #   kl = exp(d) - d - 1 = k3     d kl = 1 - exp(d)            with d = ref - logp
                #   kl = r k3                    d kl = r k3 + r (1 - exp(d)) = - r d     (unbiased)
                advantage = tl.load(advantages + row)
                old = logp
                if not ON_POLICY:
                    old = tl.load(old_logps + row)
                ratio = tl.exp(logp - old)
                clipped = tl.minimum(tl.maximum(ratio, 1.0 - CLIP_LOW), 1.0 + CLIP_HIGH)
                if CISPO:
                    slope = clipped * advantage
                else:
                    slope = ratio * advantage
                    slope = tl.where(slope <= clipped * advantage, slope, 0.0)
                    if RATIO_CAP > 0:
                        slope = tl.where(ratio > RATIO_CAP, 0.0, slope)
                if IS_CAP > 0:
                    slope *= tl.minimum(tl.exp(old - tl.load(sampler_logps + row)), IS_CAP)
                if KL_BETA != 0:
                    d = tl.load(ref_logps + row) - logp
                    if UNBIASED_KL:
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
            slope *= INV_T
            for start in tl.range(0, WIDTH, BLOCK):  # the embedding's padding gets zeros
                columns = start + tl.arange(0, BLOCK)
                z = tl.load(logits + columns, mask=columns < WIDTH, other=float("-inf"))
                z = tl.where(columns < VOCAB, z.to(tl.float32), float("-inf"))
                p = tl.exp2((z - top) * (INV_T * LOG2E) - log_sum * LOG2E)
                dz = slope * (tl.where(columns == target, 1.0, 0.0) - p)
                tl.store(grad + columns, dz.to(grad.dtype.element_ty), mask=columns < WIDTH)


def launch(rows, logits, grad, part, tokens=(None,) * 4, settings=None, *, READ, WRITE):
    """Runs row_kernel on the rows `part`. What a mode does not read may be any tensor: `top`."""
    settings = settings or {}
    known = rows.logps, rows.entropy, rows.top, rows.log_sum, rows.slopes
    fields = *known, *tokens, settings.get("sampler_logps")
    row_kernel[(len(logits),)](
        logits,
        grad,
        rows.ids[part],
        *(rows.top if field is None else field[part].float().contiguous() for field in fields),
        VOCAB=rows.vocab_size,
        WIDTH=rows.width,
        INV_T=1 / rows.temperature,
        READ=READ,
        WRITE=WRITE,
        CLIP_LOW=settings.get("clip_low", 0.0),
        CLIP_HIGH=settings.get("clip_high", 0.0),
        KL_BETA=settings.get("kl_beta", 0.0),
        CISPO=settings.get("objective") == "cispo",
        UNBIASED_KL=settings.get("unbiased_kl", False),
        ON_POLICY=tokens[0] is None,
        IS_CAP=settings.get("is_cap", 0.0),
        RATIO_CAP=settings.get("ratio_cap", 0.0),
        **block_of(rows.width, logits.element_size()),
    )


def block_of(width, itemsize):
    """-> the columns that a program takes at once, 16 KB of them at most, and its warps."""
    block = min(16384 // itemsize, triton.next_power_of_2(width))
    return {"BLOCK": block, "num_warps": max(1, block * itemsize // 1024)}
