"""Evaluates models on a task's questions: greedily, and with several samples for pass@k.

    python evaluate.py Qwen/Qwen2.5-3B gsm8k                         # a hub model
    python evaluate.py runs/gsm8k/best gsm8k --samples 8             # a checkpoint, or an adapter
    python evaluate.py Qwen/Qwen2.5-3B runs/gsm8k/best gsm8k         # before and after
    deepspeed evaluate.py runs/gsm8k/best gsm8k EVAL_SPLIT=train     # on all GPUs

At the end each model's answers are written to runs/eval (--out), in place of earlier ones, a line
per question: {"kind": greedy or samples, "question": its number, "answers": [{"text": a text, or
those of several turns, "tokens", "truncated", "rewards": {name: number, or null}}, ...]}. The
constants are the trainer's, or those of the run if a model is a run's checkpoint; NAME=value
changes one. An adapter's base has the BASE_BITS of its run, other models have 16, and BASE_BITS=4
holds for all. Several models are compared with the first, question by question.
"""

import argparse
import json
import math
import os
import tempfile
from pathlib import Path

from grpo.constants import begin, is_same, read_words

if __name__ == "__main__":
    begin()  # before torch is imported

import torch
import torch.distributed as dist
from tqdm import tqdm

import grpo_ref_split as trainer
from grpo import rollout
from grpo.checkpoint import CONSTANTS
from grpo.checks import trainer_constants
from grpo.commands import scores
from grpo.commands.merge import base_of, bits_of, load_base_tokenizer, merge_into
from grpo.log import say
from grpo.models import settings_in
from grpo.prepare import make_policy, prepare_task
from grpo.ranks import gathered, join_ranks
from grpo.stop import stop
from grpo.task import different

# The constants that we take from a model's run; OF_TASK only if TASK is the same
OF_RUN = ("EVAL_SPLIT", "MAX_COMPLETION_TOKENS", "STOP_TOKENS", "STOP_STRINGS", "DTYPE")
OF_RUN += ("MAX_PROMPT_TOKENS", "TEMPERATURE", "CHAT_TEMPLATE", "EVAL_QUESTIONS")
OF_RUN += ("REWARD_TIMEOUT_SECONDS",)
OF_TASK = ("REWARD_WEIGHTS", "OUTCOME")


def command_line():
    """Returns (options, constants). The constants are the trainer's; the run of a model that is a
    checkpoint overrides them, and so does the command line. SystemExit if two runs differ."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    add = parser.add_argument
    add("models", nargs="+", metavar="MODEL", help="hub name, or folder of a checkpoint or adapter")
    add("task", metavar="TASK", help="name or path of a task, as in the trainer")
    add("--samples", type=int, default=0, help="sampled answers per question, at TEMPERATURE")
    add("--out", default="runs/eval", help="folder for the answers")
    given, words = read_words(trainer.DEFAULTS, presets=False)
    for name in given.keys() & {"MODEL", "TASK", "LORA_RANK"}:
        raise SystemExit(f"leave out {name}={given[name]}: give MODEL ... TASK without =")
    options = parser.parse_intermixed_args(words)
    if options.samples < 0:
        raise SystemExit(f"--samples {options.samples} must be 0 or more")
    values = {}
    for model in options.models:
        run = run_of(model, options.task)
        if differ := [x for x in run if x not in given and values.get(x, run[x]) != run[x]]:
            why = f"the models' runs differ in {', '.join(differ)}"
            raise SystemExit(f"{why}: give {differ[0]}=..., or evaluate each alone")
        values |= run
    options.bits = given.get("BASE_BITS")
    values |= given | {"TASK": options.task, "LORA_RANK": 1}  # any: a folder has the adapter
    return options, trainer_constants(trainer.DEFAULTS, values).but(LORA_RANK=0)


def run_of(model, task):
    """Returns the constants, by name, of the run that trained `model`, as far as answers depend on
    them: a checkpoint, a copy of its model, or a merged adapter. {} for other models."""
    if not (run := settings_in(model, CONSTANTS)):
        say(f"{model} has no {CONSTANTS} of a run: limits, DTYPE and STOP_STRINGS are the defaults")
        return {}
    say(f"the constants are those of the run that trained {model}")
    names = OF_RUN + OF_TASK * is_same("TASK", run["TASK"], task)
    return {name: run[name] for name in names if name in run}


# --- Answers ----------------------------------------------------------------------------
def answered(policy, recipe, prompts, seed):
    """Yields (question, its GROUP_SIZE answers) for each of `prompts`, with their rewards. The
    random numbers depend on `seed` and SEED."""
    c = recipe.c
    recipe = recipe.others(SAMPLE_BATCH=max(c.SAMPLE_BATCH, c.GROUP_SIZE))
    seed = rollout.seed_of("evaluate", c.SEED, seed)
    for group in rollout.sampled_and_rewarded(policy, recipe, prompts, seed=seed):
        yield group.index, [answer_of(sample) for sample in group.samples]


def answer_of(sample):
    rewards = {k: None if math.isnan(value) else value for k, value in sample.rewards.items()}
    counts = {"tokens": sample.length, "truncated": bool(sample.truncated)}
    return {"text": sample.text} | counts | {"rewards": rewards}


def answers_of(c, options, model, rank, world):
    """Returns (names, {kind: {question: answers}}) of a model, kinds "greedy" and "N samples ...";
    names are the outcome's and those of rewards to which the task gives weight 0. Each rank answers
    its share of the questions."""
    c = c.but(MODEL=base_of(model), BASE_BITS=options.bits or bits_of(model))
    tokenizer, recipe = prepare_task(c, split=c.EVAL_SPLIT, shown=1)
    draws = {"greedy": recipe.others(GROUP_SIZE=1, TEMPERATURE=0)}
    if options.samples:
        kind = f"{options.samples} samples at temperature {c.TEMPERATURE:g}"
        draws[kind] = recipe.others(GROUP_SIZE=options.samples)
    policy = make_policy(c, tokenizer)
    merge_into(policy.model, model)
    prompts, found = different(recipe.prompts, c.EVAL_QUESTIONS), {}
    for kind, draw in draws.items():
        mine = prompts[rank::world]
        groups = answered(policy, draw, mine, seed=rank)
        share = dict(tqdm(groups, f"{model}, {kind}", len(mine), disable=rank > 0))
        shares = gathered(share) if world > 1 else [share]
        found[kind] = dict(sorted(pair for share in shares for pair in share.items()))
    weights = getattr(recipe.task, "REWARD_WEIGHTS", None) or {}
    metrics = [name for name, w in weights.items() if w == 0 and name != recipe.outcome]
    return (recipe.outcome, metrics), found


def report(c, models, results, out):
    """Prints a table per kind of answers, and writes each model's numbers and answers to a folder
    in `out`."""
    names, first = results[0]
    print(f"\n{c.TASK}/{c.EVAL_SPLIT}. {scores.NOTE.format(names[0])}")
    tables = {kind: scores.columns([found[kind] for _, found in results], *names) for kind in first}
    for kind, columns in tables.items():
        print("", *scores.table(kind, models, columns), sep="\n")
    parts = [Path(m).resolve().parts[-2:] if Path(m).is_dir() else m.split("/") for m in models]
    folders = ["--".join(names) for names in parts]
    for i, (model, (_, found)) in enumerate(zip(models, results, strict=True)):
        folder = folders[i] + f"--{i + 1}" * (folders.count(folders[i]) > 1)
        path = Path(out, folder, f"{Path(c.TASK).stem}-{c.EVAL_SPLIT}.json")
        path.parent.mkdir(parents=True, exist_ok=True)
        numbers = {"model": model} | {kind: columns[i] for kind, columns in tables.items()}
        path.write_text(json.dumps(numbers, indent=1) + "\n")
        lines = [
            json.dumps({"kind": kind, "question": question, "answers": answers})
            for kind, groups in found.items()
            for question, answers in groups.items()
        ]
        path.with_suffix(".jsonl").write_text("\n".join(lines) + "\n")
        print(f"{path.parent} has the answers and these numbers: {path.stem}.json(l)", flush=True)


def main():
    options, c = command_line()
    try:
        Path(options.out).mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=options.out).close()
    except OSError as error:
        raise SystemExit(f"--out {options.out!r} can't be written: {error}") from None
    for model in options.models:
        load_base_tokenizer(model)  # fails early if the model is missing
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        join_ranks(c.WAIT_LIMIT_SECONDS)
    elif (gpus := torch.accelerator.device_count()) > 1:
        say(f"using one of {gpus} GPUs; start with `deepspeed` instead of `python` to use all")
    with stop.listening(at_once=True):
        results = [answers_of(c, options, model, rank, world) for model in options.models]
    if rank == 0:
        report(c, options.models, results, options.out)
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
