"""What a step of the trainer holds on a GPU, by part: which card for which model.

    python benchmarks/memory.py > benchmarks/results/memory.md    # every model, as Markdown
    python benchmarks/memory.py Qwen2.5-3B 512 512                # one by part: prompt, completion

Computed figures are sums of tensors in the order in which a step makes and frees them. They assume
GRADIENT_CHECKPOINTING, FUSED_LOSS and layers like Qwen2's; the other constants are the trainer's.
A phase's parts live together, phases take turns: the need is that of the largest, and an allowance
for what no tensor shows (CUDA, NCCL, fragmentation), which is a guess. On a machine with a GPU the
cells for one GPU are measured: the engine runs, in a process for each, with random weights.
tests/test_memory.py holds the computed figures against the trainer's own code on a CPU, where it
counts the bytes of living tensors; the last tables are that. GB are 2^30 bytes.

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
from unittest import mock

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch
from transformers import AutoModelForCausalLM, Qwen2Config

import grpo_loss_triton
import grpo_ref_split as trainer
import ref_server
from grpo.packing import pack_by_tokens
from grpo.sampling.decoders.shared_prompt import ROOM
from grpo.sampling.policy import ALL, Policy
from grpo.sampling.sampler import sample_groups
from grpo.training.engine import make_engine
from grpo.training.exchange import ReferenceLogps
from grpo.training.metrics import Clock

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
CONTEXT = 1.5 * 2**30  # allowance: CUDA context, kernels, cuBLAS workspaces, NCCL's buffers
SLACK = 0.1  # allowance: fragmentation, of all that comes and goes
BUCKET = 50_000_000  # engine_config's reduce_bucket_size, in parameters
BF16, FP32, FP64 = 2, 4, 8
WEIGHTS, ADAM = "weights, bf16", "master weights and Adam, fp32"
STATES = WEIGHTS, ADAM, "gradients of a step, fp32"
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


class Sizes:
    """A model's widths, and how many of its parameters are where."""

    def __init__(self, config, rank):
        self.hidden, self.inner = config.hidden_size, config.intermediate_size
        self.layers, self.heads = config.num_hidden_layers, config.num_attention_heads
        self.head = self.hidden // self.heads
        self.kv = config.num_key_value_heads * self.head  # K
        self.vocab, self.rank = config.vocab_size, rank
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        body = model.base_model.layers
        linear = [m.weight.shape for m in body.modules() if isinstance(m, torch.nn.Linear)]
        self.adapted = sum(shape.numel() for shape in linear)  # of all matrices with adapters
        self.tied = config.tie_word_embeddings
        self.total = sum(p.numel() for p in model.parameters())  # a tied head counts once
        self.trained = sum(rank * sum(shape) for shape in linear) if rank else self.total
        self.held = self.total + (self.trained if rank else 0)  # in bf16, on every GPU
        self.body = self.trained if rank else sum(p.numel() for p in body.parameters())
        self.embedding = 0 if rank else self.vocab * self.hidden  # trained, of one matrix
        largest = [rank * max(shape) if rank else shape.numel() for shape in linear]
        # DeepSpeed passes its bucket by for these, and keeps their gradients to the backward's end
        self.big = sum(n for n in largest if n > BUCKET)
        self.matrix, self.largest = max(largest), max(*largest, self.embedding)


def micro_batch(prompt, completion):
    """-> (prompts, rows, width of a row) of the largest micro-batch that the trainer may cut."""
    share, group = trainer.SHARE_PROMPTS, trainer.GROUP_SIZE
    rows = range(max(group, trainer.MICRO_BATCH_TOKENS // completion + group))
    sizes = [(row // group if share else row, prompt, completion) for row in rows]
    first = pack_by_tokens(sizes, [[row] for row in rows], trainer.MICRO_BATCH_TOKENS)[0]
    prompts = len({sizes[row][0] for row in first}) if share else 0
    return prompts, len(first), completion - 1 if share else prompt + completion - 1


# --- A layer, in bytes --------------------------------------------------------------
def attention_bytes(m, rows, width, keys, masked):
    """Queries, keys, values and output of attention; a mask makes SDPA repeat the key heads."""
    mask = BF16 * rows * width * keys if masked else 0
    kept = BF16 * 2 * rows * (width * m.hidden + keys * (m.hidden if masked else m.kv))
    return kept + mask + FP32 * rows * width * m.heads


def layer_forward(m, rows, width, keys, masked):
    """The most that a layer holds beside its input when nothing is kept."""
    tokens, attention = rows * width, attention_bytes(m, rows, width, keys, masked)
    inner = 4 if m.rank else 3  # gate, up, their product; an adapter's sum
    mlp = BF16 * tokens * (2 * m.hidden + inner * m.inner)
    norm = tokens * m.hidden * (2 * FP32 + BF16)
    new_keys = BF16 * 2 * rows * (keys + width) * m.kv
    return max(norm, mlp, attention + new_keys + 2 * BF16 * tokens * m.hidden)


def layer_backward(m, rows, width, keys, masked):
    """The most that recomputing a layer and its backward hold, at its MLP, norm or attention."""
    tokens, attention = rows * width, attention_bytes(m, rows, width, keys, masked)
    norm = tokens * m.hidden * (FP32 + BF16 if m.rank else FP32 + 2 * BF16)  # float32 in RMSNorm
    mlp = 2 * norm + attention + BF16 * tokens * (6 * m.inner + m.hidden)
    at_norm = norm + attention + tokens * m.hidden * (6 * FP32 + 2 * BF16)
    at_attention = norm + 2 * attention + 2 * BF16 * tokens * m.hidden
    return max(mlp, at_norm, at_attention)


def chunk_bytes(m, tokens):
    most = max(128, grpo_loss_triton.CHUNK_BYTES // (BF16 * m.vocab))
    return BF16 * m.vocab * min(tokens, -(-most // 128) * 128)


# --- Phases: {name: {part: bytes}} --------------------------------------------------
def model_states(m, world, offload):
    """What lies on each GPU between two steps, under ZeRO-2.

    estimate_zero2_model_states_mem_needs of DeepSpeed 0.19.8 counts 18 bytes a parameter over the
    GPUs and 2 on each, or with offload 2 in all. Read in its code instead: gradients of a step are
    fp32 on the GPU, with offload too (4, between first backward and step); those in bf16 (its other
    2) are not partitioned but live as long as `training` says.
    """
    parts = {WEIGHTS: BF16 * m.held}
    if offload:
        return parts | {"DeepSpeed's buffer for offload": BF16 * m.largest}
    return parts | {ADAM: 3 * FP32 * m.trained // world}


def training(m, prompt, completion, world, offload):
    """Forward and backward at their four peaks, and the optimiser step.

    With shared prompts each matrix is used twice in a forward, and autograd keeps the gradient of
    the completions' pass until that of the prompts' pass joins it: all of them, at "turn".
    """
    prompts, rows, width = micro_batch(prompt, completion)
    keys, tokens, size = prompt + completion - 1, rows * width, BF16 * m.hidden
    of_prompts, shared = prompts * prompt, prompts > 0
    cache = BF16 * 2 * m.layers * of_prompts * m.kv  # keys and values of the prompts, all layers
    mask = (rows * width * keys + prompts * prompt**2) if shared else 0  # bool
    inputs = m.layers * size * of_prompts  # what checkpointing keeps, of the prompts
    norm = (FP32 + BF16) * m.hidden  # what the last norm keeps, of a token
    rest = inputs + cache + mask + BF16 * 2 * m.head * (tokens + of_prompts) + norm * of_prompts
    trained = rows * completion
    d_hidden, d_weight = size * trained, BF16 * m.embedding
    chunk = chunk_bytes(m, trained)
    of_rows = layer_backward(m, rows, width, keys, shared)
    of_turn = layer_backward(m, prompts, prompt, prompt, True) if shared else of_rows
    matrix, body = BF16 * m.matrix, BF16 * m.body
    kept = min(BF16 * m.big, BF16 * m.trained // world)
    d_head = d_weight if m.tied or m.embedding > BUCKET else 0  # a tied one waits for the embedding

    states = model_states(m, world, offload)
    flat = {STATES[2]: FP32 * m.trained // world}

    def phase(activations, of_loss, others, reduced):
        """`reduced`: the largest matrix whose gradient is added meanwhile, in fp32 or its norm."""
        part = min(reduced, m.trained // world)
        copy = min(BUCKET, m.trained)  # of the bucket, for the all-reduce
        sums = max(FP32 * part + BF16 * (BUCKET + copy), (FP64 if offload else FP32) * part)
        sums = sums if reduced else 0
        parts = {"activations": activations, "loss: dW, dH, a chunk": of_loss}
        return states | flat | parts | {"gradients, bf16": others, "DeepSpeed's sums": sums}

    everything = rest + m.layers * size * tokens + norm * tokens
    phases = {
        "loss": phase(everything + d_hidden, d_hidden + d_weight + chunk, 0, 0),
        "head": phase(everything, d_hidden + d_weight, 0, 0 if m.tied else m.embedding),
        "last layer": phase(everything - norm * tokens + of_rows, d_head, matrix, m.matrix),
        "first layer": phase(
            rest + (cache if shared else 0) + size * tokens + of_rows,
            d_head,
            body if shared else max(matrix, kept),
            m.matrix,
        ),
        "embedding": phase(0, 2 * d_weight + (0 if m.tied else d_head), kept, m.embedding),
    }
    if shared:
        joined = d_weight + (0 if m.tied else d_head)
        phases["turn"] = phase(rest + cache + of_turn, joined, body, m.matrix)
    norms = {"gradient norm, fp64": 0 if offload else FP64 * min(m.largest, m.trained // world)}
    return phases | {"step": states | flat | norms}


def sampling(m, prompts, rows, prompt, completion):
    """-> parts of a batch of SharedDecoder's when it holds the most: in the prefill, or at the end.

    Left to the allowance: what a few prompts that join copy, rows that ended and are still there
    then (up to an eighth of them), and cumsum's own float64 copy.
    """
    token = BF16 * 2 * m.layers * m.kv  # keys and values, all layers
    of_prompts, logits = token * prompts * prompt, BF16 * rows * m.vocab
    layer = layer_forward(m, prompts, prompt, prompt, True) + prompts * prompt**2  # and the mask
    layer += 2 * BF16 * m.hidden * prompts * prompt
    full = of_prompts + token * rows * completion
    # of a layer's keys, then its values: old and new
    growth = BF16 * rows * completion * m.kv if completion > ROOM else 0
    draw = rows * m.vocab * (2 * FP32 + FP64)  # log_softmax, its exp, their sums; a GPU: 3 * FP32
    prefill = {"key-value cache": of_prompts, "one layer": layer}
    # with the first token's logits, which live as long as the batch
    end = {"key-value cache": full, "its growth, logits": 2 * logits + max(growth, draw)}
    return max(prefill, end, key=lambda parts: sum(parts.values()))


def phases_of(m, prompt, completion, world=1, offload=False):
    states = model_states(m, world, offload)
    rows = trainer.SAMPLE_BATCH  # of whole groups; to evaluate, each of another prompt
    made = {
        "sampling": states | sampling(m, rows // trainer.GROUP_SIZE, rows, prompt, completion),
        "evaluation": states | sampling(m, rows, rows, prompt, completion),
    }
    return made | training(m, prompt, completion, world, offload)


def server_phases(m, prompt, completion):
    """ref_server.py with the same model: one scoring batch, without a gradient."""
    with mock.patch.multiple(
        trainer,
        MICRO_BATCH_TOKENS=ref_server.SCORE_BATCH_TOKENS,
        SHARE_PROMPTS=ref_server.SHARE_PROMPTS,
    ):
        prompts, rows, width = micro_batch(prompt, completion)
    cache = BF16 * 2 * m.layers * prompts * prompt * m.kv
    keys, tokens, size = prompt + completion - 1, rows * width, BF16 * m.hidden
    layer = layer_forward(m, rows, width, keys, prompts > 0) + 2 * size * tokens
    trained = rows * completion
    chunk = chunk_bytes(m, trained)
    weights = {WEIGHTS: BF16 * m.total, "prompts' cache": cache}
    return {
        "server: scoring": weights | {"a layer or a chunk": max(layer, chunk + 3 * size * trained)}
    }


def need(phases):
    """-> (bytes with the allowance, name of the largest phase)."""

    def total(parts):
        moving = sum(n for part, n in parts.items() if part not in (WEIGHTS, ADAM))
        return sum(parts.values()) + SLACK * moving + CONTEXT

    return max((total(parts), name) for name, parts in phases.items())


def card(size):
    """-> the smallest usual card that holds so many bytes. Example: 20 * 2**30 -> "24" """
    return next((str(name) for name, room in CARDS.items() if size <= room * 2**30), "none")


# --- Measured -----------------------------------------------------------------------
@contextmanager
def peak(phases, name, live):
    """Puts the peak of what runs inside into phases[name]: of `live`, or CUDA's."""
    if live:
        live.peak = live.now
    else:
        torch.cuda.reset_peak_memory_stats()
    yield
    phases[name] = live.peak if live else torch.cuda.max_memory_allocated()


def random_policy(config, rank):
    """-> the Policy with random bf16 weights; its completions never end."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
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
        row = trainer.Sequence(
            str(group), 0, ids[group % 2 : prompt], ids[prompt:], logps, None, logps, 1.0, 1e-3
        )
        rows += [replace(row, number=i) for i in range(trainer.GROUP_SIZE)]
    return rows


def measure(policy, prompt, completion, start, live=None):
    """-> {phase: peak bytes} of the trainer's own code; `start` makes the policy's engine.

    On a CPU `live` counts; a GPU counts by itself.
    """
    batch, group, vocab = trainer.SAMPLE_BATCH, trainer.GROUP_SIZE, policy.vocab_size
    some = max(2 * micro_batch(prompt, completion)[1], batch)  # two micro-batches at least
    rows = random_rows(vocab, prompt, completion, -(-some // group))
    settings = {"temperature": 1.0, "eos_ids": policy.eos_ids, "vocab_size": vocab}
    settings |= {"generator": None, "max_new_tokens": completion}
    prompts, phases = [row.prompt for row in rows[:batch]], {}
    reference = ReferenceLogps(None, Clock())
    with live or nullcontext():
        engine = start(policy)
        for _ in range(2):  # Adam's moments are there from the second step on
            with peak(phases, "training", live):
                trainer.accumulate(engine, rows, vocab, reference, old_from_sampler=False)
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
    phases = measure(
        policy, prompt, completion, functools.partial(make_engine, trainer.constants())
    )
    free, room = torch.cuda.mem_get_info()
    outside = room - free - torch.cuda.memory_reserved()  # CUDA, NCCL; others' programs, too
    reserved = torch.cuda.max_memory_reserved()
    print(json.dumps({"need": max(phases.values()) + outside, "reserved": reserved} | phases))


def measured(name, prompt, completion, rank, offload):
    """-> bytes that one GPU of this machine needed, or None: there is none, or it is too small."""
    if not torch.cuda.is_available():
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
            parts = training(m, prompt, completion, world, offload)["loss"]
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
    prompts, rows, _ = micro_batch(prompt, completion)
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
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    print("# Which card for which model\n")
    print(f"`python benchmarks/memory.py`: commit {commit}, torch {torch.__version__}, {gpu}.\n")
    cards, slack = ", ".join(map(str, CARDS)), f"{SLACK:.0%}"
    micro, batch = trainer.MICRO_BATCH_TOKENS, trainer.SAMPLE_BATCH
    print(f"""GB (2^30) per GPU, and in brackets the smallest usual card that holds it, and the one
that holds ref_server.py beside it, of {cards}. They have bfloat16 (Ampere and
newer): else all is twice as much. Cells are **computed, not measured**, unless one says so.
Prompt and completion have 512 tokens; MICRO_BATCH_TOKENS {micro}, SAMPLE_BATCH {batch}, the rest
as shipped. An allowance is in it, a guess: {gb(CONTEXT)} GB for CUDA and NCCL, and {slack} of
what comes and goes.\n""")
    print_cards(512, 512)
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
