"""Finds the trainer's "auto" sizes by trials on the ranks' GPUs, before a run begins or resumes.

Every rank runs the largest micro-batch that the trainer may cut, forward and backward, with the
run's loss. If one rank runs out of memory, all of them try the next size. The trial runs
without DeepSpeed: a rank that ran out of memory within one of DeepSpeed's collectives would leave
the others waiting. A block of memory takes the place of what DeepSpeed will hold.

A number instead of "auto" is used without a trial.
"""

import functools

import torch.distributed as dist

from grpo.engine import BUCKET
from grpo.forward import CompletionModel, checkpoint_layers
from grpo.options.gpu.sample_sizes import fit, fit_batch
from grpo.packing import pack_by_tokens, sizes_of
from grpo.ranks import all_or_none, gathered
from grpo.sample import Sample

# Sizes without and with checkpointing, the fastest first. Checkpointing takes a third more time,
# but small micro-batches cost time too: each one reduces the gradients over the ranks
TOKENS = {False: (16_384, 8_192), True: (16_384, 8_192, 4_096, 2_048, 1_024)}


def try_sizes(c, policy, auto, batch_loss, turns):
    """Collective: returns the sizes that fit, constants by name, for those that are `auto`. All
    ranks get the same. Raises SystemExit if nothing fits. The other arguments: start.fit_sizes."""
    found, (states, gradients) = {}, used_by_deepspeed(c, policy.model)
    if "SAMPLE_BATCH" in auto:
        group_size = 1 if c.EVAL_STEPS else c.GROUP_SIZE  # an evaluation's completions share none
        of_ranks = {"in_use": states, "worst": worst_of_ranks}
        found["SAMPLE_BATCH"] = fit_batch(c, policy, group_size, turns, **of_ranks)
    if set(auto) > {"SAMPLE_BATCH"} or "SAMPLE_BATCH" not in auto:
        model = CompletionModel(policy.model)
        attempt = functools.partial(forward_and_backward, c, batch_loss, model, policy.vocab_size)
        place = policy.model.device, micro_batches(c), attempt
        found |= fit(*place, in_use=states + gradients, worst=worst_of_ranks)
    return found


def worst_of_ranks(measure):
    """Collective: returns the largest of the ranks' measurements."""
    with all_or_none():
        found = measure()
    return max(gathered(found))


def micro_batches(c):
    """Returns the sizes to try, constants by name. The last has checkpointing, which stays on."""
    recompute, number = c.GRADIENT_CHECKPOINTING, c.MICRO_BATCH_TOKENS
    return [
        {"MICRO_BATCH_TOKENS": tokens, "GRADIENT_CHECKPOINTING": way}
        for way in ([False, True] if recompute == "auto" else [recompute])
        for tokens in (TOKENS[way or recompute != "auto"] if number == "auto" else [number])
    ]


# --- The trial ------------------------------------------------------------------------
def forward_and_backward(
    c, batch_loss, model, vocab_size, MICRO_BATCH_TOKENS, GRADIENT_CHECKPOINTING
):
    """Runs the largest micro-batches through `model`, a CompletionModel; leaves no gradient."""
    if GRADIENT_CHECKPOINTING:
        checkpoint_layers(model.model)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    left = sum(weight.numel() for weight in weights) // dist.get_world_size()

    def drop(weight):
        """DeepSpeed copies a gradient into its bucket and frees it. Of gradients that are larger
        than the bucket it keeps this rank's part until the backward pass ends."""
        nonlocal left
        large = weight.numel() > BUCKET
        left -= weight.numel() if large else 0
        if not large or left < 0:
            weight.grad = None

    hooks = [weight.register_post_accumulate_grad_hook(drop) for weight in weights]
    try:
        for completion in completion_lengths(c):
            batch = largest_batch(c, MICRO_BATCH_TOKENS, model.packs, completion)
            hidden, ids = model([s.prompt for s in batch], [s.ids for s in batch])
            batch_loss(c, hidden, model.head, ids, batch, vocab_size, old="kept")[0].backward()
            hidden = ids = None
    finally:
        for hook in hooks:
            hook.remove()
        model.zero_grad(set_to_none=True)


def completion_lengths(c):
    """Returns the completion lengths to try: with long ones a batch trains the most tokens, with
    short ones it holds the most keys and values of prompts."""
    return c.MAX_COMPLETION_TOKENS, -(-c.MAX_COMPLETION_TOKENS // 8)


def largest_batch(c, tokens, packs, completion):
    """Returns the Samples of the largest micro-batch that the trainer cuts from groups with
    prompts of full length and `completion` tokens in each completion."""
    groups = min(c.PROMPTS_PER_STEP, tokens // c.MAX_PROMPT_TOKENS + 1)
    prompts = [[n % 2] * c.MAX_PROMPT_TOKENS for n in range(groups) for _ in range(c.GROUP_SIZE)]
    sizes = sizes_of(prompts, [[1] * completion] * len(prompts), packs)
    number = len(pack_by_tokens(sizes, tokens)[0])
    logps = [-1.0] * completion
    others = {"ref_logps": logps, "old_logps": logps, "advantage": 1.0, "weight": 1e-3}
    ids = [1] * completion
    return [Sample(ids, logps, prompt=prompt, **others) for prompt in prompts[:number]]


def used_by_deepspeed(c, model):
    """Returns the bytes that ZeRO-2 adds to the model on each GPU: (always, while it trains).

    Read in the code of DeepSpeed 0.19.8: master weights and Adam's two moments in float32, or with
    offload a buffer for a weight; a step's gradients in float32 (if weights are float32, those of a
    micro-batch, too), two buckets, and the largest gradient in float64 for its norm.
    """
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    trained, largest = sum(w.numel() for w in weights), max(w.numel() for w in weights)
    share, bytes_each = trained // dist.get_world_size(), weights[0].element_size()
    states = bytes_each * largest if c.OFFLOAD_OPTIMIZER else 3 * 4 * share
    gradients = (8 if bytes_each == 4 else 4) * share + 8 * min(largest, share)
    gradients += 2 * bytes_each * min(BUCKET, trained)
    return states, gradients
