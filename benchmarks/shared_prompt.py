"""What it saves to run a group's prompt once, not G times: forward and backward, time and memory.

    python benchmarks/shared_prompt.py                   # prints the table
    python benchmarks/shared_prompt.py out.md            # and writes it to a file

A micro-batch of two groups goes through CompletionModel and the fused loss, and back, with random
weights: each row by itself ("rows"), as nearly every trainer does it, or prompts once ("shared"),
both with and without gradient checkpointing. CPU: a 1M-parameter Qwen2 in float32 on one core, as a
trainer has with one process a core. CUDA: Qwen2.5 0.5B and 3B in bf16. All completions have T
tokens; "mixed" ones have lengths from T / 4 to T, evenly spread, and are padded. Times are medians
of rounds in which all four run in turn. Peaks are beyond the weights, gradients included. The last
column is the largest relative difference of the gradient to that of the rows without checkpointing.
"""

import statistics
import sys
import time
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import grpo_loss_triton
from benchmarks.measure import DEVICE, KIND, apart, facts, peak_bytes
from grpo.forward import CompletionModel

MODELS = {
    "cpu": {"1M": (128, 384, 5, 4, 2, 1024)},  # hidden, inner, layers, heads, kv heads, vocabulary
    "gpu": {
        "Qwen2.5-0.5B": (896, 4864, 24, 14, 2, 151_936),
        "Qwen2.5-3B": (2048, 11_008, 36, 16, 2, 151_936),
    },
}[KIND]
CASES = {  # P, T, G, mixed
    "cpu": [
        (200, 64, 8, False),
        (200, 160, 8, False),
        (400, 64, 8, False),
        (400, 256, 8, False),
        (100, 256, 8, False),
        (200, 256, 8, True),
        (800, 64, 16, False),
    ],
    "gpu": [
        (512, 128, 8, False),
        (512, 512, 8, False),
        (512, 512, 8, True),
        (2048, 512, 8, False),
    ],
}[KIND]
GROUPS = 2
ROUNDS = 5
WAYS = {  # name: share_prompts, gradient_checkpointing
    "rows": (False, False),
    "shared": (True, False),
    "rows, checkpointing": (False, True),
    "shared, checkpointing": (True, True),
}


def make_model(sizes, share, checkpointing):
    hidden, inner, layers, heads, kv_heads, vocabulary = sizes
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    dtype = torch.bfloat16 if KIND == "gpu" else torch.float32
    with torch.device(DEVICE):
        model = Qwen2ForCausalLM(config).to(dtype)
    return CompletionModel(model, share_prompts=share, gradient_checkpointing=checkpointing)


def make_rows(case, vocabulary):
    """-> prompts, completions: GROUPS groups of G rows; prompts differ a little in length."""
    prompt_tokens, tokens, group, mixed = case
    draw = torch.Generator().manual_seed(0)
    prompts, completions = [], []
    for number in range(GROUPS):
        size = (prompt_tokens - 7 * number,)
        prompts += [torch.randint(vocabulary, size, generator=draw).tolist()] * group
        for i in range(group):
            length = tokens - tokens * 3 * i // (4 * (group - 1)) if mixed else tokens
            completions.append(torch.randint(vocabulary, (length,), generator=draw).tolist())
    return prompts, completions


def run(model, prompts, completions):
    """-> seconds of forward and backward; the gradients stay in the model."""
    for parameter in model.parameters():
        parameter.grad = None
    if KIND == "gpu":
        torch.accelerator.synchronize()
    started = time.perf_counter()
    hidden, ids = model(prompts, completions)
    advantages = torch.linspace(-1, 1, len(ids), device=ids.device)
    weights = torch.full_like(advantages, 1 / len(ids))
    settings = {"clip_low": 0.2, "clip_high": 0.2, "kl_beta": 0.0}
    loss, _ = grpo_loss_triton.grpo_loss(
        hidden, model.head, ids, None, None, advantages, weights, **settings
    )
    loss.backward()
    if KIND == "gpu":
        torch.accelerator.synchronize()
    return time.perf_counter() - started


def seconds(models, rows):
    """-> for each way the median of ROUNDS, and its gradient's distance from the first way's."""
    for model in models:
        run(model, *rows)
    gradients = [torch.cat([p.grad.flatten() for p in m.parameters()]).float() for m in models]
    gaps = [((g - gradients[0]).norm() / gradients[0].norm()).item() for g in gradients]
    times = [[run(model, *rows) for model in models] for _ in range(ROUNDS)]
    return [statistics.median(column) for column in zip(*times, strict=True)], gaps


def peak(model, rows):
    few = make_rows((8, 2, 2, False), 100)
    return peak_bytes(lambda: run(model, *rows), lambda: run(model, *few))


def main():
    pieces = [f"# Prompts that run once\n\n{facts('torch', 'transformers')}"]
    pieces.append(__doc__.split("\n\n", 2)[2].rstrip())
    if DEVICE == "cpu":
        torch.set_num_threads(1)
    for name, sizes in MODELS.items():
        models = [make_model(sizes, *way) for way in WAYS.values()]
        million = sum(p.numel() for p in models[0].parameters()) / 1e6
        lines = [f"## {name}: {million:.2f}M parameters\n"]
        lines.append("| P | T | G | | ms | x rows | MiB | x rows | gradient |")
        lines.append("|---" * 9 + "|")
        for case in CASES:
            rows = make_rows(case, sizes[-1])
            times, gaps = apart(seconds, models, rows, threads=1)
            peaks = [apart(peak, model, rows, threads=1) for model in models]
            for i, way in enumerate(WAYS):
                base = i // 2 * 2  # the rows' way, with the same checkpointing
                cells = [*case[:3], ("mixed, " if case[3] else "") + way, f"{times[i] * 1e3:.0f}"]
                cells += [f"{times[base] / times[i]:.2f}", f"{peaks[i] / 2**20:.0f}"]
                cells += [f"{peaks[base] / peaks[i]:.2f}", f"{gaps[i]:.0e}" if i else ""]
                lines.append("| " + " | ".join(map(str, cells)) + " |")
            print(lines[-3], file=sys.stderr)
        pieces.append("\n".join(lines))
    text = "\n\n".join(pieces) + "\n"
    print(text)
    for name in sys.argv[1:]:
        Path(name).write_text(text)


if __name__ == "__main__":
    if {"-h", "--help"} & set(sys.argv):
        sys.exit(__doc__)
    main()
