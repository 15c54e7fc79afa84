"""What the server's pool of flat groups gives back: REGROUP on and off, few questions and many.

    python benchmarks/regroup.py             # prints the table
    python benchmarks/regroup.py out.md      # and writes it to a file

The demo's model, task and constants (16 prompts a step, groups of 8, MAX_REFILLS 1), one seed, 60
steps. A flat group can only be joined with another of the same question, sampled at most
MAX_STALENESS = 4 steps later: with 64 questions each comes again after 4 steps, with 6 000 never in
the run. `sampled` counts groups, `flat` those all right or all wrong, `joined` the flat ones that
found another and were trained after all, `rows` the completions trained in the whole run.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import requests

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
HERE = str(Path(__file__).resolve())
STEPS = 60


def serve(folder, port, regroup):
    import demo
    import ref_server

    demo.RUN_DIR, demo.WARM_START = folder, f"{folder}/warm_start"
    ref_server.REGROUP = regroup == "on"
    demo.serve(port)


def train(folder, port, questions):
    import demo
    from tasks import arithmetic

    arithmetic.SIZES["train"] = int(questions)
    demo.RUN_DIR, demo.WARM_START, demo.STEPS = folder, f"{folder}/warm_start", STEPS
    demo.train(port, 0, "plain")


def run(model, questions, regroup):
    """-> the table's row."""
    from demo import free_port, start, stop

    folder, port = tempfile.mkdtemp(prefix="regroup-"), free_port()
    os.symlink(model, f"{folder}/warm_start")
    deepspeed = [str(Path(sys.executable).with_name("deepspeed")), "--num_gpus", "1"]
    deepspeed += ["--no_local_rank", "--master_port", free_port(), "--log_level", "warning"]
    with open(f"{folder}/server.log", "w") as log, open(f"{folder}/trainer.log", "w") as output:
        server = start([sys.executable, HERE, "serve", folder, port, regroup], log)
        try:
            command = [*deepspeed, HERE, "train", folder, port, questions]
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            streams = {"stdout": output, "stderr": subprocess.STDOUT, "env": environment}
            subprocess.run(command, check=True, **streams)
            stats = requests.get(f"http://127.0.0.1:{port}/stats", timeout=10).json()
        finally:
            stop(server)
    records = [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]
    sampled = [r for r in records if "groups_sampled" in r]
    total = sum(r["groups_sampled"] for r in sampled)
    flat = sum(r["groups_sampled"] * r["flat_groups"] for r in sampled)
    # each join ends two flat groups and begins two that are trained
    kept = total - flat + stats["joined"]
    accuracy = [r["eval_accuracy"] for r in records if "eval_accuracy" in r][-1]
    return (
        f"| {questions} | {regroup} | {total} | {flat:.0f} | {stats['joined']} | {8 * kept:.0f} |"
        f" {accuracy:.3f} |"
    )


def main(out):
    import torch

    from benchmarks.measure import facts
    from warm_start import warm_start

    torch.set_num_threads(1)
    model = tempfile.mkdtemp(prefix="regroup-model-")
    warm_start(model, 0, 800)
    lines = ["| questions | REGROUP | sampled | flat | joined | rows | accuracy at the end |"]
    lines.append("|" + "---|" * 7)
    for questions in ("64", "6000"):
        for regroup in ("off", "on"):
            lines.append(run(model, questions, regroup))
            print(time.strftime("%H:%M:%S"), lines[-1], flush=True)
    text = "\n".join([facts("torch", "transformers"), "", *lines, ""])
    if out:
        Path(out).write_text(text)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["serve", *arguments]:
            serve(*arguments)
        case ["train", *arguments]:
            train(*arguments)
        case [*out]:
            main(out[0] if out else None)
