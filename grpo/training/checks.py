"""What is checked before anything heavy starts: constants, task, data. A sentence a mistake."""

import difflib
import importlib
import json
import math
import numbers
import sys
import traceback
from pathlib import Path

from grpo.loss import LOSS_TYPES, OBJECTIVES
from grpo.models import prompt_ids
from grpo.sampling.rollout import rewarded
from grpo.training.metrics import say
from grpo.training.publish import NOISE

RULES = {  # what a constant must be: whether a value is
    "a whole number from 1 on": lambda value: whole(value) and value >= 1,
    "a whole number from 0 on": lambda value: whole(value) and value >= 0,
    "a number from 0 on": lambda value: real(value) and value >= 0,
    "True or False": lambda value: value in (True, False),
    "a text": lambda value: isinstance(value, str) and value != "",
}
TRAINER = {
    "a whole number from 1 on": """PROMPTS_PER_STEP GROUP_SIZE MAX_PROMPT_TOKENS
        MAX_COMPLETION_TOKENS SAMPLE_BATCH STEPS EVAL_STEPS EVAL_QUESTIONS SAVE_STEPS
        KEEP_CHECKPOINTS UPDATES_PER_ROLLOUT MICRO_BATCH_TOKENS WAIT_LIMIT_SECONDS
        REWARD_TIMEOUT_SECONDS MAX_BAD_STEPS IDLE_LIMIT""",
    "a whole number from 0 on": """LORA_RANK MAX_REFILLS WARMUP_STEPS SAMPLES_PER_STEP SEED
        PUBLISH_STEPS MAX_STALENESS REFERENCE_REFRESH_STEPS CPU_THREADS""",
    "a number from 0 on": """TEMPERATURE LEARNING_RATE CLIP_LOW CLIP_HIGH KL_BETA IS_CAP
        WEIGHT_DECAY FINAL_LR MAX_GRAD_NORM STOP_ACCURACY""",
    "True or False": """MASK_TRUNCATED SKIP_FLAT_GROUPS ADVANTAGE_STD UNBIASED_KL TRAINER_SAMPLES
        RECOMPUTE_OLD_LOGPS FUSED_LOSS SHARE_PROMPTS GRADIENT_CHECKPOINTING OFFLOAD_OPTIMIZER
        RESUME""",
    "a text": "MODEL TASK RUN_DIR REF_SERVER OUTCOME EVAL_SPLIT",
}
SERVER = {
    "a whole number from 1 on": """SCORE_BATCH_TOKENS THREADS MAX_STORE_BYTES MAX_BODY_BYTES
        MAX_POLICY_BYTES""",
    "a whole number from 0 on": "PORT",
    "a number from 0 on": "TEMPERATURE LEASE_SECONDS LEASE_WAIT_SECONDS",
    "True or False": "SHARE_PROMPTS REGROUP",
    "a text": "MODEL HOST STORE",
}
DTYPES = ["auto", *NOISE]


def arguments():
    """-> the words of the command line, without the --local_rank=N that deepspeed adds."""
    return [word for word in sys.argv[1:] if not word.startswith("--local_rank=")]


def usage(doc):
    """-> what a script whose __doc__ this is says of arguments that it does not know."""
    return "\n\n".join([*doc.split("\n\n")[:2], "All else is said by the constants in the file."])


def check_names(now, known):
    """Raises SystemExit where a preset has set constants in a script, whose globals() are `now`,
    that the script does not have: misspelt, they would be without effect."""
    for name in now:
        if name.isupper() and name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0)[0]
            raise SystemExit(f"there is no constant {name}: is {near} meant?")


def check_constants(now):
    """Raises SystemExit with a sentence for each constant of the trainer, `now`, that can't be."""
    weights = now["REWARD_WEIGHTS"]
    named = isinstance(weights, dict) and weights and all(map(real, weights.values()))
    texts = isinstance(now["STOP_TOKENS"], list | tuple)
    texts = texts and all(isinstance(token, str) for token in now["STOP_TOKENS"])
    betas = now["ADAM_BETAS"]
    pair = isinstance(betas, tuple | list) and len(betas) == 2
    rules = [
        *rules_of(TRAINER, now),
        ("REWARD_WEIGHTS", "a dict of numbers by name", named),
        ("STOP_TOKENS", "a list of texts", texts),
        ("ADAM_BETAS", "two numbers below 1", pair and all(real(b) and 0 <= b < 1 for b in betas)),
        ("LOSS_TYPE", f"one of {', '.join(LOSS_TYPES)}", now["LOSS_TYPE"] in list(LOSS_TYPES)),
        ("OBJECTIVE", f"one of {', '.join(OBJECTIVES)}", now["OBJECTIVE"] in OBJECTIVES),
        ("RATIO_LEVEL", "token or sequence", now["RATIO_LEVEL"] in ("token", "sequence")),
        ("DTYPE", f"one of {', '.join(DTYPES)}", now["DTYPE"] in DTYPES),
    ]
    refuse_broken("grpo_ref_split.py", now, rules)
    refuse_broken("grpo_ref_split.py", now, together(**now))  # the types are right


def check_server_constants(now):
    """The same for the constants of ref_server.py."""
    dtype = ("DTYPE", f"one of {', '.join(DTYPES)}", now["DTYPE"] in DTYPES)
    refuse_broken("ref_server.py", now, [*rules_of(SERVER, now), dtype])
    wait, body = now["LEASE_WAIT_SECONDS"], now["MAX_BODY_BYTES"]
    rules = [
        ("TEMPERATURE", "above 0", now["TEMPERATURE"] > 0),
        ("PORT", "65535 at most; 0 is any that is free", now["PORT"] <= 65535),
        (
            "LEASE_WAIT_SECONDS",
            "below LEASE_SECONDS, and below 60, when clients give up",
            wait < min(now["LEASE_SECONDS"], 60),
        ),
        ("MAX_BODY_BYTES", "1 MB at least: 1 << 20", body >= 1 << 20),
        ("MAX_STORE_BYTES", "MAX_BODY_BYTES or more", now["MAX_STORE_BYTES"] >= body),
    ]
    refuse_broken("ref_server.py", now, rules)


def rules_of(table, now):
    """-> rules, (constant, what it must be, whether it is), of a table's constants."""
    return [(n, what, RULES[what](now[n])) for what in table for n in table[what].split()]


def refuse_broken(script, now, rules):
    broken = [f"{name} = {now[name]!r} must be {what}" for name, what, holds in rules if not holds]
    if broken:
        raise SystemExit(f"{script} can't run with these constants:\n" + "\n".join(broken))


def together(*, GROUP_SIZE, TEMPERATURE, CLIP_LOW, CLIP_HIGH, IS_CAP, MAX_GRAD_NORM, **now):
    """-> rules of the trainer's constants with each other, where their types are right."""
    address = now["REF_SERVER"].startswith(("http://", "https://"))
    oldest = max(now["PUBLISH_STEPS"], now["UPDATES_PER_ROLLOUT"])
    refreshes = now["REFERENCE_REFRESH_STEPS"]
    return [
        ("REF_SERVER", "http://host:port", address),
        ("OUTCOME", "one of the names in REWARD_WEIGHTS", now["OUTCOME"] in now["REWARD_WEIGHTS"]),
        ("GROUP_SIZE", "2 or more, to be compared with each other", GROUP_SIZE >= 2),
        ("TEMPERATURE", "above 0, or all of a group are equal", TEMPERATURE > 0),
        ("CLIP_LOW", "above 0, and 1 at most", 0 < CLIP_LOW <= 1),
        ("CLIP_HIGH", "above 0", CLIP_HIGH > 0),
        ("IS_CAP", "0, which is off, or 1 and more", IS_CAP == 0 or IS_CAP >= 1),
        ("MAX_GRAD_NORM", "above 0; a large one does not clip", MAX_GRAD_NORM > 0),
        (
            "MAX_STALENESS",
            "PUBLISH_STEPS and UPDATES_PER_ROLLOUT or more: so old is what workers sample",
            now["MAX_STALENESS"] >= oldest,
        ),
        (
            "TRAINER_SAMPLES",
            "True where no workers can: PUBLISH_STEPS is 0",
            now["TRAINER_SAMPLES"] or now["PUBLISH_STEPS"] > 0,
        ),
        (
            "REFERENCE_REFRESH_STEPS",
            "0 where there is no reference: KL_BETA is 0",
            now["KL_BETA"] > 0 or not refreshes,
        ),
        (
            "SAMPLE_BATCH",
            "GROUP_SIZE or more: groups stay whole",
            now["SAMPLE_BATCH"] >= GROUP_SIZE,
        ),
    ]


def whole(value):
    return type(value) is int


def real(value):
    """Whether a finite number, which True is not; NumPy's are, too."""
    number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    return number and math.isfinite(value)


def load_task(name):
    """-> the module tasks/NAME.py. Raises SystemExit if there is none, or it lacks a function."""
    try:
        task = importlib.import_module(f"tasks.{name}")
    except ModuleNotFoundError as error:
        raise SystemExit(
            f"TASK = {name!r}: no tasks/{name}.py that can be imported ({error})"
        ) from None
    missing = {"load", "messages", "rewards"} - vars(task).keys()
    if missing:
        raise SystemExit(f"tasks/{name}.py lacks {', '.join(sorted(missing))}; see tasks/gsm8k.py")
    return task


def load_prompts(name, task, split, tokenizer, max_prompt_tokens):
    """-> [(index, item, prompt_ids)] of the split, without longer prompts. Raises SystemExit with a
    sentence where the task gives no questions, or none that fits."""
    items = load_items(name, task, split)
    ids = [prompt_ids(tokenizer, chat_of(name, task, item["question"])) for item in items]
    prompts = [
        (index, item, prompt)
        for index, (item, prompt) in enumerate(zip(items, ids, strict=True))
        if len(prompt) <= max_prompt_tokens
    ]
    say(f"{name}/{split}: {len(items)} questions, {len(items) - len(prompts)} left out as too long")
    if not prompts:
        raise SystemExit(f"no question fits MAX_PROMPT_TOKENS = {max_prompt_tokens}: raise it")
    return prompts


def load_items(name, task, split):
    """-> the task's items of the split. Raises SystemExit where load() gives anything else."""
    call, splits = f"tasks/{name}.py: load({split!r})", 'for "train" and EVAL_SPLIT'
    must = f'it must return a list of dicts, each with a "question", {splits}'
    try:
        items = list(task.load(split))
    except Exception as error:
        raise SystemExit(f"{call} failed with {error!r}{line_of(task, error)}: {must}") from error
    if not items:
        raise SystemExit(f"{call} returned no item: {must}")
    for number, item in enumerate(items):
        if not (isinstance(item, dict) and "question" in item):
            raise SystemExit(f"{call} returned {item!r:.500} as item {number}: {must}")
    return items


def chat_of(name, task, question):
    """-> the task's messages for a question. Raises SystemExit where messages() gives no chat."""
    call = f"tasks/{name}.py: messages({question!r:.500})"
    must = 'it must return a list of {"role": ..., "content": ...}, both texts'
    try:
        chat = task.messages(question)
    except Exception as error:
        raise SystemExit(f"{call} failed with {error!r}{line_of(task, error)}: {must}") from error
    is_chat = isinstance(chat, list | tuple) and chat and all(isinstance(m, dict) for m in chat)
    if not is_chat or not all(isinstance(m.get(k), str) for m in chat for k in ("role", "content")):
        raise SystemExit(f"{call} returned {chat!r:.500}: {must}")
    return chat


def check_rewards(recipe):
    """Has the task reward an empty completion of its first question, before anything heavy is
    loaded. Raises SystemExit where that fails, with its traceback, or gives no such rewards."""
    try:
        rewarded(recipe, recipe.prompts[0][1], [""])
    except RuntimeError as error:
        trace = "".join(traceback.format_exception(error.__cause__))
        must = "a task must reward any completion, and an empty one can be sampled"
        raise SystemExit(f"{trace}{error}: {must}") from error


def line_of(task, error):
    """-> " in line 9", the task's own that led to the error; "" where none did."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [f.lineno for f in frames if f.filename == getattr(task, "__file__", None)]
    return f" in line {lines[-1]}" if lines else ""


# --- A run that goes on ----------------------------------------------------------------
def constants_of(now):
    """-> the constants in a script's globals(), as JSON gives them back."""
    plain = int | float | str | list | tuple | dict | None
    kept = {k: v for k, v in now.items() if k.isupper() and isinstance(v, plain)}
    return json.loads(json.dumps(kept, default=str))


def check_same_run(state, now, ranks):
    """Raises SystemExit where a run can't go on from a checkpoint's `state`: on more or fewer
    ranks, as each has its part of the optimiser, or with another model. Says what else changed."""
    before = state["constants"]
    if state["ranks"] != ranks:
        raise SystemExit(
            f"RUN_DIR = {now['RUN_DIR']!r} is a run on {state['ranks']} ranks, here are {ranks}:"
            f" launch {state['ranks']}, or begin another run from its weights, with another RUN_DIR"
            f" and MODEL = '{Path(now['RUN_DIR'])}/step_{state['step']:06d}'"
        )
    check_same(before, now, ("MODEL", "LORA_RANK", "DTYPE"))
    here = constants_of(now)
    changed = [f"{k} {before[k]!r} -> {v!r}" for k, v in here.items() if before.get(k, v) != v]
    if changed:
        say(f"the run goes on with other constants: {', '.join(changed)}")


def check_same(before, now, names):
    """Raises SystemExit where one of these constants is not what it was before."""
    for name in differing(before, now, names):
        raise SystemExit(
            f"{name} = {now[name]!r} must be {before.get(name)!r}, as the run in RUN_DIR ="
            f" {now['RUN_DIR']!r} has it; choose another RUN_DIR for another run"
        )


def differing(before, now, names):
    return [name for name in names if before.get(name) != now[name]]
