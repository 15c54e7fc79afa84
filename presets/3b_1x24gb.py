"""Qwen2.5-3B by LoRA on one card of 24 GB, which holds the reference server, too.

    python ref_server.py presets/3b_1x24gb.py           # first, in a terminal of its own
    python grpo_ref_split.py presets/3b_1x24gb.py       # then, in another

Computed, not run: of the card's 23.5 GB the trainer needs 12.7 GB and the server 8.1 GB. Full
training does not fit, with OFFLOAD_OPTIMIZER neither. A checkpoint is an adapter.
"""

MODEL = "Qwen/Qwen2.5-3B"
RUN_DIR = "runs/3b_1x24gb"
LORA_RANK = 16
LEARNING_RATE = 1e-5
