"""Checks of the trainer: its constants, before anything heavy starts, and its updates."""

from types import SimpleNamespace
from urllib.parse import urlsplit

from grpo.constants import DTYPES, RULES, real, refuse_broken, rules_of
from grpo.log import say
from grpo.loss import LOSS_TYPES, OBJECTIVES
from grpo.proof import check_first_update
from grpo.training.engine import SCHEDULES

TRAINER = {
    "a whole number from 1 on": """PROMPTS_PER_STEP GROUP_SIZE MAX_PROMPT_TOKENS
        MAX_COMPLETION_TOKENS STEPS EVAL_QUESTIONS SAVE_STEPS
        KEEP_CHECKPOINTS UPDATES_PER_ROLLOUT WAIT_LIMIT_SECONDS
        REWARD_TIMEOUT_SECONDS MAX_BAD_STEPS IDLE_LIMIT""",
    "a whole number from 0 on": """LORA_RANK MAX_REFILLS WARMUP_STEPS SAMPLES_PER_STEP SEED
        EVAL_STEPS PUBLISH_STEPS MAX_STALENESS REFERENCE_REFRESH_STEPS CPU_THREADS
        REWARD_PROCESSES""",
    "a number from 0 on": """TEMPERATURE LEARNING_RATE CLIP_LOW CLIP_HIGH KL_BETA IS_CAP
        WEIGHT_DECAY FINAL_LR MAX_GRAD_NORM STOP_ACCURACY""",
    "True or False": """MASK_TRUNCATED ADVANTAGE_STD UNBIASED_KL TRAINER_SAMPLES
        RECOMPUTE_OLD_LOGPS FUSED_LOSS SHARE_PROMPTS OFFLOAD_OPTIMIZER
        RESUME KEEP_BEST REFERENCE_ON_CPU""",
    '"auto" or a whole number from 1 on': "MICRO_BATCH_TOKENS SAMPLE_BATCH",
    '"auto", True or False': "GRADIENT_CHECKPOINTING",
    "a text": "MODEL TASK RUN_DIR EVAL_SPLIT",
}


def check_constants(constants):
    """Raises SystemExit with a sentence for each wrong constant: its value, and what it must be.
    `constants` are values by name, such as vars() of the trainer's; other names are ignored."""
    c = SimpleNamespace(**constants)
    single = [*rules_of(TRAINER, constants), *rules_of_one(c)]
    refuse_broken("grpo_ref_split.py", constants, single)
    refuse_broken("grpo_ref_split.py", constants, [*rules_of_several(c)])


def rules_of_one(c):
    """Yields rules (constant, what it must be, whether it is) of constants `c` of any type."""
    weights, stops, betas = c.REWARD_WEIGHTS, c.STOP_TOKENS, c.ADAM_BETAS
    named = weights and isinstance(weights, dict) and all(map(real, weights.values()))
    yield "REWARD_WEIGHTS", "a dict of numbers by name, or None", weights is None or named
    yield "OUTCOME", "a text, or None", c.OUTCOME is None or RULES["a text"](c.OUTCOME)
    options = isinstance(c.CHAT_TEMPLATE, dict) and all(isinstance(k, str) for k in c.CHAT_TEMPLATE)
    yield "CHAT_TEMPLATE", "a dict of options by name", options
    texts = isinstance(stops, list | tuple) and all(isinstance(token, str) for token in stops)
    yield "STOP_TOKENS", "a list of texts", texts
    strings = c.STOP_STRINGS
    texts = isinstance(strings, list | tuple) and all(isinstance(x, str) and x for x in strings)
    yield "STOP_STRINGS", "a list of texts, none of them empty", texts
    two = isinstance(betas, list | tuple) and len(betas) == 2 and all(map(real, betas))
    yield "ADAM_BETAS", "two numbers below 1", two and all(0 <= beta < 1 for beta in betas)
    yield "LOSS_TYPE", f"one of {', '.join(LOSS_TYPES)}", c.LOSS_TYPE in LOSS_TYPES
    yield "OBJECTIVE", f"one of {', '.join(OBJECTIVES)}", c.OBJECTIVE in OBJECTIVES
    yield "RATIO_LEVEL", "token or sequence", c.RATIO_LEVEL in ("token", "sequence")
    criteria = ("outcome", "reward", False, True)
    yield "SKIP_FLAT_GROUPS", '"outcome", "reward" or False', c.SKIP_FLAT_GROUPS in criteria
    known = isinstance(c.REPORT_TO, list | tuple) and all(
        callable(to) or to in ("tensorboard", "wandb") for to in c.REPORT_TO
    )
    yield "REPORT_TO", 'a list of "tensorboard", "wandb" and functions', known
    yield "DTYPE", f"one of {', '.join(DTYPES)}", c.DTYPE in DTYPES
    yield "LR_SCHEDULE", f"one of {', '.join(SCHEDULES)}", c.LR_SCHEDULE in SCHEDULES
    web = isinstance(c.REF_SERVER, str) and c.REF_SERVER.startswith(("http://", "https://"))
    yield "REF_SERVER", "http://host:port, or None", web or c.REF_SERVER is None
    yield "TRAINER", "http://host:port", is_address(c.TRAINER)


def is_address(text):
    """Returns whether a text is http://host:port, with no path."""
    if not isinstance(text, str):
        return False
    try:
        parts = urlsplit(text)
        return parts.scheme == "http" and bool(parts.hostname) and bool(parts.port)
    except ValueError:
        return False


def rules_of_several(c):
    """Yields rules that compare constants, whose types are right, with limits and each other."""
    remedy = "0 with a server: set REF_SERVER = None, or start a new run from RUN_DIR/final"
    local = c.REF_SERVER is None or not c.REFERENCE_REFRESH_STEPS
    yield "REFERENCE_REFRESH_STEPS", f"{remedy} (MODEL, on both sides)", local
    named = None in (c.OUTCOME, c.REWARD_WEIGHTS) or c.OUTCOME in c.REWARD_WEIGHTS
    yield "OUTCOME", "one of the names in REWARD_WEIGHTS", named
    yield "GROUP_SIZE", "2 or more, to be compared with each other", c.GROUP_SIZE >= 2
    whole = c.SAMPLE_BATCH == "auto" or c.SAMPLE_BATCH >= c.GROUP_SIZE
    yield "SAMPLE_BATCH", "GROUP_SIZE or more: groups stay whole", whole
    yield "TEMPERATURE", "above 0, or all of a group are equal", c.TEMPERATURE > 0
    yield "CLIP_LOW", "above 0, and 1 at most", 0 < c.CLIP_LOW <= 1
    yield "CLIP_HIGH", "above 0", c.CLIP_HIGH > 0
    yield "IS_CAP", "0, which is off, or 1 and more", c.IS_CAP == 0 or c.IS_CAP >= 1
    yield "MAX_GRAD_NORM", "above 0; a large one does not clip", c.MAX_GRAD_NORM > 0
    oldest = max(c.PUBLISH_STEPS, c.UPDATES_PER_ROLLOUT)  # updates since a worker's policy
    remedy = "PUBLISH_STEPS and UPDATES_PER_ROLLOUT or more: so old is what workers sample"
    yield "MAX_STALENESS", remedy, c.MAX_STALENESS >= oldest
    sampled = c.TRAINER_SAMPLES or c.PUBLISH_STEPS > 0
    yield "TRAINER_SAMPLES", "True where no workers can: PUBLISH_STEPS is 0", sampled
    there = c.KL_BETA > 0 or not c.REFERENCE_REFRESH_STEPS
    yield "REFERENCE_REFRESH_STEPS", "0 where there is no reference: KL_BETA is 0", there


def check_update(run, metrics, sequences, groups, before):
    """Raises RuntimeError, on all ranks alike, after too many updates in a row that were not
    finite, or if the first one, on groups sampled after `before` updates, is not what theory
    says."""
    progress, c = run.progress, run.c
    if metrics["skipped"]:
        run.folder.bad_step(progress, sequences, metrics, limit=c.MAX_BAD_STEPS)
        return
    progress.bad = 0
    # Not where a resumed run trains groups of a history that was undone
    if not progress.checked and all(group.policy_version <= before for group in groups):
        said = check_first_update(metrics, run.policy.dtype, run.reference.info, model=c.MODEL)
        say(f"the first update is as it should be: {said}")
    progress.checked = True
