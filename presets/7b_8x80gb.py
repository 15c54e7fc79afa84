"""Qwen2.5-7B on eight GPUs of 80 GB: seven train, one runs the reference server.

    CUDA_VISIBLE_DEVICES=7 python ref_server.py presets/7b_8x80gb.py                        # first
    CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6 deepspeed grpo_ref_split.py presets/7b_8x80gb.py     # then

Computed, not run: of a GPU's 84.9 GB the trainer needs 43.3 GB and the server 18.5 GB.
"""

MODEL = "Qwen/Qwen2.5-7B"
RUN_DIR = "runs/7b_8x80gb"
