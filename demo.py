"""Runs the whole pipeline on a tiny model, on a CPU or a GPU, with the two scripts as they are.

    python demo.py              # or: make demo
    python demo.py 3            # another seed
    python demo.py 3 shuffled   # control: rewards are shuffled within each group, accuracy falls

A warm start trains a Qwen2 of 126 000 parameters on sloppy examples. The model can add and subtract
and knows the tags, but often picks the wrong operator and rarely writes the tags. Then two
processes, ref_server.py and grpo_ref_split.py, train it. GRPO makes the model do reliably what it
could do but rarely did; it teaches no arithmetic. The constants in presets/demo.py were chosen on
the validation split and on other seeds.
"""

import functools
import itertools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from grpo.constants import arguments, begin

if __name__ == "__main__":
    begin()  # before torch is imported

import plot
from grpo.models import load_tokenizer, prompt_ids
from grpo.options.tiny_model import warm_start
from grpo.policy import load_policy
from grpo.resume import lock_run
from grpo.sample import Prompt
from grpo.stop import end_with_parent
from presets import demo as preset
from tasks import arithmetic

# Tests and the scripts that draw pictures set these environment variables
RUN_DIR = os.environ.get("DEMO_RUN_DIR", "runs/demo")
WARM_START = f"{RUN_DIR}/warm_start"  # the model that the policy and the reference start from
WARM_STEPS = int(os.environ.get("DEMO_WARM_STEPS", "800"))
STEPS = int(os.environ.get("DEMO_STEPS", preset.STEPS))
ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # of server and trainer, as there may be two cores


# --- Before and after ---------------------------------------------------------------
def greedy_answers(folder, task, items, c):
    """Returns the texts that the model in `folder` answers greedily; `c` has the constants."""
    stops = getattr(c, "STOP_STRINGS", ())
    policy = load_policy(folder, load_tokenizer(folder), "float32", stop_strings=stops)
    prompts = [prompt_ids(policy.tokenizer, task.messages(item)) for item in items]
    groups = policy.stream(
        itertools.starmap(Prompt, enumerate(prompts)),
        seed=0,
        group_size=1,
        max_sequences=len(prompts),
        longest_prompt=max(map(len, prompts)),
        max_new_tokens=c.MAX_COMPLETION_TOKENS,
        temperature=0,
    )
    return [policy.text(completion) for _, (completion,) in sorted(groups)]


def true_equations(folder):
    """Returns the share of 200 greedy answers with a true equation: what the model can calculate,
    whatever the question asks for."""
    items = arithmetic.load("validation")[:200]
    texts = greedy_answers(folder, arithmetic, items, preset)
    found = [re.search(r"(\d+)([+-])(\d+)=(\d+)", text) for text in texts]
    value = lambda a, sign, b: int(a) + int(b) if sign == "+" else int(a) - int(b)
    return sum(bool(f) and value(*f.groups()[:3]) == int(f[4]) for f in found) / len(items)


# --- Its folder ---------------------------------------------------------------------
def claim(folder):
    """Deletes an earlier demo's files. Returns a lock that keeps other demos out of the folder.
    SystemExit, and nothing is deleted, if a run uses the folder or no demo has made it."""
    mark, made = Path(folder, ".demo"), Path(folder, "warm_start/config.json")
    known = mark.exists() or made.exists()
    if not known and mark.parent.exists() and any(mark.parent.iterdir()):
        raise SystemExit(
            f"DEMO_RUN_DIR = {folder!r} holds files that no demo has made: move them elsewhere, or"
            " set the environment variable DEMO_RUN_DIR to another folder"
        )
    lock = lock_run(folder, mark.name)
    with lock_run(folder):
        for path in mark.parent.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path.name not in (mark.name, ".lock"):
                path.unlink()
    return lock


# --- Processes ----------------------------------------------------------------------
def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return str(server.getsockname()[1])


def command(script, name, **constants):
    """Returns the command that a user would type: a script, a preset's name, these constants."""
    words = [f"{constant}={value}" for constant, value in constants.items()]
    return [sys.executable, script, f"presets/{name}.py", *words]


def start(command, log=None, threads=ONE_THREAD, **options):
    """Starts a command that ends with this process, however this process ends (Linux). Threads of
    this process must be idle meanwhile, as torch's are."""
    # The scripts set GOMP_SPINCOUNT too, but this file has imported torch before them
    env = {"GOMP_SPINCOUNT": "1000"} | os.environ | threads
    end = functools.partial(end_with_parent, signal.SIGKILL)
    return subprocess.Popen(command, stdout=log, stderr=log, env=env, preexec_fn=end, **options)  # noqa: PLW1509


def train_and_serve(name, shared, more, threads=ONE_THREAD):
    """Runs trainer and server with a preset until the trainer has ended. Both get the constants in
    `shared`, the trainer also `more`. Ctrl-C, where Python receives it, lets the trainer save."""
    port = free_port()
    log_path = Path(more["RUN_DIR"], "ref_server.log")
    with open(log_path, "w") as log:
        serve = command("ref_server.py", name, **shared, PORT=port)
        server = start(serve, log, start_new_session=name != "demo")  # it gets no Ctrl-C then
    more = more | {"REF_SERVER": f"http://127.0.0.1:{port}"}
    trainer = start(command("grpo_ref_split.py", name, **shared, **more), threads=threads)
    try:
        while trainer.poll() is None:
            if server.poll() is not None:
                tail = log_path.read_text()[-2000:]
                raise SystemExit(f"the reference server has ended, so the demo ends too:\n{tail}")
            time.sleep(0.2)
    except KeyboardInterrupt:
        trainer.send_signal(signal.SIGINT)  # if the terminal has not: it saves its step
        trainer.wait()
    server.terminate()
    if trainer.returncode:
        raise SystemExit(f"the trainer ended with the error above (status {trainer.returncode})")


# --- Main ---------------------------------------------------------------------------
def main(seed, rewards="plain"):
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # also if a shell's `&` ignores Ctrl-C
    started = time.perf_counter()
    _lock = claim(RUN_DIR)  # to the end
    print(f"1. warm start: a tiny Qwen2 learns from sloppy examples (seed {seed})", flush=True)
    warm_start(WARM_START, arithmetic, seed, WARM_STEPS)
    print("2. GRPO: ref_server.py and grpo_ref_split.py start, which takes about 15 s", flush=True)
    task = "shuffled" if rewards == "shuffled" else preset.TASK
    more = {"RUN_DIR": RUN_DIR, "SEED": seed, "STEPS": STEPS, "TASK": task}
    train_and_serve("demo", {"MODEL": WARM_START}, more)
    for step in sorted({1, max(1, STEPS // 2), STEPS}):
        print()
        plot.show_samples(RUN_DIR, str(step))
    final = Path(RUN_DIR, "final")
    plot.plot(RUN_DIR)
    before, after = true_equations(WARM_START), true_equations(final)
    print(f"\nGreedy answers with a true equation: {before:.0%} -> {after:.0%}.")
    if rewards == "plain":
        print("GRPO made the model use an operator and a format that it knew but rarely chose. It")
        print("taught no arithmetic. The questions are new; their numbers also occur in training.")
    print(f"Model: {final}   curves: {RUN_DIR}/curves.png   samples: {RUN_DIR}/samples.jsonl")
    print("For your task: python -m tasks my/task.py OUT=runs/my_model (see README.md)\n")
    records = map(json.loads, Path(RUN_DIR, "metrics.jsonl").read_text().splitlines())
    first, *_, last = (record for record in records if "eval_accuracy" in record)
    result = {"seed": seed, "rewards": rewards, "steps": last["step"]}
    for name, metric in {"accuracy": "eval_accuracy", "format": "eval_positive_format"}.items():
        result |= {f"{name}_before": first[metric], f"{name}_after": last[metric]}
    print(json.dumps(result | {"seconds": round(time.perf_counter() - started, 1)}), flush=True)


if __name__ == "__main__":
    match arguments() or ["0"]:
        case [seed, *control] if seed.isdecimal() and control in ([], ["shuffled"]):
            main(int(seed), *control)
        case _:
            sys.exit(__doc__)
