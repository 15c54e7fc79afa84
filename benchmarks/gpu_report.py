"""Runs everything that needs a GPU, in one command and half an hour: writes runs/gpu_report.md.

    make gpu-report                                          # or: python benchmarks/gpu_report.py
    python benchmarks/gpu_report.py demo "GPU tests"         # only these parts

Each part is a process with a time limit. If it fails or hangs, its section reports that with the
end of its output, and the report goes on. Nothing is downloaded: models have the shapes of Qwen2.5
0.5B and 3B, and weights that make them count (tests/counting.py), so the lengths of completions are
known. Computed numbers stand next to the measured ones. Without a GPU the same parts run on the CPU
with a model of 1M parameters, fewer steps and a short demo. tests/rehearsal/script.py runs a part
on the simulated GPU.
"""

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
HERE = str(Path(__file__).resolve())

import psutil
import torch
from counting import SHAPE, build, make_tokenizer

from benchmarks import memory
from benchmarks.measure import KIND, facts, trained
from demo import free_port

REPORT = ROOT / "runs/gpu_report.md"
MINUTES = 30  # of the whole report
TAIL = 3000  # characters of what a part that failed has printed
QWEN = ("Qwen2.5-0.5B", "Qwen2.5-3B")
SIZES = QWEN if KIND == "gpu" else ("1M",)
# Of "a step of": steps, those at first that are not counted, prompts of a step; and without a GPU
PLAN, SHORT = (8, 3, 8), (3, 1, 2)

PYTHON = [sys.executable]
GPU_TESTS = ["tests/test_gpu.py", "tests/sampling/test_cuda_graph.py", "tests/test_loss_triton.py"]


def parts_of_the_report():
    """-> {name: (command, minutes)}, the most important first."""
    parts = {"GPU tests": ([*PYTHON, "-m", "pytest", "-q", "-rs", *GPU_TESTS], 6)}
    for size in SIZES:
        parts[f"a step of {size}"] = ([*PYTHON, HERE, "--step", size, "1"], 5)
    parts["two ranks"] = ([*PYTHON, HERE, "--step", SIZES[0], "2"], 3)
    parts["demo"] = ([*PYTHON, "demo.py"], 6)
    for size in SIZES:
        parts[f"memory of {size}"] = ([*PYTHON, HERE, "--memory", size], 3)
    losses = SIZES if KIND == "gpu" else []  # on a CPU it takes too long
    for size in losses:
        parts[f"loss of {size}"] = ([*PYTHON, "benchmarks/loss.py", size], 4)
    return parts | {"sampling": ([*PYTHON, "benchmarks/sampling.py"], 5)}


# --- The report -----------------------------------------------------------------------
def run_part(command, seconds):
    """-> (what came of it, what it printed): "took 12 s", "FAILED ..." or "NOT FINISHED ..."."""
    began = time.monotonic()
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
        try:
            code = process.wait(timeout=max(1, seconds))
        except subprocess.TimeoutExpired:
            code = None
            stop_all(process)
        log.seek(0)
        text = log.read()
    took = f"{time.monotonic() - began:.0f} s"
    if code is None:
        return f"NOT FINISHED in {took}", text[-TAIL:]
    if code:
        return f"FAILED ({code}) after {took}", text[-TAIL:]
    return f"took {took}", text


def stop_all(process):
    """Kills a process and all that it has started, also those in sessions of their own."""
    found = psutil.Process(process.pid)
    for child in [*found.children(recursive=True), found]:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    process.wait()


def section(name, command, outcome, text):
    """-> a part as Markdown; what is a table stays one, other text is quoted."""
    shown = " ".join(["python", *command[1:]]).replace(f"{ROOT}/", "")
    lines = [line for line in text.splitlines() if "warning" not in line.lower()]
    if outcome.startswith("took") and any(line.startswith("|") for line in lines):
        body = "\n".join(line for line in lines if line.startswith("|") or line.endswith("."))
    else:
        body = "\n".join(["```", *(lines if "took" not in outcome else lines[-12:]), "```"])
    return f"## {name}: {outcome}\n\n`{shown}`\n\n{body}\n"


def report(parts, path, minutes):
    """Runs the parts one after the other, and writes the report anew after each."""
    path.parent.mkdir(parents=True, exist_ok=True)
    ends, sections = time.monotonic() + 60 * minutes, []
    head = f"# GPU report\n\n{facts('torch', 'deepspeed', 'transformers', 'triton')}\n"
    for name, (command, limit) in parts.items():
        left = ends - time.monotonic()
        if left < 10:
            outcome, text = f"NOT RUN: the {minutes} minutes are over", ""
        else:
            print(f"{name} (up to {min(60 * limit, left):.0f} s) ...", flush=True)
            outcome, text = run_part(command, min(60 * limit, left))
        print(f"{name}: {outcome}", flush=True)
        sections.append(section(name, command, outcome, text))
        path.write_text("\n".join([head, *sections]))
    print(f"written: {path}. Please send it to the project, whatever it says.")


# --- A step ---------------------------------------------------------------------------
def shape_of(size):
    if size == "1M":
        return SHAPE
    hidden, layers, heads, kv_heads, inner, vocab, *_ = memory.MODELS[size]
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "tie_word_embeddings": False,  # or the model can't count
        "max_position_embeddings": 4096,
    }


def way_to_train(size, ranks):
    """-> the LORA_RANK with which trainer and server fit on one GPU, as memory.py computes.
    SystemExit if none does."""
    if size not in memory.MODELS:  # without a GPU
        return 0
    room = torch.accelerator.get_memory_info()[1]
    server = memory.need(memory.server_phases(memory.sizes_of(size, 0), 256, 256))[0]
    for rank in (0, memory.RANK):
        phases = memory.phases_of(memory.sizes_of(size, rank), 256, 256, ranks)
        if memory.need(phases)[0] + server < room:
            return rank
    raise SystemExit(f"{size} fits on no GPU of {room / 2**30:.0f} GB: not run")


def commands(model, folder, lora_rank, steps, prompts):
    """-> the commands of server and trainer, which begin with the script."""
    port = free_port()
    trainer = {
        "MODEL": model,
        "RUN_DIR": f"{folder}/run",
        "TASK": "tests/counting.py",
        "REF_SERVER": f"http://127.0.0.1:{port}",
        "LORA_RANK": lora_rank,
        "STEPS": steps,
        "PROMPTS_PER_STEP": prompts,
        "MAX_PROMPT_TOKENS": 256,
        "MAX_COMPLETION_TOKENS": 256,
        "EVAL_QUESTIONS": 1,
        "EVAL_STEPS": 10**6,
        "SAVE_STEPS": 10**6,
    }
    words = [f"{name}={value}" for name, value in trainer.items()]
    return ["ref_server.py", f"MODEL={model}", f"PORT={port}"], ["grpo_ref_split.py", *words]


def step(size, ranks):
    """Prints where the time of a step goes, as a table; `size` by name, with so many ranks."""
    if KIND == "gpu" and torch.accelerator.device_count() < ranks:
        print(f"this machine has {torch.accelerator.device_count()} GPU: not run")
        return
    lora_rank = way_to_train(size, ranks)
    # With 8 prompts as many sequences as SAMPLE_BATCH: one rank's share of many
    steps, skip, prompts = PLAN if size in memory.MODELS else SHORT
    with tempfile.TemporaryDirectory() as folder:
        model = f"{folder}/model"
        dtype = torch.bfloat16 if KIND == "gpu" else torch.float32
        build(shape_of(size)).to(dtype).save_pretrained(model)
        make_tokenizer().save_pretrained(model)
        server, trainer = commands(model, folder, lora_rank, steps, prompts)
        try:
            with trained(f"{folder}/", {"server": [*PYTHON, *server]}, trainer, ranks):
                text = Path(folder, "run/metrics.jsonl").read_text()
        except SystemExit:
            for log in Path(folder).glob("*.log"):
                print(f"--- {log.name}\n{log.read_text()[-TAIL // 2 :]}")
            raise
    records = [r for r in map(json.loads, text.splitlines()) if "loss" in r][skip:]
    names = [n for n in records[0] if n.startswith("seconds")] + ["tokens_per_second", "skipped"]
    medians = [statistics.median(r.get(name, 0) for r in records) for name in names]
    print(f"Medians of {len(records)} steps of {8 * prompts} completions; {size},", end=" ")
    print(f"ranks: {ranks},", end=" ")
    print(f"trained: {f'LoRA {lora_rank}' if lora_rank else 'all'}.")
    memory.table(names, [[f"{value:.3g}" for value in medians]])


def print_memory(size):
    if KIND == "cpu":
        print("memory is measured only on a GPU: not run")
        return
    rows = []
    for rank in (0, memory.RANK):
        what = f"LoRA {rank}" if rank else "all"
        try:
            found, computed = memory.tried(size, rank)
            rows.append([what, found, memory.gb(computed)])
        except SystemExit as error:  # it does not fit
            rows.append([what, error, ""])
    memory.table(["trained", "sizes that were tried", "GB, computed"], rows)


if __name__ == "__main__":
    os.chdir(ROOT)
    os.environ.setdefault("DEMO_RUN_DIR", "runs/gpu_report_demo")  # runs/demo may be someone's
    if KIND == "cpu":
        os.environ |= {"DEMO_STEPS": "10", "DEMO_WARM_STEPS": "200"} | os.environ
    match sys.argv[1:]:
        case ["--step", size, ranks]:
            step(size, int(ranks))
        case ["--memory", size]:
            print_memory(size)
        case names if set(names) <= set(parts := parts_of_the_report()):
            chosen = {name: part for name, part in parts.items() if not names or name in names}
            report(chosen, REPORT, MINUTES)
        case _:
            sys.exit(__doc__)
