"""Qwen2.5-3B on one GPU of 48 GB, which also holds the reference: one process, no server.

    python grpo_ref_split.py presets/3b_1x48gb.py

Computed, not run: of the GPU's 47.7 GB the trainer needs 33.3 GB. The optimizer and its
states do not fit there; they take 55.5 GB of RAM.
"""

MODEL = "Qwen/Qwen2.5-3B"
RUN_DIR = "runs/3b_1x48gb"
REF_SERVER = None
OFFLOAD_OPTIMIZER = True
SAMPLE_BATCH = 224
