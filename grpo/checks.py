"""Checks the trainer's constants before a model is loaded. Nothing here imports torch, so that a
mistake in the command is reported at once."""

import importlib.util
import re

from grpo import constants
from grpo.constants import COUNT, FLAG, NUMBER, POSITIVE, TEXT, WHOLE, dict_of, list_of, one_of, or_
from grpo.task import check_task_file


def address(what, pattern):
    return what, lambda value: isinstance(value, str) and re.fullmatch(pattern, value)


KINDS = [  # (kind, constants)
    (WHOLE, """PROMPTS_PER_STEP GROUP_SIZE MAX_PROMPT_TOKENS MAX_COMPLETION_TOKENS STEPS
        EVAL_QUESTIONS KEEP_CHECKPOINTS UPDATES_PER_ROLLOUT WAIT_LIMIT_SECONDS
        REWARD_TIMEOUT_SECONDS IDLE_LIMIT MICRO_BATCH_TOKENS SAMPLE_BATCH"""),
    (COUNT, """LORA_RANK WARMUP_STEPS SEED EVAL_STEPS PUBLISH_STEPS
        MAX_STALENESS SAVE_STEPS"""),
    (NUMBER, """TEMPERATURE LEARNING_RATE CLIP_LOW CLIP_HIGH KL_BETA IS_CAP WEIGHT_DECAY FINAL_LR
        MAX_GRAD_NORM"""),
    (POSITIVE, "VLLM_CACHE_GB"),
    (FLAG, """MASK_TRUNCATED ADVANTAGE_STD UNBIASED_KL SKIP_FLAT_GROUPS
        FUSED_LOSS GRADIENT_CHECKPOINTING OFFLOAD_OPTIMIZER"""),
    (TEXT, "MODEL TASK RUN_DIR EVAL_SPLIT"),
    (list_of("strings, none of them empty", TEXT[1]), "STOP_TOKENS STOP_STRINGS"),
    (constants.DTYPE, "DTYPE"),
    (one_of(16, 4), "BASE_BITS"),
    (one_of("grpo", "dapo", "dr_grpo"), "LOSS_TYPE"),  # grpo.loss.LOSS_TYPES, which needs torch
    (one_of("clip", "cispo"), "OBJECTIVE"),  # OBJECTIVES there
    (one_of("token", "sequence"), "RATIO_LEVEL"),
    (one_of("torch", "vllm"), "SAMPLER"),
    (or_(None, TEXT), "OUTCOME REFERENCE"),
    (or_(None, dict_of("numbers", constants.real)), "REWARD_WEIGHTS"),
    (dict_of("options", lambda option: True), "CHAT_TEMPLATE"),
    (list_of('"tensorboard" or "wandb"', lambda to: to in ("tensorboard", "wandb")), "REPORT_TO"),
    (or_(None, address("http://host:port", r"https?://[^\s/].*")), "REF_SERVER"),
    (address("http://host:port", r"http://[^\s/?#@]+:[1-9]\d{0,4}/?"), "TRAINER"),
]  # fmt: skip
RELATIONS = [  # (constant, what it must be, whether it is), of constants of the right kinds
    ("GROUP_SIZE", "2 or more, to compare the rewards of a group (1 needs REWARD_WEIGHTS = {})",
     lambda c: c.GROUP_SIZE >= 2 or c.REWARD_WEIGHTS == {}),
    ("SAMPLER", "'torch', as vLLM is not installed (pip install -e .[vllm])",
     lambda c: c.SAMPLER == "torch" or importlib.util.find_spec("vllm")),
    ("REPORT_TO", "[], as a package of it is not installed: pip install it",
     lambda c: all(map(importlib.util.find_spec, c.REPORT_TO))),
    ("BASE_BITS", "16 with LORA_RANK = 0: weights of 4 bits can't be trained, adapters can",
     lambda c: c.BASE_BITS == 16 or c.LORA_RANK > 0),
    ("BASE_BITS", "16, as bitsandbytes is not installed (pip install -e .[bits])",
     lambda c: c.BASE_BITS == 16 or importlib.util.find_spec("bitsandbytes")),
    ("SAMPLER", "'torch' with BASE_BITS = 4, as vLLM would sample with other weights",
     lambda c: c.BASE_BITS == 16 or c.SAMPLER == "torch"),
    ("SAMPLE_BATCH", "GROUP_SIZE or more, as a group is sampled as a whole",
     lambda c: c.SAMPLE_BATCH >= c.GROUP_SIZE),
    ("TEMPERATURE", "above 0: at 0 all completions of a group are equal",
     lambda c: c.TEMPERATURE > 0),
    ("IS_CAP", "0 (off), or 1 or more", lambda c: c.IS_CAP == 0 or c.IS_CAP >= 1),
    ("SKIP_FLAT_GROUPS", "False if REWARD_WEIGHTS = {}: the KL penalty applies to all groups",
     lambda c: c.REWARD_WEIGHTS != {} or not c.SKIP_FLAT_GROUPS),
    ("KL_BETA", "above 0 if REWARD_WEIGHTS = {}: without rewards only the KL penalty trains",
     lambda c: c.REWARD_WEIGHTS != {} or c.KL_BETA > 0),
    ("MAX_STALENESS", "at least PUBLISH_STEPS and UPDATES_PER_ROLLOUT: groups reach that age",
     lambda c: not c.PUBLISH_STEPS or c.MAX_STALENESS >= max(c.PUBLISH_STEPS,
                                                             c.UPDATES_PER_ROLLOUT)),
    ("RATIO_LEVEL", "'token' with workers, unless DTYPE = 'float32': rounding alone is clipped",
     lambda c: c.RATIO_LEVEL == "token" or not c.PUBLISH_STEPS or c.DTYPE == "float32"),
    ("REFERENCE", "None with a server, whose MODEL is the reference; or set REF_SERVER = None",
     lambda c: c.REF_SERVER is None or c.REFERENCE is None),
]  # fmt: skip


def trainer_constants(defaults, given):
    """Returns the trainer's Constants. Raises SystemExit with a line for each wrong one, or if the
    task's file is missing."""
    c = constants.checked("grpo_ref_split.py", defaults, given, KINDS, RELATIONS)
    check_task_file(c.TASK)
    return c
