"""Sizes that are "auto": at the start we try what fits into the GPU, the largest size first.

A trial allocates the most memory that the run will hold, and we measure it.
"""

import functools
import gc
import math

import torch

from grpo.decoder import make_decoder
from grpo.devices import CPU_BATCH, accelerator, is_out_of_memory, release_memory
from grpo.log import say
from grpo.sampler import draw

# Powers of two: free memory varies a little between starts, and a run repeats exactly only with
# equal sizes. More than 256 gains little, and a worker would request too many groups at once
BATCHES = (256, 128, 64, 32, 16, 8, 4, 2)
# The share of the GPU that stays free for what no trial shows: NCCL's buffers,
# fragmentation, a server on the same GPU that begins to score. This is a guess, not measured
SPARE = 0.08


# --- Any size -------------------------------------------------------------------------
def fit(device, candidates, attempt, in_use=0, worst=lambda measure: measure()):
    """Returns the first of `candidates`, dicts of sizes, whose attempt(**candidate) fits into the
    GPU in addition to `in_use` bytes, and logs it. SystemExit if none fits.

    `worst` calls a measuring function and returns the largest result of all ranks.
    """
    for sizes in candidates:
        trial = functools.partial(attempt, **sizes)
        share, peak, room = worst(functools.partial(measured, trial, in_use, device))
        chosen = ", ".join(f"{name} = {value}" for name, value in sizes.items())
        if share <= 1 - SPARE:
            left = (room - peak) / 1e9
            say(f"{chosen} fits: a trial took {peak / 1e9:.1f} GB and left {left:.1f} free")
            return sizes
    raise SystemExit(
        f"{chosen} does not fit into this GPU, which has {room / 1e9:.1f} GB free. To save"
        " memory, use a smaller MODEL, LORA_RANK = 16, OFFLOAD_OPTIMIZER = True, more GPUs, or a"
        " lower MAX_COMPLETION_TOKENS; with vLLM a lower VLLM_CACHE_GB or VLLM_SLEEP = True"
        " (docs/memory.md)"
    )


def measured(trial, in_use, device):
    """Returns (share, peak, room). `peak` is the most bytes that tensors take while trial() runs
    beside `in_use` bytes, infinite if they do not fit; `room` is the bytes that this process
    may take; `share` is peak / room."""
    gpu, peak = torch.accelerator, math.inf
    room = gpu.get_memory_info(device)[0] + gpu.memory_reserved(device)
    gpu.reset_peak_memory_stats(device)
    try:
        _block = torch.empty(in_use, dtype=torch.uint8, device=device)
        trial()
        peak = gpu.max_memory_allocated(device)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    _block = None
    gc.collect()  # only now: within `except` the error still holds the trial's tensors
    release_memory()
    gpu.reset_peak_memory_stats(device)  # gpu_memory_gb is to measure the run itself
    return peak / room, peak, room


# --- SAMPLE_BATCH -----------------------------------------------------------------------
def fit_worker(c, policy, turns):
    """Returns SAMPLE_BATCH of a process that only samples; if it is "auto", the number that fits.
    `turns`: whether a completion may have several (the task has reply())."""
    if c.SAMPLE_BATCH != "auto":
        return c.SAMPLE_BATCH
    if accelerator():
        return fit_batch(c, policy, c.GROUP_SIZE, turns)
    return max(CPU_BATCH, c.GROUP_SIZE)


def fit_batch(c, policy, group_size, turns, **others):
    """Returns the SAMPLE_BATCH that fits if `group_size` completions share a prompt: GROUP_SIZE, or
    1 if the process evaluates, too. `fit` explains `others`."""
    sizes = [*(n for n in BATCHES if n > c.GROUP_SIZE), c.GROUP_SIZE]  # groups stay whole

    def attempt(SAMPLE_BATCH):
        sample(c, policy, group_size, SAMPLE_BATCH, turns)

    candidates = [{"SAMPLE_BATCH": n} for n in sizes]
    return fit(policy.model.device, candidates, attempt, **others)["SAMPLE_BATCH"]


@torch.no_grad()
def sample(c, policy, group_size, rows, turns=False):
    """Holds the most memory that a batch of `rows` completions needs: runs their prompts, gives the
    cache the rest of completions of full length, and samples a last token. With several `turns` a
    late turn's prompt has all earlier turns, nearly all tokens, and is its own."""
    prompt, more = c.MAX_PROMPT_TOKENS, c.MAX_COMPLETION_TOKENS - 1
    if turns:
        group_size, prompt, more = 1, prompt + more, 0
    with policy.as_sampler():
        decoder = make_decoder(policy.model)
        number = rows // group_size
        # prompts of two lengths, as padding needs a mask
        prompts = [[1] * max(1, prompt - n % 2) for n in range(number)]
        logits = decoder.begin(prompts, [group_size] * number)
        decoder.fill(more)
        draw(logits[:, : policy.vocab_size], c.TEMPERATURE, policy.generator(seed=0))
        logits = decoder.next_logits(logits.argmax(-1))
        draw(logits[:, : policy.vocab_size], c.TEMPERATURE, policy.generator(seed=0))
