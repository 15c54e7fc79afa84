"""Evaluates models on a task's questions: greedily, and with several samples for pass@k.

    python evaluate.py Qwen/Qwen2.5-3B gsm8k                         # a hub model
    python evaluate.py runs/gsm8k/best gsm8k --samples 8             # a checkpoint, or an adapter
    python evaluate.py Qwen/Qwen2.5-3B runs/gsm8k/best gsm8k         # before and after
    deepspeed evaluate.py runs/gsm8k/best gsm8k EVAL_SPLIT=train     # on all GPUs

Each question's answers are saved at once, so the same command resumes after an interruption. A file
of answers has a line of settings, then one line per question: {"question": its number, "answers":
[{"text": a text, or those of several turns, "tokens", "truncated"}, ...]}. Rewards are computed
anew whenever a file is read, as the task may have changed. The constants are the trainer's, or
those of the run if a model is a run's checkpoint; NAME=value changes one. Several models are
compared with the first, question by question.
"""

import argparse
import fcntl
import hashlib
import json
import math
import os
import re
from collections import Counter
from contextlib import suppress
from pathlib import Path
from statistics import fmean

from grpo.constants import begin, read_words

if __name__ == "__main__":
    begin()  # before torch is imported

import torch
import torch.distributed as dist
from tqdm import tqdm
from transformers import AutoConfig

import grpo_ref_split as trainer
from grpo import rollout
from grpo.checkpoint import state_file
from grpo.checks import settled
from grpo.log import say
from grpo.options import scores
from grpo.options.merge import base_of, load_base_tokenizer, merge_into
from grpo.options.sample_sizes import fit_worker
from grpo.policy import make_policy
from grpo.prepare import as_seen, gold_of, prepare_task, start_submit
from grpo.ranks import gathered, join_ranks
from grpo.resume import hash_of_code, hash_of_prompts
from grpo.stop import leave
from grpo.task import begin_rewards, load_chat, load_task, reward_group
from grpo.wire import sha256_of

# The constants that answers depend on
NAMES = ("TASK", "EVAL_SPLIT", "MAX_COMPLETION_TOKENS", "STOP_TOKENS", "STOP_STRINGS", "DTYPE")
# The constants that we take from a checkpoint's run; OF_TASK only if TASK is the same
OF_RUN = (*NAMES[1:], "MAX_PROMPT_TOKENS", "TEMPERATURE", "CHAT_TEMPLATE", "EVAL_QUESTIONS")
OF_TASK = ("REWARD_WEIGHTS", "OUTCOME")
JUNK, EARNS = 100, 0.1  # see print_junk: questions, and the share from which it warns
# Endings of a model's files that its answers depend on
OF_MODEL = (".safetensors", ".bin", ".json", ".jinja", ".model", ".txt")


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
    given, words = read_words(trainer.DEFAULTS, presets=False)
    for name in given.keys() & {"MODEL", "TASK", "LORA_RANK"}:
        raise SystemExit(f"leave out {name}={given[name]}: give MODEL ... TASK without =")
    options = parser.parse_intermixed_args(words)
    if options.samples < 0:
        raise SystemExit(f"--samples {options.samples} must be 0 or more")
    values = {}
    for model in options.models:
        values |= run_of(model, options.task)
    values |= given | {"TASK": options.task, "LORA_RANK": 0}
    return options, settled(trainer.DEFAULTS, values)


def run_of(model, task):
    """Returns the constants, by name, of the run that saved `model`, as far as answers depend on
    them. {} if `model` is not the folder of a checkpoint."""
    if not (state := state_file(model)).is_file():
        return {}
    run = json.loads(state.read_text())["constants"]
    say(f"the constants are those of the run that saved {model}")
    names = OF_RUN + (OF_TASK if run["TASK"] == task else ())
    return {name: run[name] for name in names if name in run}


# --- The file of answers ----------------------------------------------------------------
def hashes_of(model):
    """Returns {file: hash} of a model's folder, or {"commit": the hub's}; for an adapter with
    those of its base."""
    found, base = {}, base_of(model)
    if Path(model).is_dir():
        files = sorted(p for p in Path(model).iterdir() if p.suffix in OF_MODEL)
        found = {path.name: sha256_of(path) for path in files}
    else:
        found["commit"] = AutoConfig.from_pretrained(model)._commit_hash
    return found | ({} if base == model else {"base": hashes_of(base)})


def file_for(recipe, kind, model, hashes, out):
    """Returns the path of the file for a model's answers of a `kind`; creates it if it is missing.
    The name ends with a hash of all settings that answers depend on: one file for each of them."""
    c, prompts = recipe.c, json.dumps([[index, ids] for index, _, ids in recipe.prompts])
    settings = {name: getattr(c, name) for name in NAMES} | {
        "how": kind,
        "hash of the prompts": hashlib.sha256(prompts.encode()).hexdigest(),
        "hashes of the model": hashes,
    }
    if recipe.has_turns:  # reply() has a part in the answers
        settings["hash of the task's code"] = hash_of_code(recipe.task)
        settings["hash of the items"] = hash_of_prompts(recipe.prompts)
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
    """Returns {question: its answers}."""
    found = {}
    for line in path.read_text().splitlines():
        with suppress(ValueError, KeyError):  # an incomplete line, or the settings
            record = json.loads(line)
            found[record["question"]] = record["answers"]
    return found


# --- Sampling and rewards ---------------------------------------------------------------
def answer(policy, recipe, path, prompts, seed):
    """Samples GROUP_SIZE answers to each of `prompts` (some of recipe.prompts) and appends them to
    the file; yields each question's number. The random numbers depend on `seed` and SEED."""
    c = recipe.c
    size = c.SAMPLE_BATCH if c.TEMPERATURE else c.EVAL_BATCH
    batch = fit_worker(c.but(SAMPLE_BATCH=size), policy, recipe.has_turns)
    recipe = recipe.others(batch=max(batch, c.GROUP_SIZE))
    seed = rollout.seed_of("evaluate", c.SEED, *seed)
    for group in rollout.sampled(policy, recipe, prompts, seed=seed):
        answers = [
            {"text": sample.text, "tokens": sample.length, "truncated": bool(sample.truncated)}
            for sample in group.samples
        ]
        append(path, json.dumps({"question": group.index, "answers": answers}))
        yield group.index


def rewarded(recipe, prompts, records, rank, world):
    """Returns {question: answers} of `prompts`, each answer with its "rewards" {name: number, or
    None: does not apply}. Each rank rewards its share of the questions."""
    mine, found = prompts[rank::world], {}
    texts = {index: [answer["text"] for answer in records[index]] for index, *_ in mine}
    # Async rewards begin question by question: their time limit counts from the begin
    early = recipe.submit and recipe.submit.limit is None
    begun = {index: begin_rewards(recipe, item, texts[index]) for index, item, _ in mine if early}
    for index, item, _ in tqdm(mine, "rewards", disable=rank > 0, delay=5):
        futures = begun[index] if early else begin_rewards(recipe, item, texts[index])
        cut = [answer["truncated"] for answer in records[index]]
        given = reward_group(recipe, item, texts[index], futures, truncated=cut)
        found[index] = [
            answer | {"rewards": {k: None if math.isnan(v) else v for k, v in rewards.items()}}
            for answer, rewards in zip(records[index], given, strict=True)
        ]
    shares = gathered(found) if world > 1 else [found]
    return {index: share[index] for index, *_ in prompts for share in shares if index in share}


def print_junk(recipe):
    """Prints how often each reward is positive for answers that need no skill, on JUNK questions:
    training would find a reward that they earn."""
    c, prompts = recipe.c, recipe.prompts[:JUNK]
    items = [item for _, item, _ in prompts]
    junk = {"an empty answer": lambda item: ""}
    junk["the question"] = lambda item: load_chat(c.TASK, recipe.task, item)[-1]["content"]
    value_of = lambda item: str(item.get("answer")).rpartition("####")[2].strip()
    common, times = Counter(map(value_of, items)).most_common(1)[0]
    with_it = next(item for item in items if value_of(item) == common)
    if times > 1 and isinstance(gold := gold_of(recipe, with_it, "", or_none=True), str):
        junk[f"always the most frequent gold, {gold!r:.60}"] = lambda item: gold
    for what, text_of in junk.items():
        given = [
            reward_group(recipe, item, [as_seen(recipe.opening(ids), text_of(item))])[0]
            for _, item, ids in prompts
        ]
        shares = {name: fmean(r[name] > 0 for r in given) for name in recipe.weights}
        earned = ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
        found = [name for name, share in shares.items() if share > EARNS]
        warning = f"; TRAINING WOULD FIND THAT {', '.join(found)} CAN BE EARNED SO" * bool(found)
        say(f"positive rewards of {what}: {earned}{warning}")


def answers_of(c, options, model, submit, rank, world):
    """Returns (names, folder, {kind: {question: answers}}) of a model, kinds "greedy" and "N
    samples ..."; names are the outcome's and those of rewards to which the task gives weight 0.
    Each rank answers its share of the questions that the files lack; `submit` is start_submit's."""
    c, hashes = c.but(MODEL=base_of(model)), hashes_of(model)
    tokenizer, recipe = prepare_task(c, split=c.EVAL_SPLIT, shown=1)
    recipe.submit = submit
    prompts, policy, found = recipe.prompts[: c.EVAL_QUESTIONS], None, {}
    if options.samples and rank == 0 and model == options.models[0]:
        print_junk(recipe)
    draws = {"greedy": recipe.others(GROUP_SIZE=1, TEMPERATURE=0)}
    if options.samples:
        kind = f"{options.samples} samples at temperature {c.TEMPERATURE:g}"
        draws[kind] = recipe.others(GROUP_SIZE=options.samples)
    for kind, draw in draws.items():
        path = file_for(draw, kind, model, hashes, options.out)
        there = read_answers(path)
        if reused := sum(len(there.get(index, ())) for index, *_ in prompts):
            say(f"{reused} answers are reused: {path}")
        mine = [prompt for prompt in prompts[rank::world] if prompt[0] not in there]
        if mine and policy is None:
            policy = make_policy(c, tokenizer)
            merge_into(policy.model, model)
        if mine:
            answered = answer(policy, draw, path, mine, seed=(rank, len(there)))
            for _ in tqdm(answered, f"{model}, {kind}", len(mine), disable=rank > 0):
                pass
        if world > 1:
            dist.barrier()
        there = read_answers(path)
        if missing := sum(index not in there for index, *_ in prompts):
            raise SystemExit(f"{path} lacks {missing} answers: all ranks must see the same folder")
        found[kind] = rewarded(draw, prompts, there, rank, world)
    weights = getattr(recipe.task, "REWARD_WEIGHTS", None) or {}
    metrics = [name for name, w in weights.items() if w == 0 and name != recipe.outcome]
    return (recipe.outcome, metrics), path.parent, found


def report(c, models, results):
    """Prints a table per kind of answers, and writes each model's numbers and rewards next to its
    answers."""
    names, _, first = results[0]
    print(f"\n{c.TASK}/{c.EVAL_SPLIT}. {scores.NOTE.format(names[0])}")
    tables = {
        kind: scores.columns([found[kind] for *_, found in results], *names) for kind in first
    }
    for kind, columns in tables.items():
        print("", *scores.table(kind, models, columns), sep="\n")
    for i, (_, folder, found) in enumerate(results):
        numbers = {"model": models[i]} | {kind: columns[i] for kind, columns in tables.items()}
        rewards = {
            kind: {index: [answer["rewards"] for answer in group] for index, group in kept.items()}
            for kind, kept in found.items()
        }
        path = folder / f"{Path(c.TASK).stem}-{c.EVAL_SPLIT}.json"
        path.write_text(json.dumps(numbers, indent=1) + "\n")
        path.with_suffix(".rewards.json").write_text(json.dumps(rewards) + "\n")
        print(f"{folder} has answers, rewards, and these numbers in {path.name}", flush=True)


def main():
    options, c = command_line()
    for model in options.models:
        load_base_tokenizer(model)  # fails early if the model is missing
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        join_ranks(c.WAIT_LIMIT_SECONDS)
    elif (gpus := torch.accelerator.device_count()) > 1:
        say(f"using one of {gpus} GPUs; start with `deepspeed` instead of `python` to use all")
    try:
        submit = start_submit(c, load_task(c.TASK))
        results = [answers_of(c, options, model, submit, rank, world) for model in options.models]
        if rank == 0:
            report(c, options.models, results)
        if world > 1:
            dist.barrier()
            dist.destroy_process_group()
    except KeyboardInterrupt:
        leave("interrupted: the answers are saved; the same command resumes")


if __name__ == "__main__":
    main()
