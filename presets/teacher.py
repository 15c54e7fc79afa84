"""Qwen2.5-1.5B (GPU of 48 GB) learns from rewards and from a 7B teacher (GPU of 24 GB).

    CUDA_VISIBLE_DEVICES=1 python ref_server.py presets/teacher.py MODEL=Qwen/Qwen2.5-7B   # first
    CUDA_VISIBLE_DEVICES=0 python grpo_ref_split.py presets/teacher.py                     # then

Computed, not run: of its GPU's 47.7 GB the trainer needs 35.2 GB; the server needs
18.5 GB of the other GPU.
To learn from the teacher alone, set REWARD_WEIGHTS = {} and KL_BETA = 1 (docs/loss.md).
"""

MODEL = "Qwen/Qwen2.5-1.5B"  # the student; the teacher must have the same tokenizer
RUN_DIR = "runs/teacher"
KL_BETA = 0.2  # weight of the teacher; at 1 the rewards would hardly count
UNBIASED_KL = True  # gives the gradient of on-policy distillation
SKIP_FLAT_GROUPS = False  # the teacher helps even if all completions are wrong
SAMPLE_BATCH = 224
