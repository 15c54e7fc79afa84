"""Qwen2.5-7B with LoRA beside 4-bit weights on one GPU of 16 GB: one process, no server.

    python grpo_ref_split.py presets/7b_4bit_1x16gb.py

Needs pip install -e .[bits]. Computed, not run: of the GPU's 15.6 GB the trainer needs 13.3 GB. The
reference is the model without its adapter. A checkpoint is an adapter (python -m
grpo.commands.merge).
"""

MODEL = "Qwen/Qwen2.5-7B"
RUN_DIR = "runs/7b_4bit_1x16gb"
REF_SERVER = None
LORA_RANK = 16
BASE_BITS = 4
LEARNING_RATE = 1e-5
SAMPLE_BATCH = 32
