"""Qwen2.5-14B with LoRA beside 4-bit weights on one GPU of 24 GB: one process, no server.

    python grpo_ref_split.py presets/14b_4bit_1x24gb.py

Needs pip install -e .[bits]. Computed, not run: of the GPU's 25.2 GB the trainer needs 20.8 GB. The
reference is the model without its adapter. A checkpoint is an adapter (python -m
grpo.commands.merge).
"""

MODEL = "Qwen/Qwen2.5-14B"
RUN_DIR = "runs/14b_4bit_1x24gb"
REF_SERVER = None
LORA_RANK = 16
BASE_BITS = 4
LEARNING_RATE = 1e-5
SAMPLE_BATCH = 32
