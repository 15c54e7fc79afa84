"""What a GPU holds while the trainer trains, in bytes, and the constants "auto" that fill it; see
grpo/sampling/memory.py."""

import torch.distributed as dist

import grpo_loss_triton
from grpo.constants import set_for_run
from grpo.log import say
from grpo.packing import pack_by_tokens
from grpo.sampling.memory import (
    ADAM,
    BUCKET,
    FP32,
    FP64,
    WEIGHTS,
    attention_bytes,
    first_that_fits,
    layer_forward,
    room_on,
    rows_that_fit,
    sizes_of,
    told,
    usual,
)
from grpo.training.ranks import gathered

STATES = WEIGHTS, ADAM, "gradients of a step, fp32"
# To try, with and without checkpointing, the fastest first: to checkpoint takes a third more time,
# but gradients are reduced over the ranks once a micro-batch, so that small ones cost time, too
TOKENS = {False: (16_384, 8_192), True: (16_384, 8_192, 4_096, 2_048, 1_024)}


def micro_batch(c):
    """Returns (prompts, rows, width of a row) of the largest micro-batch that the trainer cuts."""
    share, group, budget = c.SHARE_PROMPTS, c.GROUP_SIZE, c.MICRO_BATCH_TOKENS
    prompt, completion = c.MAX_PROMPT_TOKENS, c.MAX_COMPLETION_TOKENS
    rows = range(max(group, budget // completion + group))
    sizes = [(row // group if share else row, prompt, completion) for row in rows]
    first = pack_by_tokens(sizes, [[row] for row in rows], budget)[0]
    prompts = len({sizes[row][0] for row in first}) if share else 0
    return prompts, len(first), completion - 1 if share else prompt + completion - 1


def layer_parts(m, rows, width, keys, masked):
    """Returns what a layer keeps for its backward, of a norm and of attention."""
    # Of a column: its input, in float32, its output, and what a weight that is trained multiplies
    norm = rows * width * (FP32 + (1 if m.rank else 2) * m.size)
    attention = attention_bytes(m, rows, width, keys, masked)
    return norm * m.hidden, attention + norm * m.normed


def layer_kept(c, m, rows, width, keys, masked):
    """What a layer keeps from forward to backward: its input, or all that its backward needs."""
    if c.GRADIENT_CHECKPOINTING:
        return m.size * rows * width * m.hidden
    norm, attention = layer_parts(m, rows, width, keys, masked)
    mlp = m.size * rows * width * 4 * m.inner  # gate, silu(gate), up, their product
    return 2 * norm + attention + mlp


def layer_backward(m, rows, width, keys, masked):
    """The most that recomputing a layer and its backward hold, at its MLP, norm or attention."""
    tokens = rows * width
    norm, attention = layer_parts(m, rows, width, keys, masked)
    # At silu(gate) * up: gate, both factors, and the gradients of the product and of both
    mlp = 2 * norm + attention + m.size * tokens * (6 * m.inner + m.hidden)
    at_norm = norm + attention + tokens * m.hidden * (6 * FP32 + 2 * m.size)
    at_attention = norm + 2 * attention + 2 * m.size * tokens * m.hidden
    return max(mlp, at_norm, at_attention)


def chunk_bytes(c, m, tokens):
    """The most that the loss holds of logits: a chunk, or without FUSED_LOSS all, in bf16, and in
    float32 their log-probs, probabilities and entropies."""
    if not c.FUSED_LOSS:
        return (m.size + 3 * FP32) * m.vocab * tokens
    return m.size * m.vocab * min(tokens, chunk_rows(m))


def chunk_rows(m):
    most = max(128, grpo_loss_triton.CHUNK_BYTES // (m.size * m.vocab))
    return -(-most // 128) * 128


def head_gradient(c, m, tokens):
    """What the loss holds of the head's gradient: over many chunks it is summed in float32."""
    few = tokens <= grpo_loss_triton.CHUNKS_IN_OWN_DTYPE * chunk_rows(m)
    return m.embedding * (m.size if few or not c.FUSED_LOSS else m.size + FP32)


# --- Phases: {name: {part: bytes}} --------------------------------------------------
def model_states(m, c, world):
    """What lies on each GPU between two steps, under ZeRO-2.

    estimate_zero2_model_states_mem_needs of DeepSpeed 0.19.8 counts 18 bytes a parameter over the
    GPUs and 2 on each, or with offload 2 in all. Read in its code instead: gradients of a step are
    fp32 on the GPU, with offload too (4, between first backward and step); those in bf16 (its other
    2) are not partitioned but live as long as `training` says.
    """
    parts = {WEIGHTS: m.size * (m.held + (0 if c.REFERENCE_ON_CPU else copied(m, c)))}
    if c.OFFLOAD_OPTIMIZER:
        return parts | {"DeepSpeed's buffer for offload": m.size * m.largest}
    return parts | {ADAM: 3 * FP32 * m.trained // world}


def copied(m, c):
    """Returns how many parameters the trainer's own copy of the reference has; 0: there is none."""
    return 0 if c.REF_SERVER or not c.KL_BETA or m.rank else m.total


def scoring(m, c):
    """Returns the parts of a forward pass by the reference, on a micro-batch."""
    prompts, rows, width = micro_batch(c)
    keys, tokens = c.MAX_PROMPT_TOKENS + c.MAX_COMPLETION_TOKENS - 1, rows * width
    states, trained = m.size * m.hidden, rows * c.MAX_COMPLETION_TOKENS
    layer = layer_forward(m, rows, width, keys, prompts > 0) + 2 * states * tokens
    most = max(layer, chunk_bytes(c, m, trained) + 3 * states * trained)
    cache = m.size * 2 * m.layers * prompts * c.MAX_PROMPT_TOKENS * m.kv
    return {"prompts' cache": cache, "a layer or a chunk": most}


def training(m, c, world):
    """Returns the phases of forward and backward, at their peaks, and of the optimiser step.

    With shared prompts each matrix is used twice in a forward, and autograd keeps the gradient of
    the completions' pass until that of the prompts' pass joins it: all of them, at "turn".
    """
    prompts, rows, width = micro_batch(c)
    prompt, completion = c.MAX_PROMPT_TOKENS, c.MAX_COMPLETION_TOKENS
    offload = c.OFFLOAD_OPTIMIZER
    keys, tokens, size = prompt + completion - 1, rows * width, m.size * m.hidden
    of_prompts, shared = prompts * prompt, prompts > 0
    cache = m.size * 2 * m.layers * of_prompts * m.kv  # keys and values of the prompts, all layers
    mask = (rows * width * keys + prompts * prompt**2) if shared else 0  # bool
    of_row = layer_kept(c, m, rows, width, keys, shared)  # one layer
    of_prompt = layer_kept(c, m, prompts, prompt, prompt, True) if shared else 0
    norm = (FP32 + m.size) * m.hidden  # what the last norm keeps, of a token
    rest = (
        m.layers * of_prompt
        + cache
        + mask
        + m.size * 2 * m.head * (tokens + of_prompts)
        + norm * of_prompts
    )
    trained = rows * completion
    d_hidden, d_weight = size * trained, m.size * m.embedding
    chunk, d_sum = chunk_bytes(c, m, trained), head_gradient(c, m, trained)
    of_rows = layer_backward(m, rows, width, keys, shared)
    of_turn = layer_backward(m, prompts, prompt, prompt, True) if shared else of_rows
    if not c.GRADIENT_CHECKPOINTING:  # most of it is there already
        of_rows, of_turn = of_rows - of_row, of_turn - of_prompt
    matrix, body = m.size * m.matrix, m.size * m.body
    kept = min(m.size * m.big, m.size * m.trained // world)
    d_head = d_weight if m.tied or m.embedding > BUCKET else 0  # a tied one waits for the embedding

    states = model_states(m, c, world)
    flat = {STATES[2]: FP32 * m.trained // world}

    def phase(activations, of_loss, others, reduced):
        """`reduced`: the largest matrix whose gradient is added meanwhile, in fp32 or its norm."""
        part = min(reduced, m.trained // world)
        copy = min(BUCKET, m.trained)  # of the bucket, for the all-reduce
        sums = max(FP32 * part + m.size * (BUCKET + copy), (FP64 if offload else FP32) * part)
        sums = sums if reduced else 0
        parts = {"activations": activations, "loss: dW, dH, a chunk": of_loss}
        return states | flat | parts | {"gradients, bf16": others, "DeepSpeed's sums": sums}

    everything = rest + m.layers * of_row + norm * tokens
    phases = {
        "loss": phase(everything + d_hidden, d_hidden + d_sum + chunk, 0, 0),
        "head": phase(everything, d_hidden + d_weight, 0, 0 if m.tied else m.embedding),
        "last layer": phase(everything - norm * tokens + of_rows, d_head, matrix, m.matrix),
        "first layer": phase(
            rest + (cache if shared else 0) + of_row + of_rows,
            d_head,
            body if shared else max(matrix, kept),
            m.matrix,
        ),
        "embedding": phase(0, 2 * d_weight + (0 if m.tied else d_head), kept, m.embedding),
    }
    if shared:
        joined = d_weight + (0 if m.tied else d_head)
        phases["turn"] = phase(rest + cache + of_turn, joined, body, m.matrix)
    if c.REFERENCE_ON_CPU and copied(m, c):  # before the step's first forward; else less than that
        phases["reference"] = states | {"reference": m.size * copied(m, c)} | scoring(m, c)
    norms = {"gradient norm, fp64": 0 if offload else FP64 * min(m.largest, m.trained // world)}
    return phases | {"step": states | flat | norms}


# --- What fits ----------------------------------------------------------------------
def fill_card(c, policy):
    """Collective: puts what fits into the ranks' GPUs in place of "auto" in the constants `c`, the
    same on all ranks: all plan the same micro-batches.

    It is done before a run is begun or resumed, so that a checkpoint keeps the numbers, and a run
    that resumes says which have changed.
    """
    if not usual(c):
        return
    rooms = gathered(room_on(policy.model))
    if None in rooms:
        set_for_run(vars(c), usual(c))
        return
    values, why, room = usual(c), "the memory of such layers is not computed", min(rooms)
    if room:
        m = sizes_of(policy, c.LORA_RANK)
        values, size = sizes_that_fit(c, m, room, dist.get_world_size())
        why = told(size, room)
    set_for_run(vars(c), values)
    checkpointing = f"{'' if c.GRADIENT_CHECKPOINTING else 'no '}checkpointing"
    tokens = f"MICRO_BATCH_TOKENS = {c.MICRO_BATCH_TOKENS}"
    say(f"SAMPLE_BATCH = {c.SAMPLE_BATCH}, {tokens}, {checkpointing}: {why}")


def sizes_that_fit(c, m, room, world):
    """Returns (values, bytes): what "auto" stands for in the constants `c`, by name, where each of
    `world` GPUs has `room` bytes for the model of Sizes `m`, and what is then needed. Raises
    SystemExit if nothing fits."""
    rows, sampled = rows_that_fit(c, m, model_states(m, c, world), room)
    own, tokens = c.GRADIENT_CHECKPOINTING, c.MICRO_BATCH_TOKENS
    candidates = [
        {"GRADIENT_CHECKPOINTING": way, "MICRO_BATCH_TOKENS": number}
        for way in ([False, True] if own == "auto" else [own])
        for number in (TOKENS[way or own != "auto"] if tokens == "auto" else [tokens])
    ]
    values, trained = first_that_fits(c, candidates, lambda c: training(m, c, world), room)
    return rows | values, max(sampled, trained)
