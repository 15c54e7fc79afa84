"""Evaluates models on a task's questions: greedily, and with several samples for pass@k.

    python evaluate.py Qwen/Qwen2.5-3B gsm8k                         # a hub model
    python evaluate.py runs/gsm8k/best gsm8k --samples 8             # a checkpoint, or an adapter
    python evaluate.py Qwen/Qwen2.5-3B runs/gsm8k/best gsm8k         # before and after
    deepspeed evaluate.py runs/gsm8k/best gsm8k EVAL_SPLIT=train     # on all GPUs

Answers are saved as they come, so the same command resumes after an interruption. A file of answers
has a line of settings, then one line per question: {"question": its number, "answers": [{"text",
"tokens", "truncated", "rewards": {name: number, or null: does not apply}}, ...]}. The constants are
the trainer's, or those of the run if a model is a run's checkpoint; NAME=value changes one. Several
models are compared with the first, question by question.
"""

import argparse
import fcntl
import hashlib
import json
import math
import os
import re
from collections import deque
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

from grpo.constants import begin, constants_in, read_words, with_constants

if __name__ == "__main__":
    begin()  # before torch is imported

import torch
import torch.distributed as dist
from tqdm import tqdm

import grpo_ref_split as trainer
from grpo import scores
from grpo.log import say
from grpo.merge import base_of, merge_into
from grpo.models import load_tokenizer
from grpo.sampling import rollout
from grpo.sampling.memory import fit_worker
from grpo.sampling.policy import make_policy
from grpo.sampling.prepare import prepare_task
from grpo.sampling.rewards import start_processes
from grpo.sampling.task import load_task
from grpo.stop import leave
from grpo.training.checks import check_constants
from grpo.training.ranks import join_ranks
from grpo.wire import sha256_of

# The constants that answers depend on
NAMES = ("TASK", "EVAL_SPLIT", "MAX_COMPLETION_TOKENS", "STOP_TOKENS", "STOP_STRINGS", "DTYPE")
# The constants that we take from a checkpoint's run; OF_TASK only if TASK is the same
OF_RUN = (*NAMES[1:], "MAX_PROMPT_TOKENS", "TEMPERATURE", "CHAT_TEMPLATE", "EVAL_QUESTIONS")
OF_TASK = ("REWARD_WEIGHTS", "OUTCOME")


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
        raise SystemExit(f"leave out {name}={given[name]}: give MODEL ... TASK without =")
    options = parser.parse_intermixed_args(words)
    if options.samples < 0:
        raise SystemExit(f"--samples {options.samples} must be 0 or more")
    values = constants_in(vars(trainer.constants()))
    for model in options.models:
        values |= constants_of_run(model, options.task)
    check_constants(values | given)
    return options, SimpleNamespace(**values | given | {"TASK": options.task, "LORA_RANK": 0})


def constants_of_run(model, task):
    """Returns the constants of the run that saved `model`, by name, as far as answers depend on
    them; {} if `model` is not the folder of a checkpoint."""
    state = Path(model, "trainer", "state.json")
    if not state.is_file():
        return {}
    run = json.loads(state.read_text())["constants"]
    say(f"the constants are those of the run that saved {model}")
    names = OF_RUN + (OF_TASK if run["TASK"] == task else ())
    return {name: run[name] for name in names if name in run}


# --- The file of answers ----------------------------------------------------------------
def file_for(recipe, kind, model, out):
    """Returns the path of the file for a model's answers of a `kind`; creates it if it is missing.
    The name ends with a hash of all settings that answers depend on: one file for each of them."""
    c, prompts = recipe.c, json.dumps([[index, ids] for index, _, ids in recipe.prompts])
    settings = {name: getattr(c, name) for name in NAMES} | {
        "how": kind,
        "OUTCOME": c.OUTCOME,
        "rewards": list(c.REWARD_WEIGHTS),
        "hash of the task's file": sha256_of(recipe.task.__file__),
        "hash of the prompts": hashlib.sha256(prompts.encode()).hexdigest(),
        "weights": [sha256_of(p) for p in sorted(Path(model).glob("*.safetensors"))] or model,
    }
    line = json.dumps({"settings": settings})
    digest = hashlib.sha256(line.encode()).hexdigest()[:8]
    parts = Path(model).resolve().parts[-2:] if Path(model).is_dir() else model.split("/")
    name = f"{Path(c.TASK).stem}-{c.EVAL_SPLIT}-{kind}-{digest}.jsonl"
    path = Path(out, "--".join(parts), re.sub(r"[^\w.-]", "-", name))
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        append(path, line)
    return path


def append(path, line):
    """Appends a line to a file, after a newline: an earlier process may have been killed in the
    middle of a line."""
    with open(path, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write("\n" * bool(path.stat().st_size) + line)


def read_answers(path):
    """Returns {question: answers}."""
    found = {}
    for line in path.read_text().splitlines():
        with suppress(ValueError, KeyError):  # an incomplete line, or the settings
            record = json.loads(line)
            found[record["question"]] = record["answers"]
    return found


# --- Sampling ---------------------------------------------------------------------------
def answer(policy, recipe, path, prompts, seed):
    """Samples GROUP_SIZE answers to each of `prompts` (some of recipe.prompts) and appends them to
    the file; yields each question's number. The random numbers depend on `seed` and SEED."""
    c = recipe.c
    recipe = recipe.others(SAMPLE_BATCH=c.SAMPLE_BATCH if c.TEMPERATURE else c.EVAL_BATCH)  # a copy
    fit_worker(recipe.c, policy)
    recipe.c.SAMPLE_BATCH = max(recipe.c.SAMPLE_BATCH, recipe.c.GROUP_SIZE)
    seed = rollout.seed_of("evaluate", recipe.c.SEED, *seed)
    groups = rollout.sampled_and_rewarded(policy, recipe, prompts, seed=seed)
    for (index, *_), completions, rewards in groups:
        answers = [
            {
                "text": policy.text(completion),
                "tokens": completion.length,
                "truncated": bool(completion.truncated),
                "rewards": {k: None if math.isnan(v) else v for k, v in given.items()},
            }
            for completion, given in zip(completions, rewards, strict=True)
        ]
        append(path, json.dumps({"question": index, "answers": answers}))
        yield index


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
        path = file_for(draw, kind, model, options.out)
        there = read_answers(path)
        mine = [prompt for prompt in prompts[rank::world] if prompt[0] not in there]
        if mine and policy is None:
            policy = make_policy(c, tokenizer)
            merge_into(policy.model, model)
        if mine:
            answered = answer(policy, draw, path, mine, seed=(rank, len(there)))
            deque(tqdm(answered, f"{model}, {kind}", len(mine), disable=rank > 0), maxlen=0)
        if world > 1:
            dist.barrier()
        there = read_answers(path)
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
