"""Tokens sampled a second: ours against transformers' generate, and vLLM.

    python benchmarks/sampling.py            # prints the table; with vLLM where it is installed
    python benchmarks/sampling.py out.md     # and writes it to a file
    python benchmarks/sampling.py runs/smollm2_135m [out.md]    # of a model's folder

The model counts (benchmarks/counting.py): completions end by themselves after 64 to 256 tokens, all
lengths equally likely, or are cut at 64. There are 8 prompts x 8 completions at temperature 1, with
no top-p or top-k. generate gets 64 sequences, each with its prompt, as trainers call it. CPU: 1M
parameters, float32, one thread. CUDA: the shapes of Qwen2.5 0.5B and 3B, bf16, 64 prompts x 8. A
model from a folder answers questions of tasks/sums.py with 16 tokens at most, 8 times each, at
temperature 0.8: 8 and 64 sequences, on all cores, in two rounds that count.

Tokens a second are medians of ROUNDS rounds, in which all engines except vLLM run in turn, after a
round that does not count. vLLM runs in a separate process after the others.
"""

import importlib.util
import itertools
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
sys.path.insert(0, str(ROOT))
from benchmarks import memory
from benchmarks.counting import SHAPE, SPECIALS, build, make_tokenizer, prompt
from benchmarks.measure import DEVICE, KIND, facts
from grpo.models import load_tokenizer, prompt_ids, whole_model
from grpo.sample import Prompt
from grpo.sampler import sample_groups
from tasks import sums

QWEN = {name: memory.untied(name) for name in ("Qwen2.5-0.5B", "Qwen2.5-3B")}
MODELS = {"cpu": {"1M": SHAPE}, "gpu": QWEN}[KIND]
CASES = [(200, 256), (400, 64)]  # prompt tokens, completion tokens at most
PROMPTS = {"cpu": 8, "gpu": 64}[KIND]
GROUP = 8
ROUNDS = 5


def counting_case(prompt_tokens, tokens):
    """-> what is sampled with the model that counts."""
    tokenizer, draw = make_tokenizer(), torch.Generator().manual_seed(1)
    texts = [prompt(prompt_tokens, draw) for _ in range(PROMPTS)]
    eos, pad = (SPECIALS.index(name) for name in ("<eos>", "<pad>"))
    ids = [tokenizer(text)["input_ids"] for text in texts]
    more = {"temperature": 1.0, "vocab": len(tokenizer)}
    return {"prompts": ids, "tokens": tokens, "eos": [eos], "pad": pad, **more}


def real_case(tokenizer, number):
    """-> what is sampled with a real model: `number` questions."""
    ids = [prompt_ids(tokenizer, sums.messages(item)) for item in sums.load("test")[:number]]
    eos = [tokenizer.eos_token_id]
    more = {"temperature": 0.8, "vocab": len(tokenizer), "rounds": 2}
    return {"prompts": ids, "tokens": 16, "eos": eos, "pad": tokenizer.pad_token_id, **more}


def pinned(case):
    """-> generate's settings: the whole distribution, none of the model's settings."""
    return GenerationConfig(
        do_sample=True,
        temperature=case["temperature"],
        top_k=0,
        top_p=1.0,
        max_new_tokens=case["tokens"],
        eos_token_id=case["eos"],
        pad_token_id=case["pad"],
    )


def ours(model, case, seed):
    groups = sample_groups(
        model,
        case["prompts"],
        group_size=GROUP,
        max_new_tokens=case["tokens"],
        temperature=case["temperature"],
        eos_ids=set(case["eos"]),
        vocab_size=case["vocab"],
        generator=torch.Generator(model.device).manual_seed(seed),
    )
    return sum(len(c.ids) for group in groups for c in group)


@torch.no_grad()
def generate(model, case, seed):
    torch.manual_seed(seed)
    rows = [ids for ids in case["prompts"] for _ in range(GROUP)]
    width = max(map(len, rows))
    ids = torch.tensor([[case["pad"]] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    settings = {"attention_mask": mask.to(model.device), "generation_config": pinned(case)}
    out = model.generate(ids.to(model.device), **settings)[:, width:]
    ends = torch.isin(out, torch.tensor(case["eos"], device=out.device)).long()
    return int((ends.cumsum(1) - ends == 0).sum())  # up to the first end of each row


def tokens_per_second(run, *arguments):
    if KIND == "gpu":
        torch.accelerator.synchronize()
    began = time.perf_counter()
    count = run(*arguments)
    if KIND == "gpu":
        torch.accelerator.synchronize()
    return count / (time.perf_counter() - began)


def compare(model, case):
    """-> {engine: tokens a second} of those of this venv."""
    rates = {}
    for seed in range(case.get("rounds", ROUNDS) + 1):
        for run in (ours, generate):
            rate = tokens_per_second(run, model, case, seed)
            if seed:
                rates.setdefault(run.__name__, []).append(rate)
    return {name: statistics.median(values) for name, values in rates.items()}


def vllm(folder):
    """Run in a separate process: prints the median tokens a second, as JSON."""
    from grpo.options.vllm_policy import VLLMPolicy

    case = json.loads(Path(folder, "case.json").read_text())
    prompts, rates = case["prompts"], []
    c = SimpleNamespace(
        MODEL=folder,
        DTYPE="auto" if DEVICE != "cpu" else "float32",
        GROUP_SIZE=GROUP,
        SAMPLE_BATCH=len(prompts) * GROUP,
        MAX_PROMPT_TOKENS=max(map(len, prompts)),
        MAX_COMPLETION_TOKENS=case["tokens"],
        STOP_TOKENS=[],
        STOP_STRINGS=[],
        SEED=0,
        VLLM_CACHE_GB=1.0 if DEVICE == "cpu" else 40.0,
    )
    policy = VLLMPolicy(c, load_tokenizer(folder))
    for seed in range(case.get("rounds", 3) + 1):
        policy.llm.reset_prefix_cache()  # as new weights do
        began = time.perf_counter()
        settings = {"max_sequences": len(prompts) * GROUP, "max_new_tokens": case["tokens"]}
        settings |= {"temperature": case["temperature"], "seed": seed}
        asked = itertools.starmap(Prompt, enumerate(prompts))
        groups = policy.stream(asked, group_size=GROUP, **settings)
        count = sum(len(c.ids) for _, group in groups for c in group)
        rates.append(count / (time.perf_counter() - began))
    print(json.dumps(statistics.median(rates[1:])))


def all_rates(model, tokenizer, case):
    """-> {engine: tokens a second}."""
    rates = compare(model, case)
    if importlib.util.find_spec("vllm"):
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            Path(folder, "case.json").write_text(json.dumps(case))
            environment = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())}
            command = [sys.executable, __file__, "vllm", folder]
            printed = subprocess.check_output(command, env=environment)
            rates["vLLM"] = json.loads(printed.splitlines()[-1])
    return rates


def cases(folder):
    """Yields each row's first cells, model, tokenizer and case."""
    if folder:
        model, tokenizer = whole_model(folder, dtype=torch.float32), load_tokenizer(folder)
        for number in (1, 8):  # 32: 4.4 times generate's tokens a second (97475f3), in four minutes
            length = f"{number * GROUP} x at most 16"
            yield (
                f"{Path(folder).name} | 69 | {length}",
                model,
                tokenizer,
                real_case(tokenizer, number),
            )
        return
    for name, shape in MODELS.items():
        model = build(shape)
        if KIND == "gpu":
            model = model.to(DEVICE, torch.bfloat16)
        for prompt_tokens, tokens in CASES:
            length = "64 to 256" if tokens == 256 else f"cut at {tokens}"
            case = counting_case(prompt_tokens, tokens)
            yield f"{name} | {prompt_tokens} | {length}", model, make_tokenizer(), case


def main(folder, out):
    if DEVICE == "cpu" and not folder:
        torch.set_num_threads(1)
    more = ["vLLM"] if importlib.util.find_spec("vllm") else []
    engines = ["ours", "generate", *more]
    lines = [f"| model | prompt | completion | {' | '.join(engines)} | ours / generate |"]
    lines.append("|" + "---|" * (4 + len(engines)))
    for cells, model, tokenizer, case in cases(folder):
        rates = all_rates(model, tokenizer, case)
        columns = [f"{rates[e]:.0f}" if e in rates else "failed" for e in engines]
        ratio = rates["ours"] / rates["generate"]
        lines.append(f"| {cells} | {' | '.join(columns)} | {ratio:.2f} |")
        print(lines[-1], flush=True)
    text = "\n".join([facts("torch", "transformers"), "Tokens a second.", "", *lines, ""])
    print(text)
    if out:
        Path(out).write_text(text)


if __name__ == "__main__":
    words = sys.argv[1:]
    if {"-h", "--help"} & set(words):
        sys.exit(__doc__)
    if words[:1] == ["vllm"]:
        vllm(words[1])
    else:
        folder = words.pop(0) if words and Path(words[0]).is_dir() else None
        main(folder, words[0] if words else None)
