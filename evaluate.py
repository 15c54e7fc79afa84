"""How well models answer a task's questions: greedily, and with several samples for pass@k.

    python evaluate.py Qwen/Qwen2.5-3B gsm8k                         # a hub model
    python evaluate.py runs/gsm8k/best gsm8k --samples 8             # a checkpoint, or an adapter
    python evaluate.py Qwen/Qwen2.5-3B runs/gsm8k/best gsm8k         # before and after
    deepspeed evaluate.py runs/gsm8k/best gsm8k                      # on all GPUs

Each answer is kept as it comes: what was ended, by Ctrl-C too, resumes with the same command. The
constants are the trainer's, or those of the run where a model is its checkpoint; NAME=value sets
others. Of several models the others are compared with the first, question by question.
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
from grpo.constants import arguments, constants_among, constants_in, with_constants
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


def options():
    """Returns the command line's options as attributes; `given` are constants by name."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    add = parser.add_argument
    add("models", nargs="+", metavar="MODEL", help="hub name, checkpoint, or adapter's folder")
    add("task", metavar="TASK", help="a task's name, as for the trainer")
    add("--samples", type=int, default=0, help="answers at TEMPERATURE to each question; 0: none")
    add("--split", dest="EVAL_SPLIT")
    add("--questions", type=int, dest="EVAL_QUESTIONS", help="the first so many of the split")
    add("--max-completion-tokens", type=int, dest="MAX_COMPLETION_TOKENS")
    add("--temperature", type=float, dest="TEMPERATURE", help="of the samples")
    add("--out", help="folder of the answers; default: MODEL/eval, or runs/eval/NAME")
    given, words = constants_among(arguments(), "grpo_ref_split.py")
    for name in given.keys() & {"MODEL", "TASK", "LORA_RANK"}:
        raise SystemExit(f"{name}={given[name]} can't be set: the command names models and task")
    o = parser.parse_intermixed_args(words)
    if o.samples < 0:
        raise SystemExit(f"--samples {o.samples} must be 0 or more")
    o.given = given | {name: v for name, v in vars(o).items() if name.isupper() and v is not None}
    return o


def constants(o):
    """Returns the trainer's constants as attributes: those of a run where a model is its checkpoint
    (of the last such), and what the command says."""
    values = constants_in(vars(trainer.constants()))
    for model in o.models:
        values |= evaluation.constants_of_run(model, o.task)
    check_constants(values | o.given)
    return SimpleNamespace(**values | o.given | {"TASK": o.task, "LORA_RANK": 0})


# --- Answers --------------------------------------------------------------------------
def answers_of(c, o, model, processes, rank, world):
    """Returns (outcome, folder, {kind: {question: answers}}) of a model, kinds "greedy" and "N
    samples ...", once all ranks have answered their share of what was not in the folder's files.
    `processes` compute rewards (start_processes), or None."""
    c = with_constants(c, MODEL=base_of(model))
    tokenizer, recipe = prepare_task(c, split=c.EVAL_SPLIT, shown=1)
    recipe.reward_processes = processes
    prompts, policy, found = recipe.prompts[: c.EVAL_QUESTIONS], None, {}
    draws = [recipe.others(GROUP_SIZE=1, TEMPERATURE=0)]
    draws += [recipe.others(GROUP_SIZE=o.samples)] if o.samples else []
    for draw in draws:
        kind = evaluation.kind_of(draw)
        path = evaluation.file_of(c, model, o.out, kind)
        settings = evaluation.settings_of(c, draw, model)
        there = evaluation.read_answers(path, settings)
        mine = [prompt for prompt in prompts[rank::world] if prompt[0] not in there]
        if mine and policy is None:
            policy = make_policy(c, tokenizer)
            merge_into(policy.model, model)
        if mine:
            answered = evaluation.answer(c, policy, draw, path, mine, seed=(rank, len(there)))
            deque(tqdm(answered, f"{model}, {kind}", len(mine), disable=rank > 0), maxlen=0)
        if world > 1:
            dist.barrier()
        there = evaluation.read_answers(path, settings)
        if missing := sum(index not in there for index, *_ in prompts):
            raise SystemExit(f"{path} lacks {missing} answers: all ranks must share its folder")
        found[kind] = {index: there[index] for index, *_ in prompts}
    return recipe.c.OUTCOME, path.parent, found


# --- Results --------------------------------------------------------------------------
def report(c, models, results):
    """Prints a table for each kind of answers, and writes a model's numbers beside its answers."""
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
        print(f"{folder}: the answers, and these numbers in {path.name}", flush=True)


def main():
    o = options()
    c = constants(o)
    for model in o.models:
        load_tokenizer(base_of(model))  # is it there?
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        join_ranks(c.WAIT_LIMIT_SECONDS)
    elif (gpus := torch.accelerator.device_count()) > 1:
        say(f"this process is on one of {gpus} GPUs; `deepspeed` starts one on each")
    try:
        task, limits = load_task(c.TASK), (c.REWARD_PROCESSES, c.REWARD_TIMEOUT_SECONDS)
        processes = start_processes(task, *limits) if c.REWARD_PROCESSES else None
        results = [answers_of(c, o, model, processes, rank, world) for model in o.models]
        if rank == 0:
            report(c, o.models, results)
        if world > 1:
            dist.barrier()
            dist.destroy_process_group()
    except KeyboardInterrupt:
        leave("ended: the answers so far are kept, and the same command resumes")


if __name__ == "__main__":
    main()
