"""Qwen2.5-1.5B on a card of 48 GB, by rewards and by a teacher: the 7B on another card, of 24 GB.

    CUDA_VISIBLE_DEVICES=1 python ref_server.py presets/teacher.py MODEL=Qwen/Qwen2.5-7B   # first
    CUDA_VISIBLE_DEVICES=0 python grpo_ref_split.py presets/teacher.py                     # then

Computed, not run: of a GPU's 44.4 GB the trainer needs 30.1 GB at least and the server 17.0 GB.
docs/teacher.md: without rewards REWARD_WEIGHTS = {}, KL_BETA = 1, and GROUP_SIZE may be 1.
"""

MODEL = "Qwen/Qwen2.5-1.5B"  # the student; a teacher must have its tokenizer
RUN_DIR = "runs/teacher"
KL_BETA = 0.2  # 1 would drown the rewards
UNBIASED_KL = True  # the gradient of on-policy distillation
SKIP_FLAT_GROUPS = False  # the teacher teaches where all completions are wrong, too
MASK_TRUNCATED = False  # each token has a signal of its own
