"""Do the demo's other ways of training reach the plain one's accuracy?

    python benchmarks/demo_variants.py out.md               # all of them, seed 0; 10 minutes
    python benchmarks/demo_variants.py out.md lora alone    # some

From one warm start each trains the demo's 100 steps (presets/demo.py), one after the other, with
one thread a process. Accuracies are greedy, on the 500 test questions.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
SEED = 0
ALONE = ["REF_SERVER=None"]
VARIANTS = {  # name: ranks, what differs from presets/demo.py
    "plain": (1, []),
    "alone": (1, ALONE),  # the reference in the trainer
    "lora": (1, [*ALONE, "LORA_RANK=16", "LEARNING_RATE=7e-3"]),
    "ranks": (2, []),
}


def train(folder, name):
    """Runs a variant; returns its metrics."""
    from benchmarks.measure import trained
    from demo import free_port

    ranks, own = VARIANTS[name]
    port, words = free_port(), [str(ROOT / "presets/demo.py"), f"MODEL={folder}/warm_start"]
    server = [str(ROOT / "ref_server.py"), *words, f"PORT={port}"]
    others = {} if own[:1] == ALONE else {"server": [sys.executable, *server]}
    own = [f"REF_SERVER=http://127.0.0.1:{port}", f"RUN_DIR={folder}/{name}", f"SEED={SEED}", *own]
    trainer = [str(ROOT / "grpo_ref_split.py"), *words, *own]
    with trained(f"{folder}/{name}-", others, trainer, ranks):
        lines = Path(folder, name, "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def main(out, names):
    from grpo.tiny_model import warm_start
    from tasks import arithmetic

    folder = tempfile.mkdtemp(prefix="variants-")
    print(f"runs and their output: {folder}", flush=True)
    warm_start(f"{folder}/warm_start", arithmetic, SEED, steps=800)
    commit = subprocess.check_output(["git", "-C", ROOT, "rev-parse", "--short", "HEAD"], text=True)
    rows = [f"`python benchmarks/demo_variants.py`, seed {SEED}, commit {commit.strip()}", ""]
    rows += ["| variant | what differs | accuracy before | after | format after | steps |"]
    rows += ["|---|---|---|---|---|---|"]
    for name in names:
        records = train(folder, name)
        first, *_, last = [record for record in records if "eval_accuracy" in record]
        what = ", ".join(f"`{word}`" for word in VARIANTS[name][1]) or f"ranks: {VARIANTS[name][0]}"
        cells = [f"{e:.3f}" for e in (first["eval_accuracy"], last["eval_accuracy"])]
        cells += [f"{last['eval_positive_format']:.3f}", str(last["step"])]
        rows.append(f"| {name} | {what} | {' | '.join(cells)} |")
        print(rows[-1], flush=True)
        Path(out).write_text("\n".join(rows) + "\n")


if __name__ == "__main__":
    if not sys.argv[1:] or set(sys.argv[2:]) - VARIANTS.keys():
        sys.exit(__doc__)
    main(sys.argv[1], sys.argv[2:] or list(VARIANTS))
