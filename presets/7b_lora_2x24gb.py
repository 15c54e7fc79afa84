"""Qwen2.5-7B by LoRA on two cards of 24 GB: one trains, the other holds the reference server.

    CUDA_VISIBLE_DEVICES=1 python ref_server.py presets/7b_lora_2x24gb.py       # first
    CUDA_VISIBLE_DEVICES=0 python grpo_ref_split.py presets/7b_lora_2x24gb.py   # then

Computed, not run: of a card's 23.5 GB the trainer needs 20.2 GB and the server 16.6 GB. Full
training does not fit, with OFFLOAD_OPTIMIZER neither. A checkpoint is an adapter. With one card
alone: the second command and KL_BETA=0, which needs no server.
"""

MODEL = "Qwen/Qwen2.5-7B"
RUN_DIR = "runs/7b_lora_2x24gb"
LORA_RANK = 16
LEARNING_RATE = 1e-5
