"""Groups sampled a second: ours against transformers' generate and continuous batching, and vLLM.

    python benchmarks/sampling.py            # prints the table; with vLLM where it is installed
    python benchmarks/sampling.py out.md     # and writes it to a file

The model counts (tests/counting.py): completions end by themselves after 64 to 256 tokens, all
lengths equally likely, or are cut at 64. There are 8 prompts x 8 completions at temperature 1, with
no top-p or top-k. generate gets 64 sequences, each with its prompt, as trainers call it. CPU: 1M
parameters, float32, one thread. CUDA: the shapes of Qwen2.5 0.5B and 3B, bf16, 64 prompts x 8.

Tokens a second are medians of ROUNDS rounds, in which all engines except vLLM run in turn, after a
round that does not count. Continuous batching takes 5 s or more a call on a CPU, whatever the
batch, so it runs once. vLLM runs in a separate process after the others.
"""

import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import torch
from transformers import GenerationConfig

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
from counting import SHAPE, SPECIALS, build, make_tokenizer, prompt

from benchmarks import memory
from benchmarks.measure import DEVICE, KIND, facts
from grpo.sampling.sampler import sample_groups

QWEN = {name: memory.untied(name) for name in ("Qwen2.5-0.5B", "Qwen2.5-3B")}
MODELS = {"cpu": {"1M": SHAPE}, "gpu": QWEN}[KIND]
CASES = [(200, 256), (400, 64)]  # prompt tokens, completion tokens at most
PROMPTS = {"cpu": 8, "gpu": 64}[KIND]
GROUP = 8
ROUNDS = 5
EOS = SPECIALS.index("<eos>")
VOCAB = len(make_tokenizer())


def make_prompts(tokens):
    tokenizer, draw = make_tokenizer(), torch.Generator().manual_seed(1)
    return [tokenizer(prompt(tokens, draw))["input_ids"] for _ in range(PROMPTS)]


def pinned(tokens):
    """-> generate's settings: the whole distribution, and nothing of the model's own."""
    return GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=tokens,
        eos_token_id=EOS,
        pad_token_id=SPECIALS.index("<pad>"),
    )


def ours(model, prompts, tokens, seed):
    groups = sample_groups(
        model,
        prompts,
        group_size=GROUP,
        max_new_tokens=tokens,
        temperature=1.0,
        eos_ids={EOS},
        vocab_size=VOCAB,
        generator=torch.Generator(model.device).manual_seed(seed),
    )
    return sum(len(c.ids) for group in groups for c in group)


@torch.no_grad()
def generate(model, prompts, tokens, seed):
    torch.manual_seed(seed)
    ids = torch.tensor(prompts, device=model.device).repeat_interleave(GROUP, 0)
    settings = {"attention_mask": torch.ones_like(ids), "generation_config": pinned(tokens)}
    out = model.generate(ids, **settings)[:, ids.shape[1] :]
    return int((out != SPECIALS.index("<pad>")).sum())


@torch.no_grad()
def continuous(model, prompts, tokens, seed):
    torch.manual_seed(seed)
    rows = [ids for ids in prompts for _ in range(GROUP)]
    outputs = model.generate_batch(
        inputs=rows, generation_config=pinned(tokens), progress_bar=False
    )
    return sum(len(output.generated_tokens) for output in outputs.values())


def tokens_per_second(run, *arguments):
    if KIND == "gpu":
        torch.accelerator.synchronize()
    began = time.perf_counter()
    count = run(*arguments)
    if KIND == "gpu":
        torch.accelerator.synchronize()
    return count / (time.perf_counter() - began)


def compare(model, prompt_tokens, tokens):
    """-> {engine: tokens a second} of those of this venv."""
    prompts, rates = make_prompts(prompt_tokens), {}
    for seed in range(ROUNDS + 1):
        for run in (ours, generate):
            rate = tokens_per_second(run, model, prompts, tokens, seed)
            if seed:
                rates.setdefault(run.__name__, []).append(rate)
    medians = {name: statistics.median(values) for name, values in rates.items()}
    try:
        times = range(1 if DEVICE == "cpu" else 3)
        rates = [tokens_per_second(continuous, model, prompts, tokens, seed) for seed in times]
        medians["continuous batching"] = max(rates)
    except Exception as error:  # noqa: BLE001 (a peer that does not run here is said to)
        print(f"continuous batching: {error!r}"[:300], flush=True)
    return medians


def vllm(folder, prompt_tokens, tokens):
    """Run in a process of its own: prints the median tokens a second, as JSON."""
    from grpo.sampling.vllm_policy import VLLMPolicy

    prompt_tokens, tokens = int(prompt_tokens), int(tokens)
    c = SimpleNamespace(
        MODEL=folder,
        DTYPE="auto",
        GROUP_SIZE=GROUP,
        SAMPLE_BATCH=PROMPTS * GROUP,
        MAX_PROMPT_TOKENS=prompt_tokens,
        MAX_COMPLETION_TOKENS=tokens,
        STOP_TOKENS=[],
        STOP_STRINGS=[],
        SEED=0,
        VLLM_CACHE_GB=1.0 if DEVICE == "cpu" else 40.0,
        VLLM_SLEEP=False,
        TENSOR_PARALLEL=1,
    )
    policy = VLLMPolicy(c, make_tokenizer())
    prompts, rates = make_prompts(prompt_tokens), []
    for seed in range(4):
        began = time.perf_counter()
        settings = {"max_sequences": PROMPTS * GROUP, "max_new_tokens": tokens, "seed": seed}
        groups = policy.stream(enumerate(prompts), group_size=GROUP, temperature=1.0, **settings)
        count = sum(len(c.ids) for _, group in groups for c in group)
        rates.append(count / (time.perf_counter() - began))
    print(json.dumps(statistics.median(rates[1:])))


def main(out):
    if DEVICE == "cpu":
        torch.set_num_threads(1)
    with_vllm = importlib.util.find_spec("vllm")
    engines = ["ours", "generate", "continuous batching", *(["vLLM"] if with_vllm else [])]
    lines = [f"| model | prompt | completion | {' | '.join(engines)} | ours / generate |"]
    lines.append("|" + "---|" * (4 + len(engines)))
    for name, shape in MODELS.items():
        model = build(shape)
        if KIND == "gpu":
            model = model.to(DEVICE, torch.bfloat16)
        for prompt_tokens, tokens in CASES:
            rates = compare(model, prompt_tokens, tokens)
            if with_vllm:
                with tempfile.TemporaryDirectory() as folder:
                    model.save_pretrained(folder)
                    make_tokenizer().save_pretrained(folder)
                    words = [__file__, "vllm", folder, str(prompt_tokens), str(tokens)]
                    environment = os.environ | {"OMP_NUM_THREADS": "1"}
                    printed = subprocess.check_output([sys.executable, *words], env=environment)
                    rates["vLLM"] = json.loads(printed.splitlines()[-1])
            columns = [f"{rates[e]:.0f}" if e in rates else "failed" for e in engines]
            length = "64 to 256" if tokens == 256 else f"cut at {tokens}"
            ratio = rates["ours"] / rates["generate"]
            lines.append(
                f"| {name} | {prompt_tokens} | {length} | {' | '.join(columns)} | {ratio:.2f} |"
            )
            print(lines[-1], flush=True)
    text = "\n".join([facts("torch", "transformers"), "Tokens a second.", "", *lines, ""])
    print(text)
    if out:
        Path(out).write_text(text)


if __name__ == "__main__":
    if {"-h", "--help"} & set(sys.argv):
        sys.exit(__doc__)
    if sys.argv[1:2] == ["vllm"]:
        vllm(*sys.argv[2:])
    else:
        main(sys.argv[1] if len(sys.argv) > 1 else None)
