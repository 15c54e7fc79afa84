"""What is checked before anything heavy starts: constants, task, data. A sentence a mistake."""

import json
from pathlib import Path

from grpo.constants import DTYPES, real, refuse_broken, rules_of
from grpo.log import say
from grpo.loss import LOSS_TYPES, OBJECTIVES

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
