"""Runs everything that needs a GPU, in one command and an hour at most: writes runs/gpu_report.md.

    make gpu-report                                          # or: python benchmarks/gpu_report.py
    python benchmarks/gpu_report.py demo "GPU tests"         # only these parts

Each part is a process with a time limit. The report is written after each, failures first, with all
that a part has printed. Models have the shapes of Qwen2.5 0.5B and 3B, and weights that make them
count (counting.py), so the lengths of completions are known; one part trains the real 0.5B,
if the model hub answers. Computed numbers stand next to the measured ones. Without a GPU the same
parts run on the CPU with a model of 1M parameters, fewer steps and a short demo.
"""

import atexit
import contextlib
import importlib.util
import json
import os
import re
import resource
import runpy
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
HERE = str(Path(__file__).resolve())

import psutil
import torch

from benchmarks import memory
from benchmarks.counting import SHAPE, build, make_tokenizer
from benchmarks.measure import DEVICE, KIND, facts, trained
from demo import free_port
from grpo.decoder import make_decoder
from grpo.devices import accelerator
from grpo.forward import CompletionModel, distance
from grpo.options.sizes import largest_batch

REPORT = ROOT / "runs/gpu_report.md"
MINUTES = 60  # of the whole report
QWEN = ("Qwen2.5-0.5B", "Qwen2.5-3B")
SIZES = QWEN if KIND == "gpu" else ("1M",)
REAL = "Qwen/Qwen2.5-0.5B-Instruct"
# Of "a step of": steps, those at first that are not counted, prompts of a step; and without a GPU
PLAN, SHORT = (8, 3, 8), (3, 1, 2)
# Lines of a log about paths that were chosen, or refused
NOTABLE = (
    r"slower|can't|differ|arning|a trial took|bfloat16|float32|sampled without|resumes|saved|Error"
)

PYTHON = [sys.executable]
GPU_TESTS = ["tests/test_gpu.py", "tests/options/test_cuda_graph.py", "tests/test_loss_triton.py"]


def parts_of_the_report():
    """-> {name: (command, minutes)}, the most important first."""
    step = [*PYTHON, HERE, "--step"]
    parts = {"environment": ([*PYTHON, HERE, "--environment"], 1)}
    parts["GPU tests"] = ([*PYTHON, "-m", "pytest", "-q", "-rs", *GPU_TESTS], 6)
    for size in SIZES:
        parts[f"kernels of {size}"] = ([*PYTHON, HERE, "--kernels", size], 3)
        parts[f"a step of {size}"] = ([*step, size, "1"], 4)
    parts["the real 0.5B"] = ([*PYTHON, HERE, "--learn"], 7)
    parts["two ranks"] = ([*step, SIZES[0], "2"], 3)
    parts["within 24 GB"] = ([*step, SIZES[-1], "1", "WITHIN=24", "LORA_RANK=16"], 4)
    offload = [*step, SIZES[0], "1", "WITHIN=24", "OFFLOAD_OPTIMIZER=True"]
    parts["offload within 24 GB"] = (offload, 3)
    if importlib.util.find_spec("vllm"):
        parts["a step with vLLM"] = ([*step, SIZES[0], "1", "SAMPLER=vllm"], 4)
    parts["resumed"] = ([*step, SIZES[0], "1", "RESUMED=1"], 3)
    parts["demo"] = ([*PYTHON, "demo.py"], 5)
    for size in SIZES:
        parts[f"memory of {size}"] = ([*PYTHON, HERE, "--memory", size], 2)
    losses = SIZES if KIND == "gpu" else []  # on a CPU it takes too long
    for size in losses:
        parts[f"loss of {size}"] = ([*PYTHON, "benchmarks/loss.py", size], 2)
    return parts | {"sampling": ([*PYTHON, "benchmarks/sampling.py"], 6)}


# --- The report -----------------------------------------------------------------------
def run_part(command, seconds):
    """-> (its outcome, what it printed): "took 12 s", "FAILED ..." or "NOT FINISHED ..."."""
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
        return f"NOT FINISHED in {took}", text
    return (f"FAILED ({code}) after {took}" if code else f"took {took}"), text


def stop_all(process):
    """Kills a process and all that it has started, in other sessions, too."""
    found = psutil.Process(process.pid)
    for child in [*found.children(recursive=True), found]:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    process.wait()


def section(name, command, outcome, text):
    """-> a part as Markdown: tables stay tables, all else is quoted; progress bars are left out."""
    shown = " ".join(["python", *command[1:]]).replace(f"{ROOT}/", "")
    body, quoted = [], False
    for line in text.splitlines():
        if "it/s]" in line or "s/it]" in line or not (line or quoted):
            continue
        if quoted == line.startswith("|"):
            body += ["```"] if quoted else ["", "```"]
            quoted = not quoted
        body.append(line)
    body += ["```"] * quoted
    return "\n".join([f"## {name}: {outcome}", "", f"`{shown}`", "", *body, ""])


def report(parts, path, minutes):
    """Runs the parts one after the other, and writes the report anew after each."""
    path.parent.mkdir(parents=True, exist_ok=True)
    ends, sections = time.monotonic() + 60 * minutes, []
    head = f"# GPU report\n\n{facts('torch', 'deepspeed', 'transformers', 'triton', 'vllm')}\n"
    for name, (command, limit) in parts.items():
        left = ends - time.monotonic()
        if left < 10:
            outcome, text = f"NOT RUN: the {minutes} minutes are over", ""
        else:
            print(f"{name} (up to {min(60 * limit, left):.0f} s) ...", flush=True)
            outcome, text = run_part(command, min(60 * limit, left))
        print(f"{name}: {outcome}", flush=True)
        sections.append((outcome.startswith("took"), section(name, command, outcome, text)))
        failed_first = [text for _, text in sorted(sections, key=lambda pair: pair[0])]
        path.write_text("\n".join([head, *failed_first]))
    print(f"written: {path}. Please send it to the project, whatever it says.")


def environment():
    """Prints what the numbers depend on: driver, clocks, power limit, versions, RAM, disk."""
    fields = "name,driver_version,memory.total,power.limit,clocks.max.sm,ecc.mode.current"
    commands = [["nvidia-smi", f"--query-gpu={fields}", "--format=csv"]]
    commands += [["nvidia-smi", "topo", "-m"]]
    commands += [[*PYTHON, "-m", "torch.utils.collect_env"], [*PYTHON, "-m", "pip", "freeze"]]
    for command in commands:
        if shutil.which(command[0]):
            subprocess.run(command, stderr=subprocess.STDOUT, check=False)
    ram, disk = psutil.virtual_memory(), shutil.disk_usage(ROOT).free
    print(
        f"RAM {ram.total / 1e9:.0f} GB, {ram.available / 1e9:.0f} free; disk {disk / 1e9:.0f} free"
    )
    print(f"memory that may be locked: {resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]} bytes")


# --- Kernels ----------------------------------------------------------------------------
@torch.no_grad()
def kernels(size):
    """Prints milliseconds of a column, and the longest kernels of a column and of a micro-batch."""
    dtype = torch.bfloat16 if KIND == "gpu" else torch.float32
    model, rows, large = build(shape_of(size)).to(DEVICE, dtype), [], size in memory.MODELS
    for number in (8, 64, 256) if large else (8, 64):
        for room in (64, 512, 2048) if large else (64,):
            decoder = make_decoder(model, room, 256)
            logits = decoder.admit([[5] * 200] * (number // 8), [8] * (number // 8))
            tokens = logits[:, :400].argmax(-1)
            times = [seconds_of(decoder.next_logits, tokens) for _ in range(24)][8:]
            rows.append([number, room, f"{1000 * statistics.median(times):.2f}"])
    print(f"{size}: {type(decoder).__name__}, {dtype}; the prompts have 200 tokens.")
    memory.table(["rows", "room for tokens", "ms a column"], rows)
    longest("a column", lambda: decoder.next_logits(tokens))
    with torch.enable_grad():
        packed_and_plain(CompletionModel(model), 4096 if large else 1024)


def packed_and_plain(model, tokens):
    """Prints which attention was chosen, milliseconds of a micro-batch in each way, and how far
    the states are from those of plain sequences; and the kernels of the first way."""
    print(*model.notes, f"packed: {model.packs}, by varlen_attn: {model.varlen}", sep="\n")
    batch = largest_batch(memory.shipped(256, 256), tokens, True, 256)
    for number, sequence in enumerate(batch):  # of many lengths, as in a run
        sequence.completion = sequence.completion[: 32 + 37 * number % 225]
    sequences = [s.prompt for s in batch], [s.completion for s in batch]
    rows, states = [], {}

    def run():
        model.zero_grad(set_to_none=True)
        states[way] = model(*sequences)[0]
        states[way].float().square().mean().backward()

    chosen = model.packs, model.varlen
    ways = {
        "packed, varlen_attn": (True, True),
        "packed, SDPA": (True, False),
        "plain": (False, False),
    }
    for way, (model.packs, model.varlen) in reversed(ways.items()):
        if model.packs <= chosen[0] and model.varlen <= chosen[1]:
            run()
            times = [seconds_of(run) for _ in range(5)]
            gap = distance(states[way], states["plain"])
            rows.append([way, f"{1000 * statistics.median(times):.1f}", f"{gap:.1g}"])
    number = sum(map(len, sequences[1]))
    print(f"A micro-batch: {len(batch)} completions, {number} tokens, prompts of 256.")
    memory.table(["forward and backward", "ms", "distance of states"], rows)
    model.packs, model.varlen = chosen
    longest("a micro-batch", run)


def seconds_of(function, *arguments):
    began = time.perf_counter()
    function(*arguments)
    if KIND == "gpu":
        torch.accelerator.synchronize()
    return time.perf_counter() - began


def longest(what, run):
    """Prints the fifteen kernels, on a CPU operators, that take most of the time of run()."""
    kinds = torch.profiler.ProfilerActivity
    activities = [kinds.CPU] + [kinds.CUDA] * (KIND == "gpu")
    with torch.profiler.profile(activities=activities) as profile:
        seconds_of(run)
    time_of = "self_device_time_total" if KIND == "gpu" else "self_cpu_time_total"
    found = sorted(profile.key_averages(), key=lambda e: getattr(e, time_of), reverse=True)
    rows = [[e.key[:80], e.count, f"{getattr(e, time_of):.0f}"] for e in found[:15]]
    memory.table([f"{what}: kernel", "calls", "microseconds"], rows)


# --- A step ---------------------------------------------------------------------------
def shape_of(size):
    return SHAPE if size == "1M" else memory.untied(size)


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


def commands(model, folder, lora_rank, steps, prompts, **others):
    """-> the commands of server and trainer, which begin with a script. Of `others` WITHIN is the
    GB of a smaller GPU that this one stands for; the rest are constants."""
    port, within = free_port(), others.pop("WITHIN", "0")
    trainer = {
        "MODEL": model,
        "RUN_DIR": f"{folder}/run",
        "TASK": "benchmarks/counting.py",
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
    words = [f"{name}={value}" for name, value in (trainer | others).items()]
    server = ["ref_server.py", f"MODEL={model}", f"PORT={port}"]
    return server, [HERE, "--within", within, "grpo_ref_split.py", *words]


def within(gb, script, *arguments):
    """Runs a script as if the GPU had so many GB, if that is not 0."""
    if (limit := int(gb) * 2**30) and accelerator():
        total = torch.accelerator.get_memory_info()[1]
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total))
        reserved = torch.accelerator.memory_reserved
        torch.accelerator.get_memory_info = lambda *_: (limit - reserved(), limit)
    if accelerator():
        gpu = torch.accelerator
        atexit.register(
            lambda: print(f"reserved at the end: {gpu.memory_reserved() / 2**30:.1f} GB")
        )
    sys.argv[:] = [script, *arguments]
    runpy.run_path(script, run_name="__main__")


def step(size, ranks, *words):
    """Prints where the time of a step goes, as a table; `size` by name, with so many ranks. `words`
    are constants, WITHIN (see commands), or RESUMED: a second start goes on for as many steps."""
    if KIND == "gpu" and torch.accelerator.device_count() < ranks:
        print(f"this machine has {torch.accelerator.device_count()} GPU: not run")
        return
    others = dict(word.split("=") for word in words)
    lora_rank = int(others.pop("LORA_RANK", 0)) or (0 if others else way_to_train(size, ranks))
    # With 8 prompts as many sequences as SAMPLE_BATCH: one rank's share of many
    steps, skip, prompts = PLAN if size in memory.MODELS else SHORT
    with tempfile.TemporaryDirectory() as folder:
        model = f"{folder}/model"
        dtype = torch.bfloat16 if KIND == "gpu" else torch.float32
        build(shape_of(size)).to(dtype).save_pretrained(model)
        make_tokenizer().save_pretrained(model)
        if others.get("WITHIN"):
            others |= {"REF_SERVER": None}
        starts = 1 + bool(others.pop("RESUMED", 0))
        for start in range(1, starts + 1):
            server, trainer = commands(model, folder, lora_rank, start * steps, prompts, **others)
            servers = {} if "REF_SERVER" in others else {"server": [*PYTHON, *server]}
            text = run_logged(folder, servers, trainer, ranks)
    records = [r for r in map(json.loads, text.splitlines()) if "loss" in r][skip:]
    names = [n for n in records[0] if n.startswith("seconds")]
    names += ["tokens_per_second", "skipped", "sampler_k3", "kl", "gpu_memory_gb"]
    medians = [statistics.median(r.get(name, 0) for r in records) for name in names]
    print(f"Medians of {len(records)} steps of {8 * prompts} completions; {size},", end=" ")
    print(f"ranks: {ranks},", end=" ")
    print(f"trained: {f'LoRA {lora_rank}' if lora_rank else 'all'}.")
    memory.table(names, [[f"{value:.3g}" for value in medians]])


def run_logged(folder, servers, trainer, ranks=1):
    """-> the text of metrics.jsonl; prints the NOTABLE lines of the logs; all after a failure."""
    try:
        with trained(f"{folder}/", servers, trainer, ranks):
            pattern = NOTABLE
    except SystemExit:
        pattern = ""
        raise
    finally:
        for log in sorted(Path(folder).glob("*.log")):
            lines = [line for line in log.read_text().splitlines() if re.search(pattern, line)]
            print(f"--- {log.name}", *dict.fromkeys(lines), sep="\n")
    return Path(folder, "run/metrics.jsonl").read_text()


def learn():
    """Trains the real model of 0.5B on GSM8K, if the hub answers."""
    from huggingface_hub import model_info

    if KIND == "cpu":
        print("needs a GPU: not run")
        return
    try:
        model_info(REAL, timeout=10)
    except Exception as error:  # noqa: BLE001 (offline, in whatever way)
        print(f"the model hub does not answer ({error!r:.200}): not run")
        return
    with tempfile.TemporaryDirectory() as folder:
        constants = {"MODEL": REAL, "RUN_DIR": f"{folder}/run", "REF_SERVER": None, "STEPS": 30}
        constants |= {"PROMPTS_PER_STEP": 8, "EVAL_STEPS": 30, "EVAL_QUESTIONS": 256}
        words = [f"{name}={value}" for name, value in constants.items()]
        text = run_logged(folder, {}, ["grpo_ref_split.py", *words])
    records = [json.loads(line) for line in text.splitlines()]
    print(*(f"step {r['step']}: {r['eval_accuracy']:.3f}" for r in records if "eval_accuracy" in r))
    steps = [r for r in records if "loss" in r]
    names = ["step", "accuracy", "kl", "sampler_k3", "sampler_tilt", "grad_norm", "skipped"]
    names += ["seconds", "seconds_sample", "seconds_backward", "tokens_per_second", "gpu_memory_gb"]
    memory.table(names, [[f"{r.get(name, 0):.3g}" for name in names] for r in steps[::3]])


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
        case ["--step", size, ranks, *words]:
            step(size, int(ranks), *words)
        case ["--within", gb, script, *arguments]:
            within(gb, script, *arguments)
        case ["--environment"]:
            environment()
        case ["--kernels", size]:
            kernels(size)
        case ["--learn"]:
            learn()
        case ["--memory", size]:
            print_memory(size)
        case names if set(names) <= set(parts := parts_of_the_report()):
            chosen = {name: part for name, part in parts.items() if not names or name in names}
            report(chosen, REPORT, MINUTES)
        case _:
            sys.exit(__doc__)
