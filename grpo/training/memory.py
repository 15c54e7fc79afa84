"""What a GPU holds while the trainer trains, in bytes; see grpo/sampling/memory.py."""

import grpo_loss_triton
from grpo.packing import pack_by_tokens
from grpo.sampling.memory import (
    ADAM,
    BF16,
    BUCKET,
    FP32,
    FP64,
    WEIGHTS,
    attention_bytes,
)

STATES = WEIGHTS, ADAM, "gradients of a step, fp32"


def micro_batch(c):
    """Returns (prompts, rows, width of a row) of the largest micro-batch that the trainer cuts."""
    share, group, budget = c.SHARE_PROMPTS, c.GROUP_SIZE, c.MICRO_BATCH_TOKENS
    prompt, completion = c.MAX_PROMPT_TOKENS, c.MAX_COMPLETION_TOKENS
    rows = range(max(group, budget // completion + group))
    sizes = [(row // group if share else row, prompt, completion) for row in rows]
    first = pack_by_tokens(sizes, [[row] for row in rows], budget)[0]
    prompts = len({sizes[row][0] for row in first}) if share else 0
    return prompts, len(first), completion - 1 if share else prompt + completion - 1


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
def model_states(m, c, world):
    """What lies on each GPU between two steps, under ZeRO-2.

    estimate_zero2_model_states_mem_needs of DeepSpeed 0.19.8 counts 18 bytes a parameter over the
    GPUs and 2 on each, or with offload 2 in all. Read in its code instead: gradients of a step are
    fp32 on the GPU, with offload too (4, between first backward and step); those in bf16 (its other
    2) are not partitioned but live as long as `training` says.
    """
    parts = {WEIGHTS: BF16 * m.held}
    if c.OFFLOAD_OPTIMIZER:
        return parts | {"DeepSpeed's buffer for offload": BF16 * m.largest}
    return parts | {ADAM: 3 * FP32 * m.trained // world}


def training(m, c, world):
    """Forward and backward at their four peaks, and the optimiser step.

    With shared prompts each matrix is used twice in a forward, and autograd keeps the gradient of
    the completions' pass until that of the prompts' pass joins it: all of them, at "turn".
    """
    prompts, rows, width = micro_batch(c)
    prompt, completion = c.MAX_PROMPT_TOKENS, c.MAX_COMPLETION_TOKENS
    offload = c.OFFLOAD_OPTIMIZER
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

    states = model_states(m, c, world)
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
