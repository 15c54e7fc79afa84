"""Qwen2.5-0.5B on one card of 24 GB, which holds the reference server, too.

    python ref_server.py presets/0.5b_1x24gb.py         # first, in a terminal of its own
    python grpo_ref_split.py presets/0.5b_1x24gb.py     # then, in another

Computed, not run: of the card's 23.5 GB the trainer needs 14.5 GB and the server 3.2 GB. The
trainer takes what is free when it starts, so the server must be there.
"""

MODEL = "Qwen/Qwen2.5-0.5B"
RUN_DIR = "runs/0.5b_1x24gb"
