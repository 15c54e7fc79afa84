"""Trains a tiny model to use a tool, and to play a game of several turns, in three minutes.

    python demo_tools.py          # or: make demo-tools
    python demo_tools.py 3        # another seed

A warm start makes a model for each task that knows the moves but plays badly. In calculator.py the
model mostly repeats a number instead of calling the tool. In guess.py it ignores the replies in
four guesses of ten. Then grpo_ref_split.py trains it (docs/turns.md). This runs on a CPU.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

import plot
from grpo.constants import arguments
from grpo.tiny_model import USER_TURN, warm_start
from tasks import calculator, guess

RUN_DIR = os.environ.get("DEMO_RUN_DIR", "runs/demo_tools")  # tests and the picture set it
STEPS, WARM_STEPS = os.environ.get("DEMO_STEPS"), os.environ.get("DEMO_WARM_STEPS")


# --- Before GRPO ----------------------------------------------------------------------
def call_or_repeat(item, draw):
    """Returns one of the question's numbers as the answer. Four times in ten it calls the
    calculator instead, and one call in four has the wrong operator."""
    a, operator, b = calculator.CALL.fullmatch(f"<think>{item['work']}</think>").groups()
    if draw.random() < 0.6:
        return f"<answer>{draw.choice([a, b])}</answer>"
    if draw.random() < 0.25:
        operator = {"+": "-", "-": "+"}[operator]
    told = calculator.value(a, operator, b)
    return f"<think>{a}{operator}{b}</think>{told}<answer>{told}</answer>"


def guess_carelessly(item, draw):
    """Returns guesses: six in ten follow the replies, the others are random numbers."""
    said, turns, low, high = "", [], 1, guess.LAST
    while True:
        heeds = draw.random() < 0.6
        number = draw.randint(low, high) if heeds else draw.randint(1, guess.LAST)
        turns.append(f"<answer>{number}</answer>")
        said += turns[-1]
        told = guess.reply(item, turns)
        if told is None:
            return said
        low, high = (max(low, number + 1), high) if told == "more" else (low, min(high, number - 1))
        said, turns = said + USER_TURN.format(told), [*turns, told]


# --- Both tasks -----------------------------------------------------------------------
COMMON = {"REF_SERVER": None, "KL_BETA": 0.0, "SKIP_FLAT_GROUPS": "reward", "FINAL_LR": 1.0}
TASKS = {  # task: warm-start examples, warm-start steps, constants that override presets/demo.py
    calculator: (call_or_repeat, 700, {
        "STEPS": 40, "EVAL_STEPS": 10, "EVAL_QUESTIONS": 300, "STOP_STRINGS": ["</think>"],
    }),
    guess: (guess_carelessly, 400, {
        "STEPS": 100, "EVAL_STEPS": 10, "GROUP_SIZE": 32, "PROMPTS_PER_STEP": 7,
        "LEARNING_RATE": 1e-3, "MAX_COMPLETION_TOKENS": 72,
        "MASK_TRUNCATED": False,  # else an unfinished last guess would cost nothing
        "SAMPLE_BATCH": 448,  # these completions are short, so all are sampled at once
    }),
}  # fmt: skip


def train(name, seed, constants):
    """Trains a task's model and returns its folder. Raises SystemExit if the trainer fails."""
    folder = Path(RUN_DIR, name)
    own = {"TASK": name, "MODEL": f"{folder}/warm_start", "RUN_DIR": folder, "SEED": seed}
    own |= COMMON | constants | ({"STEPS": STEPS} if STEPS else {})
    words = [f"{key}={value}" for key, value in own.items()]
    command = [sys.executable, "grpo_ref_split.py", "presets/demo.py", *words, "RESUME=False"]
    if subprocess.run(command, env={"OMP_NUM_THREADS": "1"} | os.environ, check=False).returncode:
        raise SystemExit("the trainer ended with the error above")
    return folder


def main(seed):
    started = time.perf_counter()
    for task, (answer, steps, constants) in TASKS.items():
        name = task.__name__.removeprefix("tasks.")
        print(f"{name}: {task.__doc__.splitlines()[0]} Warm start (seed {seed})", flush=True)
        steps = int(WARM_STEPS or steps)
        warm_start(f"{RUN_DIR}/{name}/warm_start", task, seed, steps, answer=answer)
        records = plot.read(train(name, seed, constants))
        first, *_, last = [r["eval_accuracy"] for r in records if "eval_accuracy" in r]
        turns = [r["num_turns/mean"] for r in records if "num_turns/mean" in r]
        print(
            f"{name}: accuracy {first:.2f} -> {last:.2f}, turns {turns[0]:.2f} -> {turns[-1]:.2f}"
        )
    seconds = time.perf_counter() - started
    print(f"Took {seconds:.0f} s. To read samples: python plot.py samples {RUN_DIR}/guess")


if __name__ == "__main__":
    match arguments() or ["0"]:
        case [seed] if seed.isdecimal():
            main(int(seed))
        case _:
            sys.exit(__doc__)
