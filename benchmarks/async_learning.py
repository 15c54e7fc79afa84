"""Does a trainer whose groups come from workers learn as well as one that samples for itself?

    python benchmarks/async_learning.py out                                  # out.md, out.png
    python benchmarks/async_learning.py out --vllm .vllm/bin/python          # with vLLM too
    python benchmarks/async_learning.py out --seeds 0 1 2                    # fewer
    python benchmarks/async_learning.py out --folders /tmp/async-0-x ...     # of runs made before

The demo's task and constants, 100 steps; for each seed one warm start, from which train

  sync    the trainer samples, as in demo.py
  async   the trainer samples nothing; two workers with transformers do, MAX_STALENESS 4
  vllm    the same with one worker with vLLM

one after the other, each with its reference server. All processes have one thread. Accuracies are
greedy, on the 500 test questions. The model has 2 heads, not the demo's 4: vLLM on a CPU wants 32
dimensions a head. Seconds count from the first evaluation to the last, evaluations included;
workers sample during the first one, so that async and vllm begin with groups that wait.
"""

import json
import os
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
WORKERS = {"sync": 0, "async": 2, "vllm": 1}


# --- The processes --------------------------------------------------------------------
def train(folder, seed, mode, vllm):
    """Runs a trainer with what it needs; -> its metrics."""
    from benchmarks.measure import trained
    from demo import free_port

    port, vllm_worker = free_port(), mode == "vllm"
    words = [ROOT / "presets/demo.py", f"MODEL={folder}/warm_start"]
    own = [f"REF_SERVER=http://127.0.0.1:{port}", f"RUN_DIR={folder}/{mode}", f"SEED={seed}"]
    own += ["EVAL_STEPS=20", f"TRAINER=http://127.0.0.1:{free_port()}"]
    if mode != "sync":
        own += ["PUBLISH_STEPS=1", "TRAINER_SAMPLES=False", "MAX_STALENESS=4", "SAMPLE_BATCH=64"]
    server = [ROOT / "ref_server.py", *words, f"PORT={port}"]
    worker = [ROOT / "grpo_ref_split.py", "worker", *words, *own]
    if vllm_worker:
        worker = [ROOT / "vllm_worker.py", *words, *own, "VLLM_MEMORY_GB=0.3"]
    others = {"server": [sys.executable, *map(str, server)]}
    for number in range(WORKERS[mode]):
        others[f"worker{number}"] = [vllm if vllm_worker else sys.executable, *map(str, worker)]
    trainer = [str(ROOT / "grpo_ref_split.py"), *map(str, words), *own]
    with trained(f"{folder}/{mode}-", others, trainer):
        lines = Path(folder, mode, "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


# --- The report -----------------------------------------------------------------------
def summary(records):
    evaluations = [r for r in records if "eval_accuracy" in r]
    steps = [r for r in records if "loss" in r]
    return {
        "before": evaluations[0]["eval_accuracy"],
        "after": evaluations[-1]["eval_accuracy"],
        "seconds": evaluations[-1]["time"] - evaluations[0]["time"],
        "staleness": statistics.mean(r.get("staleness", 0) for r in steps),
        "stalest": max(r.get("staleness_max", 0) for r in steps),
        "dropped": steps[-1].get("groups_dropped", 0),
        "ratio": max(r["sampler_ratio_max"] for r in steps),
        "curve": [(r["time"] - evaluations[0]["time"], r["eval_accuracy"]) for r in evaluations],
    }


def draw(results, path):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, ax = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for color, (mode, runs) in zip(("C0", "C1", "C2"), results.items(), strict=False):
        for i, run in enumerate(runs):
            label = mode if i == 0 else None
            ax.plot(*zip(*run["curve"], strict=True), color=color, marker=".", label=label)
    ax.set_xlabel("seconds since the first evaluation")
    ax.set_ylabel("greedy accuracy, 500 test questions")
    ax.grid(alpha=0.3)
    ax.legend()
    figure.savefig(path, dpi=110)


def main(out, seeds, vllm):
    from grpo.tiny_model import warm_start
    from tasks import arithmetic

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that all processes end
    os.environ["OMP_NUM_THREADS"] = "1"
    results = []  # (seed, mode, summary)
    for seed in seeds:
        folder = Path(tempfile.mkdtemp(prefix=f"async-{seed}-"))
        warm_start(str(folder / "warm_start"), arithmetic, seed, 800, heads=2)
        for mode in WORKERS:
            if mode != "vllm" or vllm:
                results.append((seed, mode, summary(train(folder, seed, mode, vllm))))
                print(time.strftime("%H:%M:%S"), row(*results[-1]), flush=True)
    report(out, results)


def read(folders):
    """-> results of runs that were made before."""
    results = []
    for folder in folders:
        for mode in WORKERS:
            path = Path(folder, mode, "metrics.jsonl")
            if path.exists():
                records = [json.loads(line) for line in path.read_text().splitlines()]
                results.append((Path(folder).name.split("-")[1], mode, summary(records)))
    return results


def row(seed, mode, r):
    return (
        f"| {seed} | {mode} | {r['before']:.3f} | {r['after']:.3f} | {r['seconds']:.0f} |"
        f" {r['staleness']:.1f}, {r['stalest']} | {r['dropped']} | {r['ratio']:.1f} |"
    )


def report(out, results):
    from benchmarks.measure import facts

    lines = ["| seed | mode | before | after | seconds | staleness, mean and most | dropped groups"]
    lines[0] += " | largest ratio |"
    lines += ["|" + "---|" * 8, *(row(*result) for result in results)]
    by_mode = {mode: [r for _, m, r in results if m == mode] for mode in WORKERS}
    for mode, runs in by_mode.items():
        if after := [r["after"] for r in runs]:
            lines.append(
                f"| **all** | {mode} | | {statistics.mean(after):.3f} ± {spread(after):.3f} |"
                f" {statistics.median(r['seconds'] for r in runs):.0f} | | | |"
            )
    Path(f"{out}.md").write_text("\n".join([facts("torch", "transformers"), "", *lines, ""]))
    draw(by_mode, f"{out}.png")
    print("\n".join(lines))


def spread(values):
    return statistics.stdev(values) if len(values) > 1 else 0.0


if __name__ == "__main__":
    if {"-h", "--help"} & set(sys.argv):
        sys.exit(__doc__)
    match sys.argv[1:]:
        case [out, "--folders", *folders]:
            report(out, read(folders))
        case [out, *rest]:
            python = rest[rest.index("--vllm") + 1] if "--vllm" in rest else None
            seeds = rest[rest.index("--seeds") + 1 :] if "--seeds" in rest else list("01234")
            main(out, [int(seed) for seed in seeds if seed.isdecimal()], python)
        case _:
            sys.exit(__doc__)
