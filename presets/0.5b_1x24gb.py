"""Qwen2.5-0.5B on one GPU of 24 GB, which also holds the reference: one process, no server.

    python grpo_ref_split.py presets/0.5b_1x24gb.py

Computed, not run: of the GPU's 25.2 GB the trainer needs 15.7 GB.
"""

MODEL = "Qwen/Qwen2.5-0.5B"
RUN_DIR = "runs/0.5b_1x24gb"
REF_SERVER = None
SAMPLE_BATCH = 224
