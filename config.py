"""What is checked before anything heavy starts: constants, task, data. A sentence a mistake."""

import importlib
import json
import math
import numbers
import traceback
from pathlib import Path

from grpo_loss import LOSS_TYPES, OBJECTIVES
from policy import prompt_ids
from policy_sync import NOISE
from report import say
from rollout import rewarded

COUNTS = """PROMPTS_PER_STEP GROUP_SIZE MAX_PROMPT_TOKENS MAX_COMPLETION_TOKENS SAMPLE_BATCH STEPS
    EVAL_STEPS EVAL_QUESTIONS SAVE_STEPS KEEP_CHECKPOINTS UPDATES_PER_ROLLOUT MICRO_BATCH_TOKENS
    WAIT_LIMIT_SECONDS REWARD_TIMEOUT_SECONDS MAX_BAD_STEPS IDLE_LIMIT"""
WHOLES = """LORA_RANK MAX_REFILLS WARMUP_STEPS SAMPLES_PER_STEP SEED PUBLISH_STEPS MAX_STALENESS
    REFERENCE_REFRESH_STEPS CPU_THREADS"""
REALS = """TEMPERATURE LEARNING_RATE CLIP_LOW CLIP_HIGH KL_BETA IS_CAP WEIGHT_DECAY FINAL_LR
    MAX_GRAD_NORM STOP_ACCURACY"""
SWITCHES = """MASK_TRUNCATED SKIP_FLAT_GROUPS ADVANTAGE_STD UNBIASED_KL TRAINER_SAMPLES
    RECOMPUTE_OLD_LOGPS FUSED_LOSS SHARE_PROMPTS GRADIENT_CHECKPOINTING OFFLOAD_OPTIMIZER RESUME"""
TEXTS = "MODEL TASK RUN_DIR REF_SERVER OUTCOME EVAL_SPLIT"


def check_constants(now):
    """Raises SystemExit with a sentence for each constant of the trainer, `now`, that can't be."""
    weights = now["REWARD_WEIGHTS"]
    named = isinstance(weights, dict) and weights and all(map(real, weights.values()))
    texts = isinstance(now["STOP_TOKENS"], list | tuple)
    texts = texts and all(isinstance(token, str) for token in now["STOP_TOKENS"])
    betas = now["ADAM_BETAS"]
    pair = isinstance(betas, tuple | list) and len(betas) == 2
    rules = [
        *((n, "a whole number from 1 on", whole(now[n]) and now[n] >= 1) for n in COUNTS.split()),
        *((n, "a whole number from 0 on", whole(now[n]) and now[n] >= 0) for n in WHOLES.split()),
        *((n, "a number from 0 on", real(now[n]) and now[n] >= 0) for n in REALS.split()),
        *((n, "True or False", now[n] in (True, False)) for n in SWITCHES.split()),
        *((n, "a text", isinstance(now[n], str) and now[n] != "") for n in TEXTS.split()),
        ("REWARD_WEIGHTS", "a dict of numbers by name", named),
        ("STOP_TOKENS", "a list of texts", texts),
        ("ADAM_BETAS", "two numbers below 1", pair and all(real(b) and 0 <= b < 1 for b in betas)),
        ("LOSS_TYPE", f"one of {', '.join(LOSS_TYPES)}", now["LOSS_TYPE"] in list(LOSS_TYPES)),
        ("OBJECTIVE", f"one of {', '.join(OBJECTIVES)}", now["OBJECTIVE"] in OBJECTIVES),
        ("RATIO_LEVEL", "token or sequence", now["RATIO_LEVEL"] in ("token", "sequence")),
        ("DTYPE", f"one of auto, {', '.join(NOISE)}", now["DTYPE"] in ["auto", *NOISE]),
    ]
    if all(holds for _, _, holds in rules):  # the types are right
        rules = together(**now)
    broken = [f"{name} = {now[name]!r} must be {what}" for name, what, holds in rules if not holds]
    if broken:
        raise SystemExit("grpo_ref_split.py can't run with these constants:\n" + "\n".join(broken))


def together(*, GROUP_SIZE, TEMPERATURE, CLIP_LOW, CLIP_HIGH, IS_CAP, MAX_GRAD_NORM, **now):
    """-> rules, (constant, what it must be, whether it is), of values of the right type."""
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
