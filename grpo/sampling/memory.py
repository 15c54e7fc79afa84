"""Sizes that are "auto": what fits into a GPU is tried, the largest size first, at the start.

A trial holds what the run will hold at its most, and is measured. A batch is tried with the prefill
of all its prompts, then with a block of memory in the place of all keys and values of
completions at full length: to sample so many tokens would take minutes. On a CPU, where a process
that takes too much memory is killed, sizes are constants.
"""

import functools
import gc
import math

import torch

from grpo.constants import set_for_run
from grpo.devices import accelerator, release_memory
from grpo.log import say
from grpo.models import can_cache
from grpo.sampling.decoders.cached import PlainDecoder, prefill
from grpo.sampling.sampler import draw
from grpo.weights import MergedAdapters

CPU_BATCH = 64
# Powers of two: free memory varies a little from start to start, and a run repeats by its seed only
# with the same sizes. More than the first gains little, and a worker would ask for too many groups
BATCHES = (256, 128, 64, 32, 16, 8, 4, 2)
# The share of a GPU that is left free, for what no trial shows: NCCL's buffers, CUDA graphs, gaps
# between blocks, a server on the same GPU that begins to score. A guess, not measured
SPARE = 0.08


# --- Any size -------------------------------------------------------------------------
def fit(c, device, candidates, attempt, held=0, worst=lambda measure: measure()):
    """Sets in `c` the first candidate, constants by name, with which attempt(**candidate) fits into
    the GPU beside `held` bytes. Returns a text about it; raises SystemExit if none fits.

    `worst` takes a function that measures, and returns the largest of all ranks' answers.
    """
    for sizes in candidates:
        trial = functools.partial(attempt, **sizes)
        share, peak, room = worst(functools.partial(measured, trial, held, device))
        chosen = ", ".join(f"{name} = {value}" for name, value in sizes.items())
        if share <= 1 - SPARE:
            set_for_run(vars(c), sizes)
            return f"{chosen}: {peak / 2**30:.1f} GB measured, {(room - peak) / 2**30:.1f} free"
    raise SystemExit(
        f"{chosen} does not fit into this GPU, of which {room / 2**30:.1f} GB are free: a smaller"
        " MODEL, LORA_RANK = 16, OFFLOAD_OPTIMIZER = True, more GPUs, lower MAX_COMPLETION_TOKENS"
        " or, without a server, REFERENCE_ON_CPU = True need less (docs/memory.md)"
    )


def measured(trial, held, device):
    """Returns (share, peak, room): the most bytes that tensors take while trial() runs beside
    `held` bytes, infinite if they do not fit; the bytes that this process may take; their ratio."""
    gpu, peak = torch.accelerator, math.inf
    room = gpu.get_memory_info(device)[0] + gpu.memory_reserved(device)
    gpu.reset_peak_memory_stats(device)
    try:
        _block = torch.empty(held, dtype=torch.uint8, device=device)
        trial()
        peak = gpu.max_memory_allocated(device)
    except torch.OutOfMemoryError:
        pass
    _block = None
    gc.collect()  # here, where no error holds the trial's tensors any more
    release_memory()
    gpu.reset_peak_memory_stats(device)  # gpu_memory_gb is that of the run itself
    return peak / room, peak, room


# --- SAMPLE_BATCH, EVAL_BATCH -----------------------------------------------------------
def fit_worker(c, policy):
    """Sets SAMPLE_BATCH in `c`, the constants of a process that only samples, if it is "auto"."""
    if c.SAMPLE_BATCH != "auto":
        return
    if accelerator():
        say(fit_batch(c, policy, "SAMPLE_BATCH", c.GROUP_SIZE))
    else:
        set_for_run(vars(c), {"SAMPLE_BATCH": max(CPU_BATCH, c.GROUP_SIZE)})


def fit_batch(c, policy, name, group_size, **others):
    """Sets SAMPLE_BATCH or EVAL_BATCH, by `name`; `group_size` completions share a prompt: one in
    an evaluation, whose prefill is the largest. See `fit` for `others` and the answer."""
    sizes = [*(n for n in BATCHES if n > group_size), group_size]  # groups stay whole

    def attempt(**size):
        sample(c, policy, group_size, size[name])

    return fit(c, policy.model.device, [{name: n} for n in sizes], attempt, **others)


@torch.no_grad()
def sample(c, policy, group_size, rows):
    """Holds the most that a batch of so many completions holds."""
    model, prompt, completion = policy.model, c.MAX_PROMPT_TOKENS, c.MAX_COMPLETION_TOKENS
    # of two lengths: padding costs a mask
    prompts = [[1] * max(1, prompt - n % 2) for n in range(rows // group_size)]
    with MergedAdapters(model):
        if can_cache(model):
            logits, cache, _ = prefill(model, prompts)
            tensors = [x for layer in cache.layers for x in (layer.keys, layer.values)]
            token = sum(x.nbytes for x in tensors) // (len(prompts) * len(prompts[0]))
            size = token * completion * rows
            _block = torch.empty(size, dtype=torch.uint8, device=model.device)
        else:  # each token runs its whole sequence
            logits = PlainDecoder(model).admit(
                [[1] * (prompt + completion)] * len(prompts), [1] * len(prompts)
            )
        logits = logits.repeat_interleave(group_size, 0)
        draw(logits[:, : policy.vocab_size], c.TEMPERATURE, policy.generator(seed=0))
