"""Runs the whole pipeline on a tiny model, on a CPU or a GPU, with the two scripts as they are.

    python demo.py              # or: make demo
    python demo.py 3            # another seed
    python demo.py 3 shuffled   # control: rewards are shuffled within each group, accuracy falls
    python demo.py 3 RUN_DIR=runs/third STEPS=50    # another folder, fewer steps (see DEFAULTS)

A warm start trains a Qwen2 of 126,000 parameters on sloppy examples. The model can add and subtract
and knows the tags, but often picks the wrong operator and rarely writes the tags. Then two
processes, ref_server.py and grpo_ref_split.py, train it. GRPO makes the model do reliably what it
could do but rarely did; it teaches no arithmetic. The constants in presets/demo.py were chosen on
the validation split and on other seeds.
"""

import contextlib
import functools
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from grpo.constants import begin, read_words

if __name__ == "__main__":
    begin()  # before torch is imported

import plot
from grpo.commands.tiny_model import warm_start
from grpo.stop import end_with_parent
from presets import demo as preset
from tasks import arithmetic

DEFAULTS = {"RUN_DIR": preset.RUN_DIR, "STEPS": preset.STEPS, "WARM_STEPS": 800}
ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # of server and trainer, as there may be two cores


# --- Processes ----------------------------------------------------------------------
def free_port():
    """Returns a port that is free, from below those that Linux gives to connections: such a port
    might be taken again in the seconds until a server that starts has it."""
    while True:
        port = random.SystemRandom().randrange(10_000, 32_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return str(port)


def command(script, name, **constants):
    """Returns the command that a user would type: a script, a preset's name, these constants."""
    words = [f"{constant}={value}" for constant, value in constants.items()]
    return [sys.executable, script, f"presets/{name}.py", *words]


def start(command, log=None, threads=ONE_THREAD, **options):
    """Starts a command that ends with this process, however this process ends (Linux). Threads of
    this process must be idle meanwhile, as torch's are."""
    env = os.environ | threads
    end = functools.partial(end_with_parent, signal.SIGKILL)
    return subprocess.Popen(command, stdout=log, stderr=log, env=env, preexec_fn=end, **options)  # noqa: PLW1509


def train_and_serve(name, shared, more, threads=ONE_THREAD):
    """Runs trainer and server with a preset until the trainer has ended, or the server, which ends
    the trainer. Both get the constants in `shared`, the trainer also `more`. Ctrl-C, where Python
    receives it, lets the trainer save."""
    port, log_path = free_port(), Path(more["RUN_DIR"], "ref_server.log")
    with open(log_path, "w") as log:
        serve = command("ref_server.py", name, **shared, PORT=port)
        server = start(serve, log, start_new_session=True)  # it gets no Ctrl-C
    more = more | {"REF_SERVER": f"http://127.0.0.1:{port}"}
    trainer = start(command("grpo_ref_split.py", name, **shared, **more), threads=threads)
    try:
        while trainer.poll() is None and server.poll() is None:
            time.sleep(0.1)
    except KeyboardInterrupt:
        trainer.send_signal(signal.SIGINT)  # if the terminal has not: it saves its step
    if server.poll() is not None:
        trainer.terminate()
        print(f"ref_server.py has ended: {log_path} says why", flush=True)
    trainer.wait()
    server.terminate()
    if status := trainer.returncode:
        why = f"the error above (status {status}); {log_path} has the server's output"
        raise SystemExit(f"the trainer ended with {why}")


# --- Main ---------------------------------------------------------------------------
def main(seed, rewards="plain", **constants):
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # also if a shell's `&` ignores Ctrl-C
    started = time.perf_counter()
    folder, steps, warm_steps = (DEFAULTS | constants).values()
    model, final = f"{folder}/warm_start", Path(folder, "final")
    if Path(folder).exists():
        if not Path(model).exists():
            raise SystemExit(f"RUN_DIR = {folder!r}: no demo has made it, so choose another folder")
        print(f"deleting {folder}, an earlier demo; RUN_DIR=another/folder keeps it", flush=True)
        shutil.rmtree(folder)
    print(f"1. warm start: a tiny Qwen2 learns from sloppy examples (seed {seed})", flush=True)
    warm_start(model, arithmetic, seed, warm_steps)
    print("2. GRPO: ref_server.py and grpo_ref_split.py start, which takes about 15 s", flush=True)
    task = "shuffled" if rewards == "shuffled" else preset.TASK
    more = {"RUN_DIR": folder, "SEED": seed, "STEPS": steps, "TASK": task}
    train_and_serve("demo", {"MODEL": model}, more)
    for step in sorted({1, max(1, steps // 2), steps}):
        print()
        plot.show_samples(folder, str(step))
    plot.plot(folder)
    print(f"\nModel: {final}   curves: {folder}/curves.png   samples: {folder}/samples.jsonl")
    print("For your task: python -m tasks my/task.py OUT=runs/my_model (see README.md)\n")
    records = map(json.loads, Path(folder, "metrics.jsonl").read_text().splitlines())
    first, *_, last = (record for record in records if "eval_accuracy" in record)
    result = {"seed": seed, "rewards": rewards, "steps": last["step"]}
    for name, metric in {"accuracy": "eval_accuracy", "format": "eval_positive_format"}.items():
        result |= {f"{name}_before": first[metric], f"{name}_after": last[metric]}
    print("Greedy answers to the test questions:")
    print(json.dumps(result | {"seconds": round(time.perf_counter() - started, 1)}), flush=True)


if __name__ == "__main__":
    constants, others = read_words(DEFAULTS, presets=False)
    match others or ["0"]:
        case [seed, *control] if seed.isdecimal() and control in ([], ["shuffled"]):
            main(int(seed), *control, **constants)
        case _:
            sys.exit(__doc__)
