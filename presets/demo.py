"""The demo trains a Qwen2 of 126 000 parameters, which demo.py makes, on a CPU or a GPU.

python demo.py                                     # makes the model, and runs both scripts
python grpo_ref_split.py presets/demo.py REF_SERVER=None RUN_DIR=runs/again     # trains it anew
"""

MODEL = "runs/demo/warm_start"
TASK = "arithmetic"
RUN_DIR = "runs/demo"
STEPS = 100
EVAL_STEPS = 40
PROMPTS_PER_STEP = 24
MAX_PROMPT_TOKENS = 64
MAX_COMPLETION_TOKENS = 24
LEARNING_RATE = 7e-4
WARMUP_STEPS = 5
FINAL_LR = 0.3
SAMPLE_BATCH = 64
MICRO_BATCH_TOKENS = 8192
GRADIENT_CHECKPOINTING = False
DTYPE = "float32"
