"""What a step of the trainer holds on a GPU, by part: which card for which model.

    python benchmarks/memory.py > benchmarks/results/memory.md    # every model, as Markdown
    python benchmarks/memory.py Qwen2.5-3B 512 512                # one by part: prompt, completion

Computed figures are sums of tensors in the order in which a step makes and frees them. They assume
layers like Qwen2's and the trainer's constants; where these are "auto", what a CPU takes.
A phase's parts live together, phases take turns: the need is that of the largest, and an allowance
for what no tensor shows (CUDA, NCCL, fragmentation), which is a guess. On a machine with a GPU the
cells for one GPU are measured: the engine runs, in a process for each, with random weights.
The arithmetic is the trainer's own, grpo/sampling/memory.py and grpo/training/memory.py.
tests/test_memory.py holds it against the trainer's code on a CPU, where it counts the bytes of
living tensors; the last tables are that. GB are 2^30 bytes.

Symbols: the trainer's, and H hidden, I inner, K key width of a layer, L layers.
"""

import functools
import json
import math
import os
import subprocess
import sys
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch
from transformers import AutoModelForCausalLM, Qwen2Config

import grpo_ref_split as trainer
import ref_server
from grpo.devices import accelerator
from grpo.sampling.memory import (
    BF16,
    CONTEXT,
    FP32,
    SLACK,
    USUAL,
    WEIGHTS,
    Sizes,
    need,
    sampling_phases,
)
from grpo.sampling.policy import ALL, Policy
from grpo.sampling.sampler import sample_groups
from grpo.training.engine import make_engine
from grpo.training.memory import STATES, micro_batch, model_states, scoring, training
from grpo.training.ranks import join_ranks

# --- What is computed ---------------------------------------------------------------
MODELS = {  # name: H, L, heads, key-value heads, I, V', tied; published parameters, in 10^9
    "Qwen2.5-0.5B": (896, 24, 14, 2, 4864, 151936, True, 0.494),
    "Qwen2.5-1.5B": (1536, 28, 12, 2, 8960, 151936, True, 1.54),
    "Qwen2.5-3B": (2048, 36, 16, 2, 11008, 151936, True, 3.09),
    "Qwen2.5-7B": (3584, 28, 28, 4, 18944, 152064, False, 7.62),
    "Qwen2.5-14B": (5120, 48, 40, 8, 13824, 152064, False, 14.8),
}
RANK = 16  # of the LoRA rows
GPUS = (1, 2, 8)
CARDS = {16: 14.5, 24: 23.5, 40: 39.4, 48: 44.4, 80: 79.1, 141: 139.0}  # name: GB a program gets
ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
ALONE |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29577"}


def config_of(hidden, layers, heads, kv_heads, inner, vocab, tied, *_):
    return Qwen2Config(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        tie_word_embeddings=tied,
        max_position_embeddings=32768,
        eos_token_id=0,
        pad_token_id=0,
    )


# --- Phases: {name: {part: bytes}} --------------------------------------------------
def shipped(prompt, completion, **others):
    """-> the trainer's constants, as attributes, with prompts and completions of so many tokens."""
    now = {name: value for name, value in vars(trainer).items() if name.isupper()}
    now |= {name: value for name, value in USUAL.items() if now[name] == "auto"}
    now |= {"MAX_PROMPT_TOKENS": prompt, "MAX_COMPLETION_TOKENS": completion}
    return SimpleNamespace(**now | others)


def phases_of(m, prompt, completion, world=1, offload=False, **others):
    c = shipped(prompt, completion, OFFLOAD_OPTIMIZER=offload, **others)
    return sampling_phases(m, c, model_states(m, c, world)) | training(m, c, world)


def server_phases(m, prompt, completion):
    """ref_server.py with the same model: one scoring batch, without a gradient."""
    own = {"MICRO_BATCH_TOKENS": ref_server.SCORE_BATCH_TOKENS, "SHARE_PROMPTS": True}
    c = shipped(prompt, completion, **own)
    return {"server: scoring": {WEIGHTS: BF16 * m.total} | scoring(m, c)}


def card(size):
    """-> the smallest usual card that holds so many bytes. Example: 20 * 2**30 -> "24" """
    return next((str(name) for name, room in CARDS.items() if size <= room * 2**30), "none")


# --- Measured -----------------------------------------------------------------------
@contextmanager
def peak(phases, name, live):
    """Puts the peak of what runs inside into phases[name]: of `live`, or the GPU's."""
    if live:
        live.peak = live.now
    else:
        torch.accelerator.reset_peak_memory_stats()
    yield
    phases[name] = live.peak if live else torch.accelerator.max_memory_allocated()


def random_policy(config, rank):
    """-> the Policy with random bf16 weights; its completions never end."""
    device = accelerator() or "cpu"
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    if rank:
        from peft import LoraConfig

        model.add_adapter(LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=ALL))
    return Policy("random", model.to(device), None, {-1}, config.vocab_size, "bfloat16")


def random_rows(vocab, prompt, completion, groups):
    """-> rows of groups whose prompts differ by a token in length, so that there are masks."""
    rows = []
    for group in range(groups):
        ids = torch.randint(vocab, (prompt + completion,)).tolist()
        logps = torch.full((completion,), -math.log(vocab))  # about those of a random model
        row = trainer.Sequence(ids[group % 2 : prompt], ids[prompt:], logps, None, logps, 1.0, 1e-3)
        rows += [replace(row) for _ in range(trainer.GROUP_SIZE)]
    return rows


def measure(policy, prompt, completion, start, live=None):
    """-> {phase: peak bytes} of the trainer's own code; `start` makes the policy's engine.

    On a CPU `live` counts; a GPU counts by itself.
    """
    c = shipped(prompt, completion)
    batch, group, vocab, micro = c.SAMPLE_BATCH, c.GROUP_SIZE, policy.vocab_size, micro_batch(c)[1]
    some = max(2 * micro, batch)  # two micro-batches at least
    rows = random_rows(vocab, prompt, completion, -(-some // group))
    settings = {"temperature": 1.0, "eos_ids": policy.eos_ids, "vocab_size": vocab}
    settings |= {"generator": None, "max_new_tokens": completion}
    prompts, phases = [row.prompt for row in rows[:batch]], {}
    with live or nullcontext():
        engine = start(policy)
        run = SimpleNamespace(engine=engine, policy=policy, progress=SimpleNamespace(step=1))
        for _ in range(2):  # Adam's moments are there from the second step on
            with peak(phases, "training", live):
                trainer.accumulate(run, rows)
            with peak(phases, "step", live):
                engine.step()
        for name, chosen, size in (
            ("sampling", prompts[::group], group),
            ("evaluation", prompts, 1),
        ):
            with peak(phases, name, live):
                sample_groups(policy.model, chosen, group_size=size, **settings)
    return phases


def measure_here(name, prompt, completion, rank, offload):
    """Prints as JSON what one GPU needs; in a process of its own, as DeepSpeed has one engine."""
    os.environ.update(ALONE)
    trainer.LORA_RANK, trainer.OFFLOAD_OPTIMIZER = rank, bool(offload)
    policy = random_policy(config_of(*MODELS[name]), rank)
    join_ranks(60)
    phases = measure(
        policy, prompt, completion, functools.partial(make_engine, shipped(prompt, completion))
    )
    gpu = torch.accelerator
    free, room = gpu.get_memory_info()
    outside = room - free - gpu.memory_reserved()  # CUDA, NCCL; others' programs, too
    reserved = gpu.max_memory_reserved()
    print(json.dumps({"need": max(phases.values()) + outside, "reserved": reserved} | phases))


def measured(name, prompt, completion, rank, offload):
    """-> bytes that one GPU of this machine needed, or None: there is none, or it is too small."""
    if not accelerator():
        return None
    values = [sys.executable, __file__, "--measure", name, prompt, completion, rank, int(offload)]
    done = subprocess.run(list(map(str, values)), check=False, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])["need"] if done.returncode == 0 else None


# --- Tables -------------------------------------------------------------------------
@functools.cache
def sizes_of(name, rank):
    return Sizes(config_of(*MODELS[name]), rank)


def gb(size):
    return f"{size / 2**30:.1f}"


def table(head, rows):
    for line in (head, ["---"] * len(head), *rows):
        print(f"| {' | '.join(map(str, line))} |")
    print()


def cell(name, prompt, completion, rank, world, offload):
    """Returns "GB (card, card)": the second also holds ref_server.py."""
    real = measured(name, prompt, completion, rank, offload) if world == 1 else None
    phases = phases_of(sizes_of(name, rank), prompt, completion, world, offload)
    size = real or need(phases)[0]
    server = need(server_phases(sizes_of(name, 0), prompt, completion))[0]
    cards = f"{card(size)}, {card(size + server)}"
    return f"{gb(size)} ({cards}){', measured' if real else ''}"


def print_cards(prompt, completion):
    ways = [(world, offload) for world in GPUS for offload in (False, True)]
    head = [f"{w} GPU{'s' * (w > 1)}{', offload' * offload}" for w, offload in ways]
    rows = [
        [name, f"LoRA {rank}" if rank else "full"]
        + [cell(name, prompt, completion, rank, *way) for way in ways]
        for name in MODELS
        for rank in (0, RANK)
    ]
    table(["model", "trained", *head], rows)


def print_one_card(prompt, completion):
    """One GPU for all: a server's process beside the trainer's, or REF_SERVER = None."""
    rows = []
    for name in MODELS:
        m, lora = sizes_of(name, 0), sizes_of(name, RANK)
        server = need(server_phases(m, prompt, completion))[0]
        for offload in (False, True):
            sizes = [need(phases_of(m, prompt, completion, 1, offload))[0] + server]
            for away in (False, True):
                ways = {"REF_SERVER": None, "REFERENCE_ON_CPU": away}
                sizes.append(need(phases_of(m, prompt, completion, 1, offload, **ways))[0])
            rows.append([name, "full, offload" if offload else "full", *sizes])
        alone = need(phases_of(lora, prompt, completion, REF_SERVER=None))[0]
        beside = need(phases_of(lora, prompt, completion))[0] + server
        rows.append([name, f"LoRA {RANK}", beside, alone, alone])
    lines = [[*row[:2], *(f"{gb(size)} ({card(size)})" for size in row[2:])] for row in rows]
    table(["model", "trained", "with a server", "REF_SERVER = None", "REFERENCE_ON_CPU"], lines)


def print_states(prompt, completion):
    with redirect_stdout(sys.stderr):  # where its log goes, for good
        from deepspeed.runtime.zero.stage_1_and_2 import (
            estimate_zero2_model_states_mem_needs as told,
        )

    rows, ways = [], [(1, False), (1, True), (8, False), (8, True)]
    for name, (*_, published) in MODELS.items():
        m = sizes_of(name, 0)
        row = [name, f"{m.total / 1e9:.3f} ({published})"]
        for world, offload in ways:
            c = shipped(prompt, completion, OFFLOAD_OPTIMIZER=offload)
            parts = training(m, c, world)["loss"]
            ours = sum(n for part, n in parts.items() if part in STATES)
            row.append(f"{gb(told(m.total, world, 1, offload)[1])} / {gb(ours)}")
        server = need(server_phases(m, prompt, completion))[0]
        rows.append([*row, gb((4 * FP32 + BF16) * m.trained), gb(server)])
    head = ["model", "10^9 parameters (published)", "1 GPU", "1, offload", "8 GPUs", "8, offload"]
    table([*head, "RAM, offload", "server"], rows)


def merged_bytes(m):
    """Returns what MergedAdapters holds while a LoRA policy samples, where twice that is free: not
    in the phases above, for where it is not free nothing is merged."""
    return BF16 * m.adapted


def print_merged():
    rows = [[name, gb(merged_bytes(sizes_of(name, RANK)))] for name in MODELS]
    table(["model", "copies, GB"], rows)


def print_parts(name, prompt, completion):
    prompts, rows, _ = micro_batch(shipped(prompt, completion))
    print(f"A micro-batch: {rows} rows of {completion} tokens, {prompts} prompts of {prompt}.\n")
    for rank in (0, RANK):
        m = sizes_of(name, rank)
        phases = phases_of(m, prompt, completion)
        if not rank:
            phases |= server_phases(m, prompt, completion)
        print(f"**{name}, {f'LoRA {rank}' if rank else 'full'}, 1 GPU**, GB, computed:\n")
        names = dict.fromkeys(part for parts in phases.values() for part in parts)
        lines = [[n, *(gb(x[n]) if x.get(n) else "" for x in phases.values())] for n in names]
        lines.append(["with allowance", *(gb(need({n: x})[0]) for n, x in phases.items())])
        table(["part", *phases], lines)


def print_checks():
    sys.path.insert(0, str(ROOT / "tests"))
    from test_memory import CASES, DEEPSPEED_CASES, compare, compare_deepspeed

    rows = []
    for shape, *rest in CASES:
        pairs = compare(shape, *rest).values()
        hidden, layers, _, _, inner, vocab, tied = shape
        what = f"H {hidden}, L {layers}, I {inner}, V' {vocab}{', tied' * tied}"
        rows.append([what, *rest[:-1], rest[-1] or "full", *(f"{a / b:.2f}" for a, b in pairs)])
    head = ["model", "P", "T", "G", "prompts shared", "LoRA"]
    table([*head, "sampling", "evaluation", "training"], rows)
    print("""With DeepSpeed itself, one rank on this CPU, states included (with offload those in RAM
too, as here both are one): H 512, L 4, I 2048, V' 16384.\n""")
    rows = []
    for share, rank, offload in DEEPSPEED_CASES:
        pairs = compare_deepspeed(share, rank, offload).values()
        rows.append([share, rank or "full", offload, *(f"{a / b:.2f}" for a, b in pairs)])
    table(["prompts shared", "LoRA", "offload", "sampling", "evaluation", "training"], rows)


def print_all():
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    commit = subprocess.run(git, check=False, stdout=subprocess.PIPE, text=True).stdout.strip()
    kind = accelerator()
    gpu = torch.get_device_module(kind).get_device_name() if kind else "no GPU"
    print("# Which card for which model\n")
    print(f"`python benchmarks/memory.py`: commit {commit}, torch {torch.__version__}, {gpu}.\n")
    cards, slack = ", ".join(map(str, CARDS)), f"{SLACK:.0%}"
    micro, batch = USUAL["MICRO_BATCH_TOKENS"], USUAL["SAMPLE_BATCH"]
    print(f"""GB (2^30) per GPU, and in brackets the smallest usual card that holds it, and the one
that holds ref_server.py beside it, of {cards}. They have bfloat16 (Ampere and
newer): in float32 weights and activations take twice as much. Cells are **computed, not
measured**, unless one says so. Prompt and completion have 512 tokens; MICRO_BATCH_TOKENS {micro},
SAMPLE_BATCH {batch}, the rest as shipped, with checkpointing. An allowance is in it, a guess:
{gb(CONTEXT)} GB for CUDA and NCCL, and {slack} of what comes and goes.\n""")
    print_cards(512, 512)
    print("""## One card for all

GB on one GPU that also holds the reference: in ref_server.py, whose process has an allowance of its
own; in the trainer (REF_SERVER = None), as a copy; or as one that waits in the CPU's memory
(REFERENCE_ON_CPU). With LoRA there is no copy: the reference is the model without adapters.\n""")
    print_one_card(512, 512)
    print("""## States, RAM, server

GB per GPU of weights, optimiser states and a step's gradients, full training: DeepSpeed's estimator
/ ours. The estimator counts 2 bytes of bf16 gradients a parameter, over the GPUs; they are in "by
part" instead, as long as they live. With offload it leaves out the step's fp32 gradients, which
DeepSpeed 0.19.8 keeps on the GPU from the first backward to the step. RAM: of all ranks together
(master weights, Adam, gradients, a bf16 copy), read in DeepSpeed's code, not measured. Server:
ref_server.py with the same model, allowance included.\n""")
    print_states(512, 512)
    print("""## Adapters, merged to sample

With LoRA, W + 2 B A of all layers but the LM head lie beside the weights while a rank, a worker or
an evaluation samples, on a GPU that has twice as much free then; elsewhere nothing is merged, so
that no card above need be larger. A CPU always merges.\n""")
    print_merged()
    print("## By part\n")
    print_parts("Qwen2.5-3B", 512, 512)
    print("""## Computed over counted

Trainer and sampler on a CPU, bf16, under a counter of living tensors (tests/test_memory.py): the
computed peak over the counted one, both beside the weights. Products are not computed, attention is
the CPU's, gradients are freed as they finish; MICRO_BATCH_TOKENS 1024, SAMPLE_BATCH 8.\n""")
    print_checks()


def main():
    if sys.argv[1:2] == ["--measure"]:
        measure_here(sys.argv[2], *map(int, sys.argv[3:]))
    elif len(sys.argv) == 4 and sys.argv[1] in MODELS:
        print_parts(sys.argv[1], *map(int, sys.argv[2:]))
    elif len(sys.argv) == 1:
        print_all()
    else:
        sys.exit(f"{__doc__}\nModels: {', '.join(MODELS)}")


if __name__ == "__main__":
    main()
