"""Qwen2.5-1.5B on four GPUs of 24 GB, each of which also holds the reference: no server.

    deepspeed grpo_ref_split.py presets/1.5b_4x24gb.py

Computed, not run: of a GPU's 25.2 GB the trainer needs 18.1 GB.
"""

MODEL = "Qwen/Qwen2.5-1.5B"
RUN_DIR = "runs/1.5b_4x24gb"
REF_SERVER = None
