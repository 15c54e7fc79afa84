"""A model's answers to a task's questions, in a file as they come (evaluate.py).

The file has a line of settings, and then one for each question: {"question": its number, "answers":
[{"text", "tokens", "truncated", "rewards": {name: number, or null: does not apply}}, ...]}. Several
processes may append to it, on disks where file locks work.
"""

import fcntl
import hashlib
import json
import math
import re
from contextlib import suppress
from pathlib import Path

from grpo.log import say
from grpo.sampling import rollout
from grpo.sampling.memory import fit_worker
from grpo.wire import sha256_of

# What answers depend on
NAMES = ("TASK", "EVAL_SPLIT", "MAX_COMPLETION_TOKENS", "STOP_TOKENS", "STOP_STRINGS", "DTYPE")
# What a checkpoint brings along from its run; the last two only to the same task
OF_RUN = (*NAMES[1:], "MAX_PROMPT_TOKENS", "TEMPERATURE", "CHAT_TEMPLATE", "EVAL_QUESTIONS")
OF_TASK = ("REWARD_WEIGHTS", "OUTCOME")


def constants_of_run(model, task):
    """Returns the run's constants that answers depend on, by name, if `model` is the folder of a
    checkpoint; else {}."""
    state = Path(model, "trainer", "state.json")
    if not state.is_file():
        return {}
    run = json.loads(state.read_text())["constants"]
    say(f"constants as in the run of {model}")
    names = OF_RUN + (OF_TASK if run["TASK"] == task else ())
    return {name: run[name] for name in names if name in run}


# --- The file of answers ----------------------------------------------------------------
def file_for(recipe, kind, model, out):
    """Returns the path of a model's answers of a `kind`, which is created if it is missing. Its
    name ends with a hash of all that the answers depend on: other settings have another file."""
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
    """Adds a line to a file, after a line end: the last process may have been killed while it wrote
    a line."""
    with open(path, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write("\n" * bool(path.stat().st_size) + line)


def read_answers(path):
    """Returns {question: answers}."""
    found = {}
    for line in path.read_text().splitlines():
        with suppress(ValueError, KeyError):  # a line that was cut; the settings
            record = json.loads(line)
            found[record["question"]] = record["answers"]
    return found


# --- Sampling ---------------------------------------------------------------------------
def answer(policy, recipe, path, prompts, seed):
    """Samples GROUP_SIZE answers to each of `prompts`, a part of recipe.prompts, and appends them
    to the file; yields after each question. The draws depend on `seed` and SEED."""
    recipe = recipe.others()  # a copy, whose SAMPLE_BATCH is set
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
