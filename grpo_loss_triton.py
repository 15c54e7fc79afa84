"""FUSED_LOSS = True: the log-probs of grpo/chunked.py, by kernels in Triton, on a GPU of NVIDIA's.

    forward    `forward_kernel` reads a chunk's logits once, and writes log-probs and entropies
    backward   `backward_kernel` reads them once, and writes their gradient in place

chunked.py has the derivation, and the same in torch, which is the default. No GPU has run these
kernels for us: tests run them in Triton's interpreter, and compile them ahead.
"""

from grpo import chunked
from grpo.devices import is_nvidia

try:
    import triton
    import triton.language as tl
except ImportError:  # not Linux, or torch without CUDA
    triton = None


def linear_logps(hidden, head, ids, **settings):
    """Returns the same as grpo.chunked.linear_logps. SystemExit if Triton can't run here."""
    check_device(hidden.device)
    kernels = triton_forward, triton_backward
    return chunked.linear_logps(hidden, head, ids, **settings, kernels=kernels)


def check_device(device):
    if triton is None or not is_nvidia(device):
        raise SystemExit(
            f"FUSED_LOSS = True needs Triton and a GPU of NVIDIA's, not {device.type}: set it to"
            " False, which computes the same in torch"
        )


# --- One program handles one row of logits --------------------------------------------
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
