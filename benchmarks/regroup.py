"""What the server's pool of flat groups gives back: REGROUP off and on, large groups and small.

    python benchmarks/regroup.py             # prints the table
    python benchmarks/regroup.py out.md      # and writes it to a file
    python benchmarks/regroup.py out.md 2    # groups of 2 alone

The demo's model, task and constants (128 completions a step, MAX_REFILLS 1), 64 questions, one
seed, 60 steps. A flat group can only be joined with another of the same question, sampled at most
MAX_STALENESS = 4 steps later. Of 8 completions all are wrong and, 4 steps later, all right but very
seldom; of 2 often. `sampled` counts groups, `flat` those all right or all wrong, `joined` the flat
ones that found another and were trained after all, `rows` the completions trained in the run.
"""

import json
import os
import sys
import tempfile
import time
from pathlib import Path

import requests

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
HERE = str(Path(__file__).resolve())
STEPS, QUESTIONS, COMPLETIONS = 60, 64, 128


def serve(folder, port, regroup):
    import demo
    import ref_server

    demo.RUN_DIR, demo.WARM_START = folder, f"{folder}/warm_start"
    ref_server.REGROUP = regroup == "on"
    demo.serve(port)


def train(folder, port, group_size):
    import demo
    import grpo_ref_split as trainer
    from tasks import arithmetic

    arithmetic.SIZES["train"] = QUESTIONS
    main = trainer.main

    def with_groups():
        trainer.GROUP_SIZE = int(group_size)
        trainer.PROMPTS_PER_STEP = COMPLETIONS // int(group_size)
        main()

    trainer.main = with_groups
    demo.RUN_DIR, demo.WARM_START, demo.STEPS = folder, f"{folder}/warm_start", STEPS
    demo.train(port, 0, "plain")


def run(model, group_size, regroup):
    """-> the table's row."""
    from benchmarks.measure import trained
    from demo import free_port

    folder, port = tempfile.mkdtemp(prefix="regroup-"), free_port()
    os.symlink(model, f"{folder}/warm_start")
    server = [sys.executable, HERE, "serve", folder, port, regroup]
    with trained(f"{folder}/", {"server": server}, [HERE, "train", folder, port, group_size]):
        stats = requests.get(f"http://127.0.0.1:{port}/stats", timeout=10).json()
    records = [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]
    sampled = [r for r in records if "groups_sampled" in r]
    total = sum(r["groups_sampled"] for r in sampled)
    flat = sum(r["groups_sampled"] * r["flat_groups"] for r in sampled)
    # each join ends two flat groups and begins two that are trained
    kept = total - flat + stats["joined"]
    accuracy = [r["eval_accuracy"] for r in records if "eval_accuracy" in r][-1]
    return (
        f"| {group_size} | {regroup} | {total} | {flat:.0f} | {stats['joined']} |"
        f" {int(group_size) * kept:.0f} |"
        f" {accuracy:.3f} |"
    )


def main(out, sizes):
    import torch

    from benchmarks.measure import facts
    from grpo.tiny_model import warm_start
    from tasks import arithmetic

    torch.set_num_threads(1)
    model = tempfile.mkdtemp(prefix="regroup-model-")
    warm_start(model, arithmetic, 0, 800)
    lines = ["| group size | REGROUP | sampled | flat | joined | rows | accuracy at the end |"]
    lines.append("|" + "---|" * 7)
    for group_size in sizes:
        for regroup in ("off", "on"):
            lines.append(run(model, group_size, regroup))
            print(time.strftime("%H:%M:%S"), lines[-1], flush=True)
    text = "\n".join([facts("torch", "transformers"), "", *lines, ""])
    if out:
        Path(out).write_text(text)


if __name__ == "__main__":
    if {"-h", "--help"} & set(sys.argv):
        sys.exit(__doc__)
    match sys.argv[1:]:
        case ["serve", *arguments]:
            serve(*arguments)
        case ["train", *arguments]:
            train(*arguments)
        case [*words]:
            files = [word for word in words if not word.isdecimal()]
            main(
                files[0] if files else None,
                [word for word in words if word.isdecimal()] or ["8", "2"],
            )
