"""Log-probs of a frozen model, in batches: all that the KL penalty needs from the reference.

score_groups(model, [(prompts, completions), ...], ...)    # [log-probs (N,), ...]
"""

import torch

from grpo.chunked import linear_logps
from grpo.devices import is_out_of_memory, release_memory
from grpo.log import tell
from grpo.packing import pack_by_tokens, sizes_of


def score_groups(model, groups, *, budget, temperature, vocab_size):
    """Returns the log-probs (N,), float32 on the CPU, of each group: a pair of equally many prompts
    and completions. Sequences of all groups are batched together.

    `model` is a CompletionModel, which runs a prompt once for neighbors that share it. A batch has
    at most `budget` tokens and is halved until it fits the GPU. Raises torch's error if a single
    sequence does not fit.
    """
    prompts = [prompt for part, _ in groups for prompt in part]
    completions = [completion for _, part in groups for completion in part]
    batches, found = pack_by_tokens(sizes_of(prompts, completions, model.packs), budget), {}
    while batches:
        batch = batches.pop(0)
        p, c = [prompts[i] for i in batch], [completions[i] for i in batch]
        try:
            logps = score_batch(model, p, c, temperature, vocab_size)
        except (RuntimeError, MemoryError) as error:
            if len(batch) == 1 or not is_out_of_memory(error):
                raise
            logps = None
        if logps:
            found |= zip(batch, logps, strict=True)
        else:  # outside of `except`, where the error no longer keeps tensors alive
            release_memory()
            half = len(batch) // 2
            tell(f"out of memory: scoring {len(batch)} sequences in two halves")
            batches[:0] = batch[:half], batch[half:]
    in_order = iter([found[i] for i in range(len(prompts))])
    answers = [torch.cat([next(in_order) for _ in part]) for part, _ in groups]
    if not all(answer.isfinite().all() for answer in answers):
        raise ValueError("the reference model computes log-probs that are not finite: check DTYPE")
    return answers


@torch.no_grad()
def score_batch(model, prompts, completions, temperature, vocab_size):
    """Returns the log-probs (T,) of each completion."""
    hidden, ids = model(prompts, completions)
    logps = linear_logps(hidden, model.head, ids, temperature=temperature, vocab_size=vocab_size)
    parts = logps.cpu().split([len(c) for c in completions])
    return [part.clone() for part in parts]  # copies, as views would keep the batch alive
