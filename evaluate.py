"""Evaluates models on a task's questions: greedily, and with several samples for pass@k.

    python evaluate.py Qwen/Qwen2.5-3B gsm8k                         # a hub model
    python evaluate.py runs/gsm8k/best gsm8k --samples 8             # a checkpoint, or an adapter
    python evaluate.py Qwen/Qwen2.5-3B runs/gsm8k/best gsm8k         # before and after
    deepspeed evaluate.py runs/gsm8k/best gsm8k EVAL_SPLIT=train     # on all GPUs

Each answer is saved at once, so the same command resumes after an interruption. The constants are
the trainer's, or those of the run if a model is a run's checkpoint; NAME=value changes one. Several
models are compared with the first, question by question.
"""

import argparse
import json
import os
from collections import deque
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from tqdm import tqdm

import grpo_ref_split as trainer
from grpo import scores
from grpo.constants import constants_in, read_words, with_constants
from grpo.log import say
from grpo.merge import base_of, merge_into
from grpo.models import load_tokenizer
from grpo.sampling import evaluation
from grpo.sampling.policy import make_policy
from grpo.sampling.rewards import start_processes
from grpo.sampling.task import load_task, prepare_task
from grpo.stop import leave
from grpo.training.checks import check_constants
from grpo.training.ranks import join_ranks


def command_line():
    """Returns (options, constants). The constants are the trainer's; the run of a model that is a
    checkpoint overrides them (the last such model wins), and so does the command line."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    add = parser.add_argument
    add("models", nargs="+", metavar="MODEL", help="hub name, or folder of a checkpoint or adapter")
    add("task", metavar="TASK", help="name or path of a task, as in the trainer")
    add("--samples", type=int, default=0, help="sampled answers per question, at TEMPERATURE")
    add("--out", default="runs/eval", help="folder for the answers")
    given, words = read_words("grpo_ref_split.py", presets=False)
    for name in given.keys() & {"MODEL", "TASK", "LORA_RANK"}:
        raise SystemExit(f"{name}={given[name]} can't be set: the command names models and task")
    options = parser.parse_intermixed_args(words)
    values = constants_in(vars(trainer.constants()))
    for model in options.models:
        values |= evaluation.constants_of_run(model, options.task)
    check_constants(values | given)
    return options, SimpleNamespace(**values | given | {"TASK": options.task, "LORA_RANK": 0})


def answers_of(c, options, model, processes, rank, world):
    """Returns (outcome, folder, {kind: {question: answers}}) of a model, kinds "greedy" and "N
    samples ...". Each rank answers its share of the questions that the files lack. `processes`
    (start_processes) compute rewards, or None."""
    c = with_constants(c, MODEL=base_of(model))
    tokenizer, recipe = prepare_task(c, split=c.EVAL_SPLIT, shown=1)
    recipe.reward_processes = processes
    prompts, policy, found = recipe.prompts[: c.EVAL_QUESTIONS], None, {}
    draws = {"greedy": recipe.others(GROUP_SIZE=1, TEMPERATURE=0)}
    if options.samples:
        kind = f"{options.samples} samples at temperature {c.TEMPERATURE:g}"
        draws[kind] = recipe.others(GROUP_SIZE=options.samples)
    for kind, draw in draws.items():
        path = evaluation.file_for(draw, kind, model, options.out)
        there = evaluation.read_answers(path)
        mine = [prompt for prompt in prompts[rank::world] if prompt[0] not in there]
        if mine and policy is None:
            policy = make_policy(c, tokenizer)
            merge_into(policy.model, model)
        if mine:
            answered = evaluation.answer(policy, draw, path, mine, seed=(rank, len(there)))
            deque(tqdm(answered, f"{model}, {kind}", len(mine), disable=rank > 0), maxlen=0)
        if world > 1:
            dist.barrier()
        there = evaluation.read_answers(path)
        if missing := sum(index not in there for index, *_ in prompts):
            raise SystemExit(f"{path} lacks {missing} answers: all ranks must see the same folder")
        found[kind] = {index: there[index] for index, *_ in prompts}
    return recipe.c.OUTCOME, path.parent, found


def report(c, models, results):
    """Prints a table per kind of answers, and writes each model's numbers next to its answers."""
    outcome, _, first = results[0]
    print(f"\n{c.TASK}/{c.EVAL_SPLIT}. {scores.NOTE.format(outcome)}")
    numbers = [{"model": model} for model in models]
    for kind in first:
        columns = scores.columns([found[kind] for *_, found in results], outcome)
        print("", *scores.table(kind, models, columns), sep="\n")
        for mine, column in zip(numbers, columns, strict=True):
            mine[kind] = column
    for mine, (_, folder, _) in zip(numbers, results, strict=True):
        path = folder / f"{Path(c.TASK).stem}-{c.EVAL_SPLIT}.json"
        path.write_text(json.dumps(mine, indent=1) + "\n")
        print(f"{folder} has the answers, and these numbers in {path.name}", flush=True)


def main():
    options, c = command_line()
    for model in options.models:
        load_tokenizer(base_of(model))  # fails early if the model is missing
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        join_ranks(c.WAIT_LIMIT_SECONDS)
    elif (gpus := torch.accelerator.device_count()) > 1:
        say(f"using one of {gpus} GPUs; start with `deepspeed` instead of `python` to use all")
    try:
        task, limits = load_task(c.TASK), (c.REWARD_PROCESSES, c.REWARD_TIMEOUT_SECONDS)
        processes = start_processes(task, *limits) if c.REWARD_PROCESSES else None
        results = [
            answers_of(c, options, model, processes, rank, world) for model in options.models
        ]
        if rank == 0:
            report(c, options.models, results)
        if world > 1:
            dist.barrier()
            dist.destroy_process_group()
    except KeyboardInterrupt:
        leave("interrupted: the answers are saved; the same command resumes")


if __name__ == "__main__":
    main()
