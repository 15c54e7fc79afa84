"""Qwen2.5-3B with LoRA on one GPU of 24 GB: one process, no server.

    python grpo_ref_split.py presets/3b_1x24gb.py

Computed, not run: of the GPU's 25.2 GB the trainer needs 17.1 GB. Full training does not
fit, not even with OFFLOAD_OPTIMIZER. The reference is the model without its adapter. A checkpoint
is an adapter (python -m grpo.commands.merge). vLLM samples faster (docs/performance.md): add
SAMPLER=vllm VLLM_CACHE_GB=1.4 SAMPLE_BATCH=224, which fits beside the trainer as computed.
"""

MODEL = "Qwen/Qwen2.5-3B"
RUN_DIR = "runs/3b_1x24gb"
REF_SERVER = None
LORA_RANK = 16
LEARNING_RATE = 1e-5
SAMPLE_BATCH = 112
