"""Qwen2.5-3B on one card of 48 GB, which holds the reference, too: one process, no server.

    python grpo_ref_split.py presets/3b_1x48gb.py

Computed, not run: of the GPU's 44.4 GB the trainer needs 30.1 GB at least; the optimiser and its
states are in RAM, 51.7 GB of it: on the card they would not fit.
"""

MODEL = "Qwen/Qwen2.5-3B"
RUN_DIR = "runs/3b_1x48gb"
REF_SERVER = None
OFFLOAD_OPTIMIZER = True
