"""Qwen2.5-7B on two GPUs of 80 GB: one trains, the other runs the reference server.

    CUDA_VISIBLE_DEVICES=1 python ref_server.py presets/7b_2x80gb.py            # first
    CUDA_VISIBLE_DEVICES=0 python grpo_ref_split.py presets/7b_2x80gb.py        # then

Computed, not run: of a GPU's 84.9 GB the trainer needs 72.5 GB and the server 18.5 GB. The
optimizer and its states do not fit there; they take 137.1 GB of RAM.
"""

MODEL = "Qwen/Qwen2.5-7B"
RUN_DIR = "runs/7b_2x80gb"
OFFLOAD_OPTIMIZER = True
SAMPLE_BATCH = 224
