"""Qwen2.5-3B by LoRA on two cards of 24 GB; both train, and one holds the reference server, too.

    CUDA_VISIBLE_DEVICES=0 python ref_server.py presets/3b_2x24gb.py            # first
    CUDA_VISIBLE_DEVICES=0,1 deepspeed grpo_ref_split.py presets/3b_2x24gb.py   # then

Computed, not run: of a GPU's 23.5 GB the trainer needs 8.1 GB at least and the server 8.1 GB. Full
training does not fit beside the server, with OFFLOAD_OPTIMIZER neither. A checkpoint is an adapter.
"""

MODEL = "Qwen/Qwen2.5-3B"
RUN_DIR = "runs/3b_2x24gb"
LORA_RANK = 16
LEARNING_RATE = 1e-5
