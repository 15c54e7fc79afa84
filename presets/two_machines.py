"""Qwen2.5-7B on two machines: gpu01 trains on eight GPUs of 80 GB, gpu02 has the reference.

    GRPO_TOKEN=secret python ref_server.py presets/two_machines.py             # first, on gpu02
    GRPO_TOKEN=secret deepspeed grpo_ref_split.py presets/two_machines.py      # then, on gpu01

Computed, not run: of a GPU's 84.9 GB the trainer needs 40.8 GB. The server needs 18.5 GB,
so a GPU of 24 GB is enough. With PUBLISH_STEPS=1 other GPUs of gpu02 can sample
(docs/several_machines.md).
"""

MODEL = "Qwen/Qwen2.5-7B"
RUN_DIR = "runs/two_machines"
PROMPTS_PER_STEP = 32  # four for each of eight GPUs
HOST = "0.0.0.0"  # the server admits other machines and needs GRPO_TOKEN
REF_SERVER = "http://gpu02:59875"
TRAINER = "http://gpu01:59876"  # where workers connect; the port must be open on gpu01
