"""What a GPU holds while completions are sampled, in bytes, and how many fit: SAMPLE_BATCH "auto".

Computed figures are sums of tensors in the order in which the code makes and frees them, for layers
like Qwen2's. A phase is {part: bytes}: its parts live together, phases take turns, and
the need is that of the largest, with an allowance for what no tensor shows (CUDA, NCCL,
fragmentation), which is a guess. tests/test_memory.py holds them against living tensors.

Symbols: the trainer's, and H hidden, I inner, K key width of a layer, L layers.
"""

import torch
from transformers import AutoModelForCausalLM

from grpo.constants import set_for_run, with_constants
from grpo.log import say
from grpo.sampling.decoders.llama import MODEL_TYPES
from grpo.sampling.decoders.shared_prompt import ROOM

BF16, FP32, FP64 = 2, 4, 8
CONTEXT = 1.5 * 2**30  # allowance: CUDA context, kernels, cuBLAS workspaces, NCCL's buffers
SLACK = 0.1  # allowance: fragmentation, of all that comes and goes
BUCKET = 50_000_000  # engine_config's reduce_bucket_size, in parameters
WEIGHTS, ADAM = "weights, bf16", "master weights and Adam, fp32"
# "auto" on a CPU, and for models whose layers are not those that are computed here
USUAL = {"SAMPLE_BATCH": 64, "MICRO_BATCH_TOKENS": 8_192, "GRADIENT_CHECKPOINTING": True}
# Powers of two: what is free varies a little from start to start, and a run repeats by its seed
# only with the same sizes. More than the first gains little, and a worker would ask for too much
ROWS = (256, 128, 64, 32, 16, 8, 4, 2)
MARGIN = 0.95  # of the memory that is free: a server on the same GPU may begin to score, for one


class Sizes:
    """A model's widths, bytes of a number (`size`), and how many of its parameters are where."""

    def __init__(self, config, rank, size=BF16):
        self.size = size
        self.hidden, self.inner = config.hidden_size, config.intermediate_size
        self.layers, self.heads = config.num_hidden_layers, config.num_attention_heads
        self.head = getattr(config, "head_dim", None) or self.hidden // self.heads
        self.kv = config.num_key_value_heads * self.head  # K
        self.queries = self.heads * self.head  # their width, H but for some of Qwen3
        self.normed = self.queries + self.kv if config.model_type == "qwen3" else 0
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


# --- A layer, in bytes --------------------------------------------------------------
def attention_bytes(m, rows, width, keys, masked):
    """Queries, keys, values and output of attention, and the log-sum of each head's queries in
    float32; a mask makes SDPA repeat the key heads."""
    mask = m.size * rows * width * keys if masked else 0
    kept = m.size * 2 * rows * (width * m.queries + keys * (m.queries if masked else m.kv))
    return kept + mask + FP32 * rows * width * m.heads


def layer_forward(m, rows, width, keys, masked):
    """The most that a layer holds beside its input when nothing is kept."""
    tokens, attention = rows * width, attention_bytes(m, rows, width, keys, masked)
    inner = 4 if m.rank else 3  # gate, up, their product; an adapter's sum
    mlp = m.size * tokens * (2 * m.hidden + inner * m.inner)
    norm = tokens * m.hidden * (2 * FP32 + m.size)
    new_keys = m.size * 2 * rows * (keys + width) * m.kv
    return max(norm, mlp, attention + new_keys + 2 * m.size * tokens * m.hidden)


# --- Phases: {name: {part: bytes}} --------------------------------------------------
def sampling(m, prompts, rows, prompt, completion):
    """Returns the parts of SharedDecoder's batch when it holds most: in the prefill or at the end.

    Left to the allowance: what a few prompts that join copy, rows that ended and are still there
    then (up to an eighth of them), and cumsum's own float64 copy.
    """
    token = m.size * 2 * m.layers * m.kv  # keys and values, all layers
    of_prompts, logits = token * prompts * prompt, m.size * rows * m.vocab
    layer = layer_forward(m, prompts, prompt, prompt, True) + prompts * prompt**2  # and the mask
    layer += 2 * m.size * m.hidden * prompts * prompt
    full = of_prompts + token * rows * completion
    # of a layer's keys, then its values: old and new
    growth = m.size * rows * completion * m.kv if completion > ROOM else 0
    draw = rows * m.vocab * (2 * FP32 + FP64)  # log_softmax, its exp, their sums; a GPU: 3 * FP32
    prefill = {"key-value cache": of_prompts, "one layer": layer}
    # with the first token's logits, which live as long as the batch
    end = {"key-value cache": full, "its growth, logits": 2 * logits + max(growth, draw)}
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

    def total(parts):
        moving = sum(n for part, n in parts.items() if part not in (WEIGHTS, ADAM))
        return sum(parts.values()) + SLACK * moving + CONTEXT

    return max((total(parts), name) for name, parts in phases.items())


# --- What fits ----------------------------------------------------------------------
def room_on(model):
    """Returns the bytes that this process may use of the model's GPU: what it has, and what is
    free. 0 where the model's layers are not those that are computed here; None on a CPU."""
    if model.device.type == "cpu":
        return None
    if model.config.model_type not in MODEL_TYPES:
        return 0
    free, _ = torch.accelerator.get_memory_info(model.device)
    return free + torch.accelerator.memory_reserved(model.device)


def usual(c):
    """Returns what "auto" stands for in the constants `c` where nothing is computed."""
    values = USUAL | {"SAMPLE_BATCH": max(USUAL["SAMPLE_BATCH"], c.GROUP_SIZE)}
    return {name: value for name, value in values.items() if getattr(c, name) == "auto"}


def first_that_fits(c, candidates, phases, room):
    """Returns (values, bytes): the first candidate, values of constants by name, with which the
    phases(c) need no more than MARGIN of `room` bytes. One candidate alone is not checked. Raises
    SystemExit if none fits."""
    for values in candidates:
        size, phase = need(phases(with_constants(c, **values)))
        if len(candidates) == 1 or size <= MARGIN * room:
            return values, size
    tried = ", ".join(f"{name} = {value}" for name, value in values.items())
    raise SystemExit(
        f"{phase} would need {size / 2**30:.1f} GB, computed, with {tried}, and this GPU has"
        f" {room / 2**30:.1f}: GRADIENT_CHECKPOINTING = True, LORA_RANK = 16, OFFLOAD_OPTIMIZER ="
        " True, more GPUs, a smaller MODEL or, without a server, REFERENCE_ON_CPU = True need less"
        ' (docs/memory.md). Numbers in place of "auto" are tried unchecked'
    )


def rows_that_fit(c, m, states, room, phases=("sampling", "evaluation")):
    """Returns ({"SAMPLE_BATCH": number}, bytes) for a process with these `states`."""
    merged = m.size * m.adapted if m.rank else 0
    if room - states[WEIGHTS] >= 2 * merged:  # MergedAdapters' condition, before Adam has moments
        states = states | {"adapters, merged": merged}
    rows = [*(rows for rows in ROWS if rows > c.GROUP_SIZE), c.GROUP_SIZE]  # groups stay whole
    candidates = [{"SAMPLE_BATCH": n} for n in (rows if c.SAMPLE_BATCH == "auto" else [])]

    def chosen(c):
        return {name: sampling_phases(m, c, states)[name] for name in phases}

    return first_that_fits(c, candidates or [{}], chosen, room)


def fit_worker(c, policy):
    """Puts a number in the place of SAMPLE_BATCH = "auto" in a worker's constants `c`."""
    if c.SAMPLE_BATCH != "auto":
        return
    rows, room = usual(c)["SAMPLE_BATCH"], room_on(policy.model)
    if room:
        m = sizes_of(policy, c.LORA_RANK)
        values, size = rows_that_fit(c, m, {WEIGHTS: m.size * m.held}, room, ["sampling"])
        rows = values["SAMPLE_BATCH"]
        say(f"SAMPLE_BATCH = {rows}: {told(size, room)}")
    set_for_run(vars(c), {"SAMPLE_BATCH": rows})


def sizes_of(policy, lora_rank):
    return Sizes(policy.model.config, lora_rank, getattr(torch, policy.dtype).itemsize)


def told(size, room):
    return f"{size / 2**30:.1f} of {room / 2**30:.1f} GB, computed"
