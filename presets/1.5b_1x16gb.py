"""Qwen2.5-1.5B by LoRA on one card of 16 GB: one process, whose reference is the model itself.

    python grpo_ref_split.py presets/1.5b_1x16gb.py

Computed, not run: of the GPU's 14.5 GB the trainer needs 5.3 GB at least, and about twice that on a
T4 or V100, which have no bfloat16. A checkpoint is an adapter (python -m grpo.merge).
"""

MODEL = "Qwen/Qwen2.5-1.5B"
RUN_DIR = "runs/1.5b_1x16gb"
REF_SERVER = None
LORA_RANK = 16
LEARNING_RATE = 1e-5
