"""A model's answers to a task's questions, in a file as they come (evaluate.py).

The file has a line of settings, and then one for each question: {"question": its number, "answers":
[{"text", "tokens", "truncated", "rewards": {name: number, or null: does not apply}}, ...]}. Several
processes may append to it, on disks where file locks work.
"""

import contextlib
import fcntl
import hashlib
import json
import math
import re
from pathlib import Path

from grpo.log import say
from grpo.sampling import rollout
from grpo.sampling.memory import fit_worker


# --- The file -----------------------------------------------------------------------
@contextlib.contextmanager
def opened(path):
    """Opens a file to read, and to append to; other processes wait."""
    with open(path, "a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        yield file


def read_answers(path, settings):
    """Returns {question: answers} of what is in the file, which is made where it is missing. Raises
    SystemExit if it is of other settings, or can't be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with opened(path) as file:
            text, records = file.read(), []
            for line in text.splitlines():
                with contextlib.suppress(ValueError):  # of a line that was cut
                    records.append(json.loads(line))
            if not records:
                file.truncate(0)
                file.write(json.dumps({"settings": settings}) + "\n")
            elif not text.endswith("\n"):
                file.write("\n")  # ends a line that was cut when the process ended
    except OSError as error:
        raise SystemExit(f"{path} can't be written ({error}): choose another --out") from error
    there = records[0].get("settings", {}) if records else settings
    for name in sorted(there.keys() | settings.keys()):
        if there.get(name) != settings.get(name):
            raise SystemExit(
                f"{path} has answers of other settings: {name} is {there.get(name)!r} there,"
                f" {settings.get(name)!r} here; delete it, or choose another --out"
            )
    return {record["question"]: record["answers"] for record in records[1:]}


def answer(c, policy, recipe, path, prompts, seed):
    """Samples the recipe's group_size answers to each of `prompts` (as Recipe.prompts), and appends
    them to the file; yields after each question. `c` is the trainer's constants, `seed` what they
    are drawn by beside SEED."""
    size = recipe.c.GROUP_SIZE
    recipe = recipe.others()  # a copy: its SAMPLE_BATCH depends on its GROUP_SIZE
    fit_worker(recipe.c, policy)
    recipe.c.SAMPLE_BATCH = max(recipe.c.SAMPLE_BATCH, size)
    seed = rollout.seed_of("evaluate", c.SEED, *seed)
    groups = rollout.sampled_and_rewarded(policy, recipe, prompts, seed=seed)
    for (index, *_), completions, rewards in groups:
        answers = [
            {
                "text": policy.text(completion),
                "tokens": len(completion.ids),
                "truncated": bool(completion.truncated),
                "rewards": {k: None if math.isnan(v) else v for k, v in given.items()},
            }
            for completion, given in zip(completions, rewards, strict=True)
        ]
        with opened(path) as file:
            file.write(json.dumps({"question": index, "answers": answers}) + "\n")
        yield index


# --- Which constants, which file ------------------------------------------------------
# What a run's checkpoint brings along; the last two only to the same task
OF_RUN = ("MAX_PROMPT_TOKENS", "MAX_COMPLETION_TOKENS", "TEMPERATURE", "STOP_TOKENS", "DTYPE")
OF_RUN += ("STOP_STRINGS", "CHAT_TEMPLATE", "EVAL_SPLIT", "EVAL_QUESTIONS")
OF_TASK = ("REWARD_WEIGHTS", "OUTCOME")


def constants_of_run(model, task):
    """Returns the constants, by name, that answers depend on, of the run where `model` is the
    folder of its checkpoint; else {}."""
    state = Path(model, "trainer", "state.json")
    if not state.is_file():
        return {}
    run = json.loads(state.read_text())["constants"]
    say(f"constants as in the run of {model}")
    names = OF_RUN + (OF_TASK if run["TASK"] == task else ())
    return {name: run[name] for name in names if name in run}


def kind_of(recipe):
    """Returns how a recipe draws its answers: "greedy", or "8 samples at temperature 1"."""
    if not recipe.c.TEMPERATURE:
        return "greedy"
    return f"{recipe.c.GROUP_SIZE} samples at temperature {recipe.c.TEMPERATURE:g}"


def file_of(c, model, out, kind):
    """Returns the file of a model's answers, in its own folder, or in one with its name in the
    folder `out`, or in runs/eval."""
    local, name = Path(model).is_dir(), model.replace("/", "--")
    if local:
        name = "--".join(Path(model).resolve().parts[-2:])
    folder = Path(model, "eval") if local and not out else Path(out or "runs/eval", name)
    what = f"{Path(c.TASK).stem}-{c.EVAL_SPLIT}-{c.MAX_COMPLETION_TOKENS}-tokens-{kind}"
    return folder / (re.sub(r"[^\w.-]", "-", what) + ".jsonl")


# --- What the answers depend on -------------------------------------------------------
NAMES = ("TASK", "EVAL_SPLIT", "MAX_COMPLETION_TOKENS", "STOP_TOKENS", "STOP_STRINGS", "DTYPE")


def settings_of(c, recipe, model):
    """Returns what must be the same for answers to be kept, as JSON gives it back."""
    prompts = json.dumps([[index, ids] for index, _, ids in recipe.prompts]).encode()
    task = Path(recipe.task.__file__).read_bytes()
    settings = {name: getattr(c, name) for name in NAMES if hasattr(c, name)} | {
        "how": kind_of(recipe),
        "OUTCOME": recipe.c.OUTCOME,
        "rewards": list(recipe.c.REWARD_WEIGHTS),
        "the hash of the task's file": hashlib.sha256(task).hexdigest(),
        "the hash of the prompts (tokenizer and data)": hashlib.sha256(prompts).hexdigest(),
        "the hash of some weights": fingerprint(model),
    }
    return json.loads(json.dumps(settings))


def fingerprint(model, parts=16, size=2**16):
    """Returns a hash of `parts` pieces of `size` bytes of each of a folder's weight files, which
    training changes; of a hub model its name. A folder trained anew must not keep its answers."""
    if not Path(model).is_dir():
        return model
    digest = hashlib.sha256()
    for path in sorted(Path(model).glob("*.safetensors")):
        length = path.stat().st_size
        digest.update(f"{path.name} {length}".encode())
        with open(path, "rb") as file:
            for part in range(parts):
                file.seek(length * part // parts)
                digest.update(file.read(size))
    return digest.hexdigest()
