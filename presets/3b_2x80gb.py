"""Qwen2.5-3B on two cards of 80 GB: one trains, the other holds the reference server.

    CUDA_VISIBLE_DEVICES=1 python ref_server.py presets/3b_2x80gb.py            # first
    CUDA_VISIBLE_DEVICES=0 python grpo_ref_split.py presets/3b_2x80gb.py        # then

Computed, not run: of a GPU's 79.1 GB the trainer needs 61.2 GB at least and the server 8.1 GB.
"""

MODEL = "Qwen/Qwen2.5-3B"
RUN_DIR = "runs/3b_2x80gb"
