"""Qwen2.5-1.5B on one card of 24 GB, which holds the reference, too: one process, no server.

    python grpo_ref_split.py presets/1.5b_1x24gb.py

Computed, not run: of the GPU's 23.5 GB the trainer needs 16.9 GB at least; the optimiser and its
states are in RAM, 25.9 GB of it: on the card they would not fit.
"""

MODEL = "Qwen/Qwen2.5-1.5B"
RUN_DIR = "runs/1.5b_1x24gb"
REF_SERVER = None
OFFLOAD_OPTIMIZER = True
