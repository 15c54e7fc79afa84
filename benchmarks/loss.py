"""Our fused loss against its peers: time, peak memory and error, as Markdown tables.

    python benchmarks/loss.py                        # every shape of this machine's device
    python benchmarks/loss.py Qwen2.5-0.5B out.md    # one shape; and the tables into a file

Runs on CUDA (bf16) where there is a GPU, else on the CPU (float32, Linux). In .venv peers
are listed as not installed; benchmarks/requirements-peers.txt makes a venv of them.

A row is a way from hidden states and LM head to the loss and its gradients. All get one batch:
sequences of T tokens padded on the right, loss type "grpo", clip 0.2, KL 0.04, temperature 1. Those
that can leave padding out before the head (ours, plain, TRL's fused head) do so within their time
and memory; the others see all of it, as in their trainers. "Bare GEMMs" are the three
products of the trained tokens and no more: the ceiling of whatever makes the logits once. Ours
makes them twice, in four products.

Times are medians of rounds in which all rows take turns, so that drift hits all alike; on CUDA by
events, the L2 cache overwritten before each run. "x bare" is the time of forward and backward over
that of the bare GEMMs. Liger's makes gradients in the forward pass: only the sum compares.
Peaks are of forward and backward, gradients included, beyond the inputs; "x floor" is over
dH + dW + one chunk of logits as ours cuts them. On CUDA they are those of torch's allocator, on a
CPU the kernel's high-water mark of resident memory (VmHWM) in a forked process per row, after a run
on 64 tokens, with freed memory given back at once (mallopt, all rows alike). Errors are against
float64 autograd of the formula on 64 tokens, a quarter of them padding: of the loss absolute, of dH
and dW relative (Frobenius), of log-probs the largest, in nats.
"""

import functools
import importlib
import math
import statistics
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import grpo_loss_triton
from benchmarks.measure import CORES, DEVICE, KIND, apart, facts, peak_bytes
from grpo import chunked
from grpo import loss as grpo_loss

# --- What is measured ---------------------------------------------------------------
SHAPES = {  # name: (H, V')
    "Qwen2.5-0.5B": (896, 151936),
    "Qwen2.5-3B": (2048, 151936),
    "Qwen2.5-7B": (3584, 152064),
    "small": (256, 32000),
}
CASES = {  # (padded tokens, share of them that is trained) of each shape
    "gpu": {
        shape: [(tokens, valid) for tokens in (4096, 16_384, 65_536) for valid in (1.0, 0.5)]
        for shape in ("Qwen2.5-0.5B", "Qwen2.5-3B", "Qwen2.5-7B")
    },
    "cpu": {
        "Qwen2.5-0.5B": [(256, 1.0)],
        "small": [(1024, 1.0), (4096, 0.5)],
    },
}[KIND]
SEQUENCE_TOKENS = {"gpu": 512, "cpu": 256}[KIND]  # T
DTYPE = {"gpu": torch.bfloat16, "cpu": torch.float32}[KIND]
CLIP, KL_BETA = 0.2, 0.04
SETTINGS = {"clip_low": CLIP, "clip_high": CLIP, "kl_beta": KL_BETA}
ROUNDS = {"gpu": (5, 30), "cpu": (3, 9)}[KIND]  # at least, at most; between them TABLE_SECONDS
TABLE_SECONDS = 10
FLUSH_BYTES = 256 << 20  # overwritten before each run on CUDA: more than any L2 cache


def make_batch(shape, tokens, valid, sequence_tokens):
    """-> hidden (B, T, H), weight (V', H), per-token tensors (B, T); the logits have a std near 1.

    old_logps are the policy's log-probs but for a noise of 0.2: with Gaussian weights,
    log sum exp z is log V' + |h|^2 / 2H to about 1e-2.
    """
    height, width = SHAPES[shape]
    made = torch.Generator(DEVICE).manual_seed(0)
    randn = functools.partial(torch.randn, generator=made, device=DEVICE)
    size = (max(1, tokens // sequence_tokens), min(tokens, sequence_tokens))  # B, T
    hidden = randn(*size, height, dtype=DTYPE)
    weight = randn(width, height, dtype=DTYPE).mul_(height**-0.5)
    ids = torch.randint(width, size, generator=made, device=DEVICE)
    spread = torch.linspace(-0.5, 0.5, size[0]) if size[0] > 1 else torch.zeros(1)
    lengths = (size[1] * (valid + (1 - valid) * spread)).round().long().to(DEVICE)
    mask = torch.arange(size[1], device=DEVICE) < lengths[:, None]
    target = torch.stack([(h * weight[i]).float().sum(-1) for h, i in zip(hidden, ids)])
    logps = target - math.log(width) - hidden.float().square().sum(-1) / (2 * height)
    return SimpleNamespace(
        packed=(hidden[mask] if valid < 1 else hidden.view(-1, height)).requires_grad_(),
        hidden=hidden.detach().requires_grad_(),
        weight=weight.requires_grad_(),
        ids=ids,
        mask=mask,
        old_logps=logps + 0.2 * randn(*size),
        ref_logps=logps + 0.2 * randn(*size),
        advantages=randn(size[0]),
        weights=mask / (size[0] * lengths[:, None]),
    )


# --- The losses: batch -> loss --------------------------------------------------------
peer = importlib.import_module  # where it is used: a peer that is not there costs one row


class BareProducts(torch.autograd.Function):
    """The three products, with the logits in the place of their gradient."""

    @staticmethod
    def forward(ctx, hidden, weight):
        logits = hidden @ weight.T
        ctx.save_for_backward(hidden, weight, logits)
        return logits[0, 0].float()

    @staticmethod
    def backward(ctx, _):
        hidden, weight, logits = ctx.saved_tensors
        return logits @ weight, logits.T @ hidden


def ours(b, chunks_in_bf16=chunked.CHUNKS_IN_OWN_DTYPE):
    chunked.CHUNKS_IN_OWN_DTYPE = chunks_in_bf16  # the backward pass reads it
    return with_policy_loss(our_logps, True)(b)


def liger_fused(b, whole=False, compiled=False, precision="highest"):
    loss = peer("liger_kernel.chunked_loss").LigerFusedLinearGRPOLoss
    sizes = {"epsilon_low": CLIP, "epsilon_high": CLIP, "chunk_size": len(b.ids) if whole else 1}
    logps = {"ref_per_token_logps": b.ref_logps, "old_per_token_logps": b.old_logps}
    torch.set_float32_matmul_precision(precision)  # of its gradients' products; run() undoes it
    loss = loss(KL_BETA, compiled, loss_type="grpo", **sizes)
    return loss(b.hidden, b.weight, b.ids, b.mask, b.advantages, **logps)[0]


def liger_on_logits(b):
    loss = peer("liger_kernel.transformers.grpo_loss").triton_grpo_loss
    tokens = (b.old_logps, b.ref_logps, b.ids, b.advantages, b.mask)
    settings = {"loss_type": "grpo", "reduce": True, "eps_low": CLIP, "eps_high": CLIP}
    logits = logits_and_one_more(b.hidden, b.weight)
    return loss(logits, *tokens, temperature=1.0, beta=KL_BETA, **settings)[0]


def logits_and_one_more(hidden, weight):
    """-> (B, T + 1, V'): Liger's kernels want a model's logits: their last row predicts nothing."""
    return torch.nn.functional.pad(hidden, (0, 0, 0, 1)) @ weight.T


def with_policy_loss(logps_of, unpadded):
    """-> the loss of these log-probs by our formula. `unpadded`: they are asked for no padding."""

    def loss(b):
        advantages = b.advantages[:, None].expand_as(b.ids)
        tensors = (b.hidden, b.ids, b.old_logps, b.ref_logps, advantages, b.weights)
        hidden, ids, *tokens = (t[b.mask] for t in tensors) if unpadded else tensors
        logps = logps_of(hidden, b.weight, ids, True).float().view(ids.shape)
        return grpo_loss.policy_loss(logps, *tokens, **SETTINGS)[0]

    return loss


# --- The log-probs: hidden, weight, ids, training -> logps ----------------------------
def our_logps(hidden, weight, ids, training):
    return chunked.linear_logps(hidden, weight, ids)


def triton_logps(hidden, weight, ids, training):
    return grpo_loss_triton.linear_logps(hidden, weight, ids)


def plain_logps(hidden, weight, ids, training):
    logps = grpo_loss.linear_logps(hidden, weight, ids, entropy=training)
    return logps[0] if training else logps


def row_loop(hidden, weight, ids, training):
    """What simple_GRPO does: the softmax of one sequence after another, in the model's dtype."""
    rows = zip(hidden @ weight.T, ids)
    return torch.stack([z.log_softmax(-1).gather(1, i[:, None])[:, 0] for z, i in rows])


def trl_fused_head(hidden, weight, ids, training):
    """The head that TRL's GRPOTrainer gives its policy (with the entropy) and its reference."""
    utils = peer("trl.trainer.utils")
    settings = (1.0, utils._CHUNKED_LOGPROB_CHUNK_SIZE, None, 1.0)
    outputs = ("log_probs", "entropy") if training else ("log_probs",)
    flat = (hidden.reshape(-1, hidden.shape[-1]), weight, None, ids.reshape(-1))
    return utils._ChunkedLogProbFunction.apply(*flat, *settings, outputs)[0]


def liger_of_fused(hidden, weight, ids, training):
    base = peer("liger_kernel.chunked_loss.fused_linear_ppo").LigerFusedLinearPPOBase
    return base.chunk_forward(hidden, weight, ids)


def liger_of_logits(hidden, weight, ids, training):
    logps_of = peer("liger_kernel.ops.grpo_loss").fused_selective_log_softmax
    return logps_of(logits_and_one_more(hidden, weight), ids, temperature=1.0)


def forward_only(logps_of):
    return torch.no_grad()(lambda b: logps_of(b.hidden, b.weight, b.ids, False))


BARE, OURS, PLAIN = "bare GEMMs", "**ours**", "plain torch (grpo/loss.py)"
PER_TOKEN = {  # name: (log-probs, whether they need no padding)
    **({"ours, FUSED_LOSS = True": (triton_logps, True)} if KIND == "gpu" else {}),
    PLAIN: (plain_logps, True),
    "simple_GRPO's row loop": (row_loop, False),
    "TRL, its trainer's fused head": (trl_fused_head, True),
}
LOSSES = {
    BARE: lambda b: BareProducts.apply(b.packed, b.weight),
    OURS: ours,
    **{name: with_policy_loss(*way) for name, way in PER_TOKEN.items()},
    "Liger fused, by sequence (default)": liger_fused,
    "Liger fused, all sequences at once": functools.partial(liger_fused, whole=True),
}
LOGPS = {
    BARE: forward_only(lambda hidden, weight, ids, training: hidden @ weight.T),
    OURS: forward_only(our_logps),
    **{name: forward_only(logps_of) for name, (logps_of, _) in PER_TOKEN.items()},
    "Liger, that of its fused loss": forward_only(liger_of_fused),
}
if KIND == "gpu":  # what needs Triton, or differs there alone
    LOSSES |= {
        "ours, dW summed in float32": functools.partial(ours, chunks_in_bf16=0),
        "Liger fused, at once, TF32": functools.partial(liger_fused, whole=True, precision="high"),
        "Liger fused, at once, compiled": functools.partial(liger_fused, whole=True, compiled=True),
        "Liger triton_grpo_loss on logits": liger_on_logits,
    }
    LOGPS["Liger, on logits"] = forward_only(liger_of_logits)


# --- Measuring ------------------------------------------------------------------------
def run(method, b):
    """-> (result, milliseconds of its forward pass, and of forward and backward)."""
    clear(b)
    torch.set_float32_matmul_precision("highest")
    if KIND == "gpu":
        flush_buffer().zero_()
    marks = [mark()]
    result = method(b)
    marks.append(mark())
    if result.requires_grad:
        result.backward()
    marks.append(mark())
    if DEVICE == "cpu":
        return result.detach(), *(1e3 * (m - marks[0]) for m in marks[1:])
    torch.accelerator.synchronize()
    return result.detach(), *(marks[0].elapsed_time(m) for m in marks[1:])


def clear(b):
    b.hidden.grad = b.weight.grad = b.packed.grad = None


def mark():
    if DEVICE == "cpu":
        return time.perf_counter()
    event = torch.Event(device=DEVICE, enable_timing=True)
    event.record()
    return event


@functools.cache
def flush_buffer():
    return torch.empty(FLUSH_BYTES, dtype=torch.int8, device=DEVICE)


def errors(method, reference, b):
    """-> distances of the result, dH and dW from float64's. Raises what the method raises."""
    exact = {k: t.detach().double() if t.is_floating_point() else t for k, t in vars(b).items()}
    exact = SimpleNamespace(**exact)
    exact.hidden.requires_grad_(), exact.weight.requires_grad_()
    difference = run(method, b)[0].view(-1) - run(reference, exact)[0].view(-1)
    found = [difference.abs().max().item()]
    for tensor, right in ((b.hidden, exact.hidden), (b.weight, exact.weight)):
        if right.grad is not None:
            found.append(((tensor.grad - right.grad).norm() / right.grad.norm()).item())
    return [f"{error:.1e}" for error in found]


def milliseconds(methods, b):
    """-> {name: (of the forward pass, of both)}, medians."""
    times, started = {name: [] for name in methods}, time.perf_counter()
    for done in range(ROUNDS[1]):
        if done >= ROUNDS[0] and time.perf_counter() - started > TABLE_SECONDS:
            break
        for name, method in methods.items():
            times[name].append(run(method, b)[1:])
    clear(b)
    return {name: [statistics.median(t) for t in zip(*rounds)] for name, rounds in times.items()}


# --- The tables -----------------------------------------------------------------------
def main():
    torch.set_num_threads(1 if DEVICE == "cpu" else CORES)
    shapes = [name for name in sys.argv[1:] if name in SHAPES] or list(CASES)
    files = [Path(name) for name in sys.argv[1:] if name.endswith(".md")]
    peers = ("torch", "triton", "trl", "liger-kernel")
    title = f"# The loss and its peers\n\n{facts(*peers)} Dtype {DTYPE}."
    pieces = []

    def add(piece):
        pieces.append(piece)
        print(piece, end="\n\n", flush=True)  # each as soon as it is measured

    add(title)
    add(__doc__.split("\n\n", 3)[3].rstrip())
    for shape in shapes:
        small = make_batch(shape, 64, 0.75, 16)
        for kind, methods in (("loss", LOSSES), ("log-probs", LOGPS)):
            found, missing = try_out(methods, small)
            cases = CASES[shape] if kind == "loss" else [c for c in CASES[shape] if c[1] == 1]
            for tokens, valid in cases[: 1 if (kind, DEVICE) == ("log-probs", "cpu") else None]:
                print(f"{shape}, {kind}: {tokens} tokens", file=sys.stderr)
                b = make_batch(shape, tokens, valid, SEQUENCE_TOKENS)
                title = f"## {shape}, {kind}: {tokens} tokens, {1 - valid:.0%} of them padding"
                add(f"{title}\n\n{measure(methods, found, b, small)}")
            if missing:
                add("\n".join(f"- n/a: {name}: {why}" for name, why in missing.items()))
    text = "\n\n".join(pieces) + "\n"
    for file in files:
        file.write_text(text)


def try_out(methods, small):
    """-> ({name: errors}, {name: why there are none}). Any exception of a peer's is its answer."""
    found, missing = {BARE: ["", "", ""]}, {}
    for name, method in methods.items():
        try:
            found[name] = found.get(name) or errors(method, methods[PLAIN], small)
        except Exception as error:  # noqa: BLE001, whatever it is
            missing[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:90]}"
            assert "ours" not in name, error
    clear(small)
    return found, missing


def row_peak(method, b, small):
    def warm_up():
        # CUDA: the run itself, which compiles and tunes kernels
        again = b if KIND == "gpu" else small
        run(method, again)
        clear(again)

    return peak_bytes(lambda: run(method, b), warm_up)


def measure(methods, found, b, small):
    """-> the table of the methods in `found`."""
    peaks = {name: apart(row_peak, methods[name], b, small) for name in found}
    fitting = {name: methods[name] for name in found if peaks[name] is not None}
    times = apart(milliseconds, fitting, b)
    training = methods is LOSSES
    tokens, itemsize = len(b.packed), b.weight.element_size()
    each = itemsize if itemsize == 4 else 4 + training * itemsize  # of a logit, and its gradient
    chunk = min(tokens, chunked.chunk_rows(b.packed, b.weight))
    chunk *= len(b.weight) * each
    floor = chunk + training * (b.hidden.nbytes + b.weight.nbytes)
    columns = "forward | and backward | x bare | " if training else "ms | x bare | "
    columns += "peak MiB | x floor | error of loss | dH | dW" if training else "peak MiB | error"
    lines = [f"| | {columns} |", "|---" * (columns.count("|") + 2) + "|"]
    for name, error in found.items():
        if name not in fitting:
            lines.append(f"| {name} | out of memory |")
            continue
        forward, both = times[name]
        cells = [f"{forward:.1f}"] * training + [f"{both:.1f}", f"{both / times[BARE][1]:.2f}"]
        cells += [f"{peaks[name] / 2**20:.0f}"] + [f"{peaks[name] / floor:.2f}"] * training
        lines.append(" | ".join([f"| {name}", *cells, *error[: 3 if training else 1]]) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    if {"-h", "--help"} & set(sys.argv):
        sys.exit(__doc__)
    main()
