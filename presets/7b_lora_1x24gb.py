"""Qwen2.5-7B with LoRA on one GPU of 24 GB: one process, no server.

    python grpo_ref_split.py presets/7b_lora_1x24gb.py

Computed, not run: of the GPU's 25.2 GB the trainer needs 20.2 GB. Full training does not
fit, not even with OFFLOAD_OPTIMIZER. The reference is the model without its adapter. A checkpoint
is an adapter (python -m grpo.commands.merge).
"""

MODEL = "Qwen/Qwen2.5-7B"
RUN_DIR = "runs/7b_lora_1x24gb"
REF_SERVER = None
LORA_RANK = 16
LEARNING_RATE = 1e-5
SAMPLE_BATCH = 16
MICRO_BATCH_TOKENS = 4096
