"""A pretrained model of 135 million parameters learns sums in words, on two CPU cores or on a GPU.

    python demo_real.py               # or: make demo-real; needs pip install -e .[real]
    python demo_real.py SEED=1 RUN_DIR=runs/again    # with other constants of the trainer

It makes the folder of SmolLM2-135M-Instruct (grpo/commands/smollm2.py), and starts ref_server.py
and grpo_ref_split.py with presets/smollm2.py. The trainer evaluates before and after. Then the
curve is drawn, three test questions are answered by both models, and the result is printed as lines
for an issue. Ctrl-C ends the demo once the step is saved, and the same command resumes.
"""

import itertools
import math
import os
import platform
import signal
import sys
import textwrap
import time
from pathlib import Path
from statistics import median

from grpo.constants import begin, read_words

if __name__ == "__main__":
    begin()  # before torch is imported

import torch
import transformers

import grpo_ref_split as trainer
import plot
from demo import train_and_serve
from grpo.commands import smollm2
from grpo.devices import accelerator
from grpo.models import load_tokenizer, prompt_ids
from grpo.prepare import load_policy
from grpo.report import commit
from grpo.sample import Prompt
from presets import smollm2 as preset
from tasks import sums

SHARED = "MODEL", "TEMPERATURE", "DTYPE"  # constants that the server must know as well
SHOWN = "seconds", "tokens_per_second", "sampler_k3", "kl"  # metrics in the result


def greedy_answers(folder, task, items, c):
    """Returns the texts that the model in `folder` answers greedily; `c` has the constants."""
    stops = getattr(c, "STOP_STRINGS", ())
    policy = load_policy(folder, load_tokenizer(folder), "float32", stop_strings=stops)
    prompts = [prompt_ids(policy.tokenizer, task.messages(item)) for item in items]
    settings = {"seed": 0, "group_size": 1, "temperature": 0, "max_sequences": len(prompts)}
    settings["max_new_tokens"] = c.MAX_COMPLETION_TOKENS
    groups = policy.stream(itertools.starmap(Prompt, enumerate(prompts)), **settings)
    return [policy.text(completion) for _, (completion,) in sorted(groups)]


def show_answers(model, final, items):
    """Prints a table: the answers of both models to the questions."""
    before, after = (greedy_answers(folder, sums, items, preset) for folder in (model, final))
    print("| question | before | after |\n|---|---|---|")
    for item, *answers in zip(items, before, after, strict=True):
        row = [" ".join(text.split()) for text in (item["question"], *answers)]
        print(f"| {' | '.join(row)} |")


def result(records):
    """Returns the run's result, and what it ran on, as lines for an issue."""
    values = {name: [r[name] for r in records if r.get(name) is not None] for name in SHOWN}
    middle = {name: median(found) if found else math.nan for name, found in values.items()}
    shown = [
        f"{r['eval_accuracy']:.3f} at step {r['step']}" for r in records if "eval_accuracy" in r
    ]
    name = accelerator()
    device = torch.get_device_module(name).get_device_name() if name else platform.machine()
    lines = f"""greedy accuracy on test questions: {", ".join(shown)}
{middle["seconds"]:.1f} s a step, sampling at {middle["tokens_per_second"]:.0f} tokens/s
sampler_k3 {middle["sampler_k3"]:.0e}, kl {middle["kl"]:.2f}; all four are medians over the steps
{device}, {os.cpu_count()} cores; code: {commit()}
torch {torch.__version__}, transformers {transformers.__version__}"""
    return textwrap.indent(lines, "    ")


def main(**constants):
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also if a shell's `&` ignores Ctrl-C
    started = time.perf_counter()
    constants = {"MODEL": preset.MODEL, "RUN_DIR": preset.RUN_DIR} | constants
    model, run_dir = constants["MODEL"], Path(constants["RUN_DIR"])
    if model == preset.MODEL:
        smollm2.make(model)
    run_dir.mkdir(parents=True, exist_ok=True)
    print("ref_server.py and grpo_ref_split.py start, which takes half a minute", flush=True)
    shared = {name: constants.pop(name) for name in SHARED if name in constants}
    train_and_serve("smollm2", shared, constants, threads={})  # on all cores
    final = run_dir / "final"
    plot.plot(run_dir)
    if (final / "config.json").exists():  # not with SAVE_STEPS = 0, nor with LORA_RANK
        show_answers(model, final, sums.load("test")[:3])
    print(f"\nModel: {final}   curve: {run_dir}/curves.png   samples: {run_dir}/samples.jsonl")
    print(f"This command took {(time.perf_counter() - started) / 60:.1f} minutes. Its result,")
    print(
        "please paste it into an issue if the machine is not in benchmarks/results/real_model.md:\n"
    )
    print(result(plot.read(run_dir)))


if __name__ == "__main__":
    given, others = read_words(trainer.DEFAULTS, presets=False)
    sys.exit(__doc__) if others else main(**given)
