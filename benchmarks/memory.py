"""What a step of the trainer holds on a GPU, computed by part: which model fits which GPU.

    python benchmarks/memory.py > benchmarks/results/memory.md    # every table, as Markdown
    python benchmarks/memory.py Qwen2.5-3B 512 512                # a model, prompt, completion

The product rehearses its largest batches (grpo/rehearsal.py). The figures are sums of tensors, in
the order in which a step makes and frees them, for layers like Qwen2's. A phase is {part: bytes}:
its parts live together, phases take turns, and the need is that of the largest, with an allowance
for what no tensor shows (CUDA, NCCL, fragmentation), a guess. tests/test_sizes.py compares the
figures with living tensors of the trainer's code on a CPU, and test_presets.py the numbers of
README.md, docs/memory.md and presets/ with the tables. GB are 10^9 bytes.

Symbols: the trainer's, and H hidden, I inner, K key width of a layer, L layers.
"""

import functools
import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch
from transformers import AutoModelForCausalLM, Qwen2Config

import grpo_ref_split as trainer
import ref_server
from grpo import chunked
from grpo.constants import Constants, read_preset
from grpo.engine import BUCKET
from grpo.rehearsal import completion_lengths, largest_batch

BF16, FP32, FP64 = 2, 4, 8
NF4 = (4 + 8 / 64 + 32 / (64 * 256)) / 8  # bytes: 64 weights have a scale of 8 bits
CONTEXT = 1.6e9  # allowance: CUDA context, kernels, cuBLAS workspaces, NCCL's buffers
SLACK = 0.1  # allowance: fragmentation, of all that is freed again
VLLM_OWN = 2.2e9  # allowance: vLLM's float32 head of 3B, 1.2, and CUDA graphs and buffers
SPARE = 0.145  # 15 %, rounded: what presets leave free, as nobody has measured these figures
WEIGHTS, ADAM = "weights", "master weights and Adam, fp32"
STATES = WEIGHTS, ADAM, "gradients of a step, fp32"
MODELS = {  # name: H, L, heads, key-value heads, I, V', tied; published parameters, in 10^9
    "Qwen2.5-0.5B": (896, 24, 14, 2, 4864, 151936, True, 0.494),
    "Qwen2.5-1.5B": (1536, 28, 12, 2, 8960, 151936, True, 1.54),
    "Qwen2.5-3B": (2048, 36, 16, 2, 11008, 151936, True, 3.09),
    "Qwen2.5-7B": (3584, 28, 28, 4, 18944, 152064, False, 7.62),
    "Qwen2.5-14B": (5120, 48, 40, 8, 13824, 152064, False, 14.8),
}
SHAPE = "hidden_size num_hidden_layers num_attention_heads num_key_value_heads intermediate_size"
SHAPE += " vocab_size tie_word_embeddings"
RANK = 16  # of the LoRA columns
WAYS = [(1, False), (1, True), (2, False), (2, True), (7, False)]  # GPUs, OFFLOAD_OPTIMIZER
# name, which counts 2^30 bytes as GB: GB that a program gets
CARDS = {16: 15.6, 24: 25.2, 40: 42.3, 48: 47.7, 80: 84.9, 141: 149.3}
# preset: GB of a trainer's GPU, trainer's GPUs, GB of the server's; None: no server
PRESETS = {
    "1.5b_1x16gb": (16, 1, None),
    "3b_1x24gb": (24, 1, None),
    "7b_lora_1x24gb": (24, 1, None),
    "7b_4bit_1x16gb": (16, 1, None),
    "14b_4bit_1x24gb": (24, 1, None),
    "3b_1x48gb": (48, 1, None),
    "1.5b_4x24gb": (24, 4, None),
    "7b_2x80gb": (80, 1, 80),
    "3b_8x80gb": (80, 7, 80),
    "two_machines": (80, 8, 24),
    "teacher": (48, 1, 24),
}
SMALL = "SAMPLE_BATCH=8 MICRO_BATCH_TOKENS=1024"
TEACHERS = {"teacher": "Qwen2.5-7B"}  # preset: the server's model, where it is not the trainer's


def untied(size):
    """-> the shape of a model with an untied head, for benchmarks/counting.py."""
    shape = dict(zip(SHAPE.split(), MODELS[size], strict=False))
    return shape | {"tie_word_embeddings": False, "max_position_embeddings": 4096}


def config_of(*shape):
    more = {"max_position_embeddings": 32768, "eos_token_id": 0, "pad_token_id": 0}
    return Qwen2Config(**dict(zip(SHAPE.split(), shape, strict=False)), **more)


class Sizes:
    """A model's widths, and how many of its parameters are where; `rank` is LORA_RANK, `bits`
    BASE_BITS."""

    def __init__(self, config, rank, bits=16):
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
        self.held = self.total + (self.trained if rank else 0)  # on every GPU
        self.weights = BF16 * self.held - (BF16 - NF4) * self.adapted * (bits == 4)  # their bytes
        # what a product of 4-bit weights converts
        self.converted = BF16 * max(shape.numel() for shape in linear) * (bits == 4)
        self.body = self.trained if rank else sum(p.numel() for p in body.parameters())
        self.embedding = 0 if rank else self.vocab * self.hidden  # trained, of one matrix
        largest = [rank * max(shape) if rank else shape.numel() for shape in linear]
        # DeepSpeed passes its bucket by for these, and keeps their gradients to the backward's end
        self.big = sum(n for n in largest if n > BUCKET)
        self.matrix, self.largest = max(largest), max(*largest, self.embedding)


# --- A layer, in bytes: of `tokens`, whose attention has so many `keys` and pairs in its mask ---
def attention_bytes(m, tokens, keys, mask):
    """Queries, keys, values and output of attention, key heads repeated for all heads, and the
    log-sum of each head's queries in float32."""
    return BF16 * 2 * (tokens + keys) * m.hidden + BF16 * mask + FP32 * tokens * m.heads


def layer_forward(m, tokens, keys, mask=0):
    """The most that a layer holds beside its input when nothing is kept."""
    attention = attention_bytes(m, tokens, keys, mask)
    inner = BF16 * tokens * m.inner
    several = 4 if m.rank else 3  # gate, up, their product; an adapter's sum
    mlp = 2 * BF16 * tokens * m.hidden + max(several * inner, 2 * inner + m.converted)
    norm = tokens * m.hidden * (2 * FP32 + BF16)
    new_keys = BF16 * 2 * (keys + tokens) * m.kv
    return max(norm, mlp, attention + new_keys + 2 * BF16 * tokens * m.hidden)


def layer_parts(m, tokens, keys):
    """Returns what a layer keeps for its backward, of a norm and of attention."""
    # Of a column: its input, in float32, its output, and what a weight that is trained multiplies
    norm = tokens * (FP32 + (1 if m.rank else 2) * BF16)
    return norm * m.hidden, attention_bytes(m, tokens, keys, 0)


def layer_kept(c, m, tokens, keys):
    """What a layer keeps from forward to backward: its input, or all that its backward needs."""
    if c.GRADIENT_CHECKPOINTING:
        return BF16 * tokens * m.hidden
    norm, attention = layer_parts(m, tokens, keys)
    mlp = BF16 * tokens * 4 * m.inner  # gate, silu(gate), up, their product
    return 2 * norm + attention + mlp


def layer_backward(m, tokens, keys):
    """The most that recomputing a layer and its backward hold, at its MLP, norm or attention."""
    norm, attention = layer_parts(m, tokens, keys)
    # At silu(gate) * up: gate, both factors, and the gradients of the product and of both
    inner = BF16 * tokens * m.inner
    mlp = 2 * norm + attention + BF16 * tokens * m.hidden
    mlp += max(6 * inner, 5 * inner + m.converted)  # or in the product before
    at_norm = norm + attention + tokens * m.hidden * (6 * FP32 + 2 * BF16)
    at_attention = norm + 2 * attention + 2 * BF16 * tokens * m.hidden
    return max(mlp, at_norm, at_attention)


def chunk_bytes(m, tokens):
    """The most that the loss holds of logits and their gradient: a chunk, and three copies of a
    slab in float32 (none with FUSED_LOSS)."""
    rows = min(tokens, chunk_rows(m))
    return (FP32 + BF16) * m.vocab * rows + 3 * FP32 * min(chunked.SLAB, m.vocab * rows)


def chunk_rows(m):
    most = max(128, chunked.CHUNK_BYTES // ((FP32 + BF16) * m.vocab))
    return -(-most // 128) * 128


def head_gradient(m, tokens):
    """What the loss holds of the head's gradient: over many chunks it is summed in float32."""
    few = tokens <= chunked.CHUNKS_IN_OWN_DTYPE * chunk_rows(m)
    return m.embedding * (BF16 if few else BF16 + FP32)


# --- Phases: {name: {part: bytes}} --------------------------------------------------
def micro_batches(c):
    """Returns (tokens, keys that are gathered, tokens that are trained) of the largest micro-batch
    that the trainer cuts, with completions at full length, and with short ones."""
    batches = []
    for completion in completion_lengths(c):
        rows = len(largest_batch(c, c.MAX_PROMPT_TOKENS, True, completion))
        prompts = -(-rows // c.GROUP_SIZE) * c.MAX_PROMPT_TOKENS
        new, keys = rows * (completion - 1), rows * (c.MAX_PROMPT_TOKENS + completion - 1)
        batches.append((prompts + new, keys, rows * completion))
    return batches


def sampling(m, prompts, rows, prompt, completion):
    """Returns the parts of CachedDecoder's batch at its most: in the prefill or at its end."""
    token = BF16 * 2 * m.layers * m.kv  # keys and values, all layers
    logits, pairs = BF16 * rows * m.vocab, prompts * prompt**2
    layer = layer_forward(m, prompts * prompt, prompts * prompt, pairs) + pairs  # and the mask
    layer += 2 * BF16 * m.hidden * prompts * prompt
    keys = rows * (prompt + completion)
    # a layer's new keys beside the old ones; then both repeated for their heads, as there is a mask
    last = BF16 * keys * (m.kv + 2 * m.hidden)
    draw = rows * m.vocab * (2 * FP32 + FP64)  # log_softmax, its exp, their sums
    prefill = {"key-value cache": token * prompts * prompt, "one layer": layer}
    end = {"key-value cache": token * keys, "last token": logits + max(last, logits + draw)}
    return max(prefill, end, key=lambda parts: sum(parts.values()))


def sampling_phases(m, c, states):
    """Returns the phases of a rank that samples, beside its `states`."""
    rows, tokens = c.SAMPLE_BATCH, (c.MAX_PROMPT_TOKENS, c.MAX_COMPLETION_TOKENS)
    return {  # whole groups; to evaluate, each of another prompt
        "sampling": states | sampling(m, rows // c.GROUP_SIZE, rows, *tokens),
        "evaluation": states | sampling(m, rows, rows, *tokens),
    }


def need(phases):
    """Returns (bytes with the allowance, name of the largest phase)."""

    moving = {n: [b for p, b in x.items() if p not in (WEIGHTS, ADAM)] for n, x in phases.items()}
    return max((sum(x.values()) + SLACK * sum(moving[n]) + CONTEXT, n) for n, x in phases.items())


def model_states(m, c, world):
    """Returns the parts on each GPU between two steps, under ZeRO-2, as DeepSpeed 0.19.8's code has
    them: its estimator partitions bf16 gradients, too, and leaves fp32 ones out with offload.
    """
    parts = {WEIGHTS: m.weights + BF16 * copied(m, c)}
    if c.OFFLOAD_OPTIMIZER:
        return parts | {"DeepSpeed's buffer for offload": BF16 * m.largest}
    return parts | {ADAM: 3 * FP32 * m.trained // world}


def copied(m, c):
    """Returns how many parameters the trainer's copy of the reference has; 0: there is none."""
    if c.REF_SERVER or not c.KL_BETA:
        return 0
    if c.REFERENCE:
        return sizes_of(c.REFERENCE.removeprefix("Qwen/"), 0).total
    return 0 if m.rank else m.total


def scoring(m, c):
    """Returns the parts of a forward pass by the reference, on a micro-batch."""
    size, most = BF16 * m.hidden, 0
    for tokens, keys, trained in micro_batches(c):
        layer = layer_forward(m, tokens, keys) + 2 * size * tokens
        most = max(most, layer, chunk_bytes(m, trained) + 3 * size * trained)
    return {"a layer or a chunk": most}


def training(m, c, world):
    """Returns the phases of forward and backward, at their peaks, and of the optimizer step."""
    both = [training_of(m, c, world, *batch) for batch in micro_batches(c)]
    return {n: max((x[n] for x in both), key=lambda x: sum(x.values())) for n in both[0]}


def training_of(m, c, world, tokens, keys, trained):
    offload, size = c.OFFLOAD_OPTIMIZER, BF16 * m.hidden
    of_layer = layer_kept(c, m, tokens, keys)
    norm = (FP32 + BF16) * m.hidden  # what the last norm keeps, of a token
    rest = 2 * BF16 * m.head * tokens + 8 * (keys + 2 * tokens)  # positions, indices
    d_hidden, d_weight = size * trained, BF16 * m.embedding
    chunk, d_sum = chunk_bytes(m, trained), head_gradient(m, trained)
    backward = layer_backward(m, tokens, keys)
    if not c.GRADIENT_CHECKPOINTING:  # most of it is there already
        backward -= of_layer
    kept = min(BF16 * m.big, BF16 * m.trained // world)
    d_head = d_weight if m.tied or m.embedding > BUCKET else 0  # a tied one waits for the embedding

    states = model_states(m, c, world)
    flat = {STATES[2]: FP32 * m.trained // world}

    def phase(activations, of_loss, others, reduced):
        """`reduced`: the largest matrix whose gradient is added meanwhile, in fp32 or its norm."""
        part = min(reduced, m.trained // world)
        copy = min(BUCKET, m.trained)  # of the bucket, for the all-reduce
        sums = max(FP32 * part + BF16 * (BUCKET + copy), (FP64 if offload else FP32) * part)
        sums *= reduced > 0
        parts = {"activations": activations, "loss: dW, dH, a chunk": of_loss}
        return states | flat | parts | {"gradients, bf16": others, "DeepSpeed's sums": sums}

    everything, matrix = rest + m.layers * of_layer + norm * tokens, BF16 * m.matrix
    one = rest + of_layer + backward
    phases = {
        "loss": phase(everything + d_hidden, d_hidden + d_sum + chunk, 0, 0),
        "head": phase(everything, d_hidden + d_weight, 0, 0 if m.tied else m.embedding),
        "last layer": phase(everything - norm * tokens + backward, d_head, matrix, m.matrix),
        "first layer": phase(one, d_head, max(matrix, kept), m.matrix),
        "embedding": phase(0, 2 * d_weight + (0 if m.tied else d_head), kept, m.embedding),
    }
    norms = {"gradient norm, fp64": 0 if offload else FP64 * min(m.largest, m.trained // world)}
    return phases | {"step": states | flat | norms}


def shipped(prompt, completion, **others):
    """Returns the trainer's Constants, with these limits."""
    tokens = {"MAX_PROMPT_TOKENS": prompt, "MAX_COMPLETION_TOKENS": completion}
    return Constants(trainer.DEFAULTS | tokens | others)


def phases_of(m, prompt, completion, world=1, offload=False, **others):
    c = shipped(prompt, completion, OFFLOAD_OPTIMIZER=offload, **others)
    return phases_with(m, c, world)


def phases_with(m, c, world):
    return sampling_phases(m, c, model_states(m, c, world)) | training(m, c, world)


def server_phases(m, prompt, completion):
    """ref_server.py with the same model: one scoring batch, without a gradient."""
    c = shipped(prompt, completion, MICRO_BATCH_TOKENS=ref_server.SCORE_BATCH_TOKENS)
    return {"server: scoring": {WEIGHTS: BF16 * m.total} | scoring(m, c)}


def card(size):
    """Returns the smallest usual GPU that holds so many bytes. Example: 20e9 -> "24" """
    return next((str(name) for name, room in CARDS.items() if size <= room * 1e9), "none")


# --- Tables -------------------------------------------------------------------------
@functools.cache
def sizes_of(name, rank, bits=16):
    return Sizes(config_of(*MODELS[name]), rank, bits)


def gb(size):
    return f"{size / 1e9:.1f}"


def table(head, rows):
    for line in (head, ["---"] * len(head), *rows):
        print(f"| {' | '.join(map(str, line))} |")
    print()


def server_bytes(name):
    return need(server_phases(sizes_of(name, 0), 512, 512))[0]


def in_ram(m):
    """Of all ranks, with OFFLOAD_OPTIMIZER: master weights, Adam, gradients, a bf16 copy."""
    return (4 * FP32 + BF16) * m.trained


def print_gpus():
    rows = []
    for name in MODELS:
        m, lora, server = sizes_of(name, 0), sizes_of(name, RANK), server_bytes(name)
        sizes = [need(phases_of(m, 512, 512, *way))[0] for way in WAYS]
        for adapted in (lora, sizes_of(name, RANK, bits=4)):
            sizes.append(need(phases_of(adapted, 512, 512))[0])
        cells = [f"{gb(size)} ({card(size)}, {card(size + server)})" for size in sizes]
        rows.append([name[8:], *cells, gb(server), gb(in_ram(m))])
    ways = [f"{w} GPU{'s' * (w > 1)}" if not offload else f"{w}, offload" for w, offload in WAYS]
    ways += [f"LoRA {RANK}, 1 GPU", "in 4 bits"]
    table(["Qwen2.5", *ways, "the server", "RAM with offload"], rows)


def print_one_gpu():
    rows = []
    for name in MODELS:
        needs = (phases_of(sizes_of(name, 0), 512, 512, 1, o, REF_SERVER=None) for o in (0, 1))
        sizes = [need(phases)[0] for phases in needs]
        rows.append([name[8:], *(f"{gb(size)} ({card(size)})" for size in sizes)])
    table(["Qwen2.5, `REF_SERVER = None`", "full", "offload"], rows)


def of_preset(name, **others):
    """Returns (constants, Sizes, bytes that the trainer needs, bytes of the server)."""
    c = shipped(512, 512, **read_preset(ROOT / f"presets/{name}.py") | others)
    model = c.MODEL.removeprefix("Qwen/")
    m = sizes_of(model, c.LORA_RANK, c.BASE_BITS)
    server = server_bytes(TEACHERS.get(name, model)) if c.REF_SERVER else 0
    return c, m, need(phases_with(m, c, PRESETS[name][1]))[0], server


def print_presets():
    rows = []
    for name, (gpu, world, of_server) in PRESETS.items():
        c, m, size, server = of_preset(name)
        how = f", LoRA {c.LORA_RANK}" * (c.LORA_RANK > 0) + ", offload" * c.OFFLOAD_OPTIMIZER
        how += ", 4 bits" * (c.BASE_BITS == 4)
        where = f"1 x {of_server}" if of_server else "in the trainer"
        row = [f"`presets/{name}.py`", c.MODEL[5:] + how, f"{world} x {gpu}", where, gb(size)]
        rows.append([*row, gb(server) if server else "", gb(in_ram(m)) if "offload" in how else ""])
    head = ["preset", "trained", "GPUs, GB", "the reference", "trainer", "server", "RAM"]
    table(head, rows)
    c, m, *_ = of_preset("3b_1x24gb")
    taken = need(training(m, c, 1))[0] + BF16 * m.total + VLLM_OWN
    left = gb((1 - SPARE) * CARDS[24] * 1e9 - taken)
    print(f"Beside the trainer of `presets/3b_1x24gb.py` vLLM fits with VLLM_CACHE_GB={left}.\n")
    t4 = [f"`presets/{name}.py` {gb(float32_bytes(name))}" for name in PRESETS if "1x16gb" in name]
    print(f"A T4 has no bfloat16. With {SMALL} they need there: {', '.join(t4)}.\n")


def float32_bytes(name):
    """Returns what a preset's trainer needs with small sizes, and float32 for bfloat16."""
    global BF16
    try:
        BF16 = FP32
        c = of_preset(name, SAMPLE_BATCH=8, MICRO_BATCH_TOKENS=1024)[0]
        m = Sizes(config_of(*MODELS[c.MODEL[5:]]), c.LORA_RANK, c.BASE_BITS)
        return need(phases_with(m, c, 1))[0]
    finally:
        BF16 = 2


def print_parts(name, prompt, completion):
    tokens, keys, trained = micro_batches(shipped(prompt, completion))[0]
    print(f"A micro-batch: {tokens} tokens, {trained} of them trained; {keys} keys and values.\n")
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


def print_all():
    print("# Which GPU for which model: computed, not measured\n")
    print("Printed by `python benchmarks/memory.py`. docs/memory.md explains the tables.\n")
    print_gpus()
    print_one_gpu()
    print_presets()
    print("## By part\n")
    print_parts("Qwen2.5-3B", 512, 512)


def main():
    match sys.argv[1:]:
        case []:
            print_all()
        case [name, *tokens] if name in MODELS and len(tokens) == 2:
            print_parts(name, *map(int, tokens))
        case _:
            sys.exit(f"{__doc__}\nModels: {', '.join(MODELS)}")


if __name__ == "__main__":
    main()
