"""PUBLISH_STEPS: the settings that must be equal in the trainer and its workers."""

import hashlib
import json
from pathlib import Path

# Constants that must be equal, in addition to what settings_of adds
SHARED = "GROUP_SIZE MAX_PROMPT_TOKENS MAX_COMPLETION_TOKENS TEMPERATURE STOP_TOKENS STOP_STRINGS"
SHARED += " BASE_BITS RATIO_LEVEL"


def settings_of(recipe):
    """Returns the settings, as JSON values, that the trainer publishes and workers compare."""
    prompts = json.dumps([[prompt.index, prompt.ids] for prompt in recipe.prompts]).encode()
    file = getattr(recipe.task, "__file__", None)
    code = Path(file).read_bytes() if file else b""  # its rewards
    settings = {name: getattr(recipe.c, name) for name in SHARED.split()} | {
        "OUTCOME": recipe.outcome,
        "REWARD_WEIGHTS": recipe.weights,
        "TASK": Path(recipe.c.TASK).name,  # a worker may have the file in another folder
        "order of REWARD_WEIGHTS": list(recipe.weights),
        "TOOLS": recipe.chat_options.get("tools"),
        "hash of prompts (tokenizer, task, data)": hashlib.sha256(prompts).hexdigest(),
        "hash of the task's file": hashlib.sha256(code).hexdigest(),
    }
    return json.loads(json.dumps(settings))


def check_settings(theirs, mine):
    """Raises SystemExit with the constants that differ from the trainer's."""
    differ = [k for k in mine if mine[k] != theirs.get(k)]
    if differ:
        raise SystemExit(
            "this worker differs from the trainer: "
            + ", ".join(f"{k} is {mine[k]!r} here, {theirs.get(k)!r} there" for k in differ)
            + ". Start it with the trainer's constants, tokenizer, task file and code version"
        )
