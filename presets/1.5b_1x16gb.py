"""Qwen2.5-1.5B with LoRA on one GPU of 16 GB: one process, no server.

    python grpo_ref_split.py presets/1.5b_1x16gb.py

Computed, not run: of the GPU's 15.6 GB the trainer needs 12.1 GB, and 1.6 times that on
a T4, which has no bfloat16. The reference is the model without its adapter. A checkpoint is an
adapter (python -m grpo.commands.merge).
"""

MODEL = "Qwen/Qwen2.5-1.5B"
RUN_DIR = "runs/1.5b_1x16gb"
REF_SERVER = None
LORA_RANK = 16
LEARNING_RATE = 1e-5
SAMPLE_BATCH = 112
