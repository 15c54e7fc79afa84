"""The parts of gpu_report.py, each a function below and a process of its own.

    python benchmarks/gpu_parts.py lora                       # one part
    python benchmarks/gpu_parts.py sums_float32 STEPS=60      # with other constants of the trainer

Models have the shapes of Qwen2.5 and weights that make them count (counting.py), so the lengths of
completions are known. A function that checks something returns whether it is right; if it is not,
the part exits with the status WRONG. GB are 10^9 bytes.
"""

import os
import platform
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from grpo.constants import before_torch

before_torch()  # the scripts' settings, for the parts that run in this process

import psutil
import torch

from benchmarks import measure
from benchmarks.gpu_report import WORK, WRONG
from benchmarks.measure import DEVICE, KIND

SMALL = KIND == "cpu" or "GPU_REPORT_SMALL" in os.environ
FULL_GB = 75  # a GPU with less gets 0.5B in place of 3B, all of which takes 72 GB (computed)
PACKAGES = "torch triton transformers tokenizers peft accelerate deepspeed numpy bottle waitress"
LORA = {"LORA_RANK": 16}
# The parts that train a few steps
STEPS = {"lora": LORA, "offload": {"OFFLOAD_OPTIMIZER": True}, "full": {}}
STEPS |= {"ranks": LORA}  # on two GPUs


# --- What parts share -------------------------------------------------------------------
def large():
    room = torch.accelerator.get_memory_info()[1] if KIND == "gpu" else 0
    return "Qwen2.5-3B" if room > FULL_GB * 1e9 else "Qwen2.5-0.5B"


def folder_of(size):
    """Returns the folder of a counting model, which is saved once for all parts. It is built on the
    GPU: a CPU takes a minute for 3B."""
    from benchmarks import counting, memory

    folder = WORK / "models" / ("1M" if SMALL else size)
    if not folder.exists():
        shutil.rmtree(draft := folder.with_suffix(".draft"), ignore_errors=True)
        with torch.device(DEVICE):
            model = counting.build(counting.SHAPE if SMALL else memory.untied(size))
        model.to(torch.bfloat16 if KIND == "gpu" else torch.float32).save_pretrained(draft)
        counting.make_tokenizer().save_pretrained(draft)
        draft.rename(folder)
    return folder


def model_of(size):
    from grpo.models import load_model

    return load_model(str(folder_of(size)), "auto", 0)[0]


def table(head, rows):
    print("\n".join(f"| {' | '.join(map(str, r))} |" for r in (head, ["---"] * len(head), *rows)))


def shown(run_dir):
    """Prints accuracies of a run by step, and medians of its steps. Returns its records."""
    from plot import read

    records = read(run_dir)
    steps = [r for r in records if "seconds" in r]
    greedy = {r["step"]: r["eval_accuracy"] for r in records if "eval_accuracy" in r}
    print("greedy accuracy after a step:", greedy)
    print("sampled accuracy of steps:", *(f"{r.get('accuracy', -1):.2f}" for r in steps))
    kept = steps[1:] or steps  # the first sets up kernels
    names = [name for name in kept[-1] if name.startswith("seconds")]
    names += ["tokens_per_second", "skipped", "sampler_k3", "sampler_tilt", "kl", "grad_norm"]
    medians = [statistics.median(r.get(name, 0) for r in kept) for name in names]
    print(f"Medians of {len(kept)} steps:\n")
    table(names, [[f"{value:.3g}" for value in medians]])
    return records


# --- The card, and the loss -------------------------------------------------------------
def facts():
    """Prints what the other numbers depend on."""
    fields = "name,driver_version,memory.total,memory.used,power.limit,clocks.max.sm"
    if shutil.which("nvidia-smi"):
        smi = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv"]
        subprocess.run(smi, stderr=subprocess.STDOUT, check=False)
    print(measure.facts(*PACKAGES.split()))
    free = psutil.virtual_memory().available, shutil.disk_usage(ROOT).free
    print(f"{platform.platform()}, torch for CUDA {torch.version.cuda}, {measure.CORES} cores")
    print("free GB of RAM and disk:", *(f"{size / 1e9:.0f}" for size in free))
    print("bytes of RAM that may be locked:", resource.getrlimit(resource.RLIMIT_MEMLOCK)[0])
    print("allocator:", os.environ["PYTORCH_CUDA_ALLOC_CONF"])


def loss():
    """Prints loss.py's tables at V' = 152k."""
    from benchmarks import loss as module

    module.TABLE_SECONDS, module.CASES = 3, {"Qwen2.5-3B": [(4096, 1.0), (16_384, 0.5)]}
    if SMALL:
        module.ROUNDS, module.CASES = (1, 1), {"small": [(64, 1.0)]}
    module.main()


# --- The scripts as processes -----------------------------------------------------------
def warm_model(steps):
    """Returns the folder of the demo's tiny model."""
    from grpo.commands.tiny_model import warm_start
    from tasks import arithmetic

    if not (folder := WORK / "models/warm_start").exists():
        warm_start(str(folder), arithmetic, 0, steps)
    return folder


def demo(WARM_STEPS=200 if SMALL else 800, **words):
    """Trains the demo's tiny model with both scripts as processes."""
    from demo import train_and_serve

    more = {"RUN_DIR": WORK / "demo", "STEPS": 10 if SMALL else 50, "EVAL_QUESTIONS": 100}
    more["SAVE_STEPS"] = 0
    train_and_serve("demo", {"MODEL": warm_model(int(WARM_STEPS))}, more | words)
    shown(WORK / "demo")


def resumed(STEPS=30, WARM_STEPS=200, **words):
    """Trains the demo's model, stops the trainer as by Ctrl-C in the middle, and runs the command
    again. Returns whether each step was made once."""
    from demo import command, free_port, start

    run, last, port = WORK / "resumed", int(STEPS), free_port()
    model, metrics = warm_model(int(WARM_STEPS)), run / "metrics.jsonl"
    words |= {"RUN_DIR": run, "REF_SERVER": f"http://127.0.0.1:{port}", "STEPS": last}
    trainer, codes = command("grpo_ref_split.py", "demo", MODEL=model, EVAL_STEPS=0, **words), []
    with open(run / "server.log", "w") as log:
        server = start(command("ref_server.py", "demo", MODEL=model, PORT=port), log)
    for stops in (True, False):
        process = start(trainer)
        while process.poll() is None:
            made = metrics.read_text().count('"seconds"') if metrics.exists() else 0
            if stops and made >= last // 2:
                process.send_signal(signal.SIGINT)
                stops = False
            time.sleep(0.05)
        codes.append(process.returncode)
    server.terminate()
    steps = [r["step"] for r in shown(run) if "seconds" in r]
    right = codes == [1, 0] and steps == [*range(1, last + 1)]
    print(f"steps: {steps}; the two processes ended with {codes}")
    print(f"VERDICT: it was stopped and resumed, each step once: {right}")
    return right


def train(name, *presets, ranks=1, **words):
    """Trains without a server, with the trainer's log in this part's. Returns the records."""
    from demo import free_port, start

    launcher = [sys.executable]
    if ranks > 1:
        launcher += ["-m", "deepspeed.launcher.runner", "--num_gpus", str(ranks)]
        launcher += ["--no_local_rank", "--master_port", free_port(), "--log_level", "warning"]
    words = {"RUN_DIR": WORK / name, "REF_SERVER": None, "SAVE_STEPS": 0} | words
    given = [f"{constant}={value}" for constant, value in words.items()]
    process = start([*launcher, "grpo_ref_split.py", *presets, *given], threads={})
    if code := process.wait():
        raise SystemExit(f"the trainer ended with the error above (status {code})")
    return shown(WORK / name)


def sums(name, **words):
    """Trains SmolLM2-135M on sums in words, as demo_real.py does: does it learn in this dtype?"""
    from grpo.commands import smollm2
    from presets import smollm2 as preset

    if "MODEL" not in words:
        smollm2.make(ROOT / preset.MODEL)
    few = {"STEPS": 2, "EVAL_QUESTIONS": 16, "PROMPTS_PER_STEP": 4} if SMALL else {}
    train(name, "presets/smollm2.py", DTYPE=name.removeprefix("sums_"), **few | words)


def step(name, **words):
    """Trains a few steps of 64 completions. Prints seconds by part, and the largest peak beside the
    one that is computed."""
    from benchmarks import memory

    size, ranks = words.pop("SIZE", None) or large(), 1 + (name == "ranks")
    if KIND == "gpu" and torch.accelerator.device_count() < ranks:
        return print("this machine has one GPU: not run")
    os.environ["COUNTING_PROMPT_TOKENS"] = "250"
    c = memory.shipped(256, 256, REF_SERVER=None, **STEPS[name])
    constants = {"MODEL": folder_of(size), "TASK": "benchmarks/counting.py", "EVAL_STEPS": 0}
    constants |= {"STEPS": 4, "PROMPTS_PER_STEP": 1 if SMALL else 8, "SKIP_FLAT_GROUPS": False}
    constants |= {"MAX_PROMPT_TOKENS": 256, "MAX_COMPLETION_TOKENS": 256}
    records = train(name, ranks=ranks, **constants | STEPS[name] | words)
    peak = max(r.get("gpu_memory_gb", 0) for r in records)
    shape = [*memory.MODELS[size][:6], False]  # the counting model's head is not tied
    phases = memory.phases_with(memory.Sizes(memory.config_of(*shape), c.LORA_RANK), c, ranks)
    tensors = max(sum(parts.values()) for parts in phases.values())
    print(f"\n{size}{', of which 1M was run' * SMALL}; {STEPS[name]}; ranks: {ranks}\n")
    cells = peak, tensors / 1e9, memory.need(phases)[0] / 1e9
    table(["peak GB", "computed", "with an allowance"], [[f"{cell:.1f}" for cell in cells]])


# --- Sampling ---------------------------------------------------------------------------
def rates(size, tokens):
    """Prints tokens a second of our sampler, of transformers' generate, and of vLLM if it is
    installed."""
    from benchmarks import counting
    from benchmarks import sampling as module

    case = module.counting_case(200, tokens) | {"rounds": 2}
    case |= {"prompts": case["prompts"][:2], "tokens": 16} if SMALL else {}
    found = module.all_rates(model_of(size), counting.make_tokenizer(), case)
    rows = [[name, f"{rate:.0f}"] for name, rate in found.items()]
    sequences = module.GROUP * len(case["prompts"])
    table([f"{size}, {sequences} sequences of at most {case['tokens']} tokens", "tokens/s"], rows)


def sampling():
    rates("Qwen2.5-0.5B", 512)


def sampling_large():
    rates(large(), 64)


ALONE = {f.__name__: f for f in (facts, loss, demo, resumed, sampling, sampling_large)}


def run(name, **words):
    shutil.rmtree(WORK / name, ignore_errors=True)
    (WORK / name).mkdir(parents=True)
    if name in ALONE:
        return ALONE[name](**words)
    return (step if name in STEPS else sums)(name, **words)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    words = dict(word.split("=", 1) for word in sys.argv[2:])
    sys.exit(WRONG if run(sys.argv[1], **words) is False else 0)
