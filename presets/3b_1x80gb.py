"""Qwen2.5-3B on one GPU of 80 GB, which also holds the reference: one process, no server.

    python grpo_ref_split.py presets/3b_1x80gb.py

Computed, not run: of the GPU's 84.9 GB the trainer needs 69.6 GB.
"""

MODEL = "Qwen/Qwen2.5-3B"
RUN_DIR = "runs/3b_1x80gb"
REF_SERVER = None
SAMPLE_BATCH = 224
