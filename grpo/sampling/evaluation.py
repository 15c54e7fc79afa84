"""Samples a model's answers to a task's questions and appends them to a file (evaluate.py).

The file has a line of settings, then one line per question: {"question": its number, "answers":
[{"text", "tokens", "truncated", "rewards": {name: number, or null: does not apply}}, ...]}. Several
processes may append to it if the disk supports file locks.
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

# The constants that answers depend on
NAMES = ("TASK", "EVAL_SPLIT", "MAX_COMPLETION_TOKENS", "STOP_TOKENS", "STOP_STRINGS", "DTYPE")
# The constants that we take from a checkpoint's run; OF_TASK only if TASK is the same
OF_RUN = (*NAMES[1:], "MAX_PROMPT_TOKENS", "TEMPERATURE", "CHAT_TEMPLATE", "EVAL_QUESTIONS")
OF_TASK = ("REWARD_WEIGHTS", "OUTCOME")


def constants_of_run(model, task):
    """Returns the constants of the run that saved `model`, by name, as far as answers depend on
    them; {} if `model` is not the folder of a checkpoint."""
    state = Path(model, "trainer", "state.json")
    if not state.is_file():
        return {}
    run = json.loads(state.read_text())["constants"]
    say(f"constants as in the run of {model}")
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
