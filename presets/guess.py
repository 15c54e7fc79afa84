"""A tiny model learns a game of three turns on a CPU (docs/tasks.md; make demo-tools runs both).

python -m tasks guess presets/guess.py OUT=runs/demo_tools/tiny_guess
python grpo_ref_split.py presets/demo.py presets/guess.py MODEL=runs/demo_tools/tiny_guess
"""

TASK = "guess"
RUN_DIR = "runs/demo_tools/guess"
REF_SERVER = None
KL_BETA = 0.0
GROUP_SIZE = 32
PROMPTS_PER_STEP = 7
SAMPLE_BATCH = 448  # these completions are short, so all are sampled at once
MAX_COMPLETION_TOKENS = 72
LEARNING_RATE = 1e-3
FINAL_LR = 1.0
STEPS = 60
EVAL_STEPS = 10
