"""Qwen2.5-3B on one card of 80 GB, which holds the reference, too: one process, no server.

    python grpo_ref_split.py presets/3b_1x80gb.py

Computed, not run: of the GPU's 79.1 GB the trainer needs 62.9 GB at least.
"""

MODEL = "Qwen/Qwen2.5-3B"
RUN_DIR = "runs/3b_1x80gb"
REF_SERVER = None
