"""Qwen2.5-7B by LoRA on one card of 24 GB: one process, whose reference is the model itself.

    python grpo_ref_split.py presets/7b_lora_1x24gb.py

Computed, not run: of the GPU's 23.5 GB the trainer needs 17.1 GB at least. Full training does not
fit, with OFFLOAD_OPTIMIZER neither. A checkpoint is an adapter (python -m grpo.merge).
"""

MODEL = "Qwen/Qwen2.5-7B"
RUN_DIR = "runs/7b_lora_1x24gb"
REF_SERVER = None
LORA_RANK = 16
LEARNING_RATE = 1e-5
