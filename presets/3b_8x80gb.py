"""Qwen2.5-3B on eight GPUs of 80 GB: seven train, one runs the reference server.

    CUDA_VISIBLE_DEVICES=7 python ref_server.py presets/3b_8x80gb.py                        # first
    CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6 deepspeed grpo_ref_split.py presets/3b_8x80gb.py     # then

Computed, not run: of a GPU's 84.9 GB the trainer needs 20.1 GB and the server 9.4 GB.
"""

MODEL = "Qwen/Qwen2.5-3B"
RUN_DIR = "runs/3b_8x80gb"
