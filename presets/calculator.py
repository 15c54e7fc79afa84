"""A tiny model learns to call a calculator, on a CPU (docs/tasks.md; make demo-tools runs both).

python -m tasks calculator presets/calculator.py OUT=runs/demo_tools/tiny_calculator
python grpo_ref_split.py presets/demo.py presets/calculator.py MODEL=runs/demo_tools/tiny_calculator
"""

TASK = "calculator"
RUN_DIR = "runs/demo_tools/calculator"
REF_SERVER = None
KL_BETA = 0.0
STOP_STRINGS = ["</think>"]
FINAL_LR = 1.0
STEPS = 40
EVAL_STEPS = 10
EVAL_QUESTIONS = 300
