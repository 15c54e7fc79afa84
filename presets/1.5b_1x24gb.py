"""Qwen2.5-1.5B on one GPU of 24 GB, which also holds the reference: one process, no server.

    python grpo_ref_split.py presets/1.5b_1x24gb.py

Computed, not run: of the GPU's 25.2 GB the trainer needs 19.0 GB. The optimizer and its
states do not fit there; they take 27.8 GB of RAM.
"""

MODEL = "Qwen/Qwen2.5-1.5B"
RUN_DIR = "runs/1.5b_1x24gb"
REF_SERVER = None
OFFLOAD_OPTIMIZER = True
