"""Log-probs of given ids under a frozen model: all that a KL penalty needs of the reference."""

import torch

from grpo.devices import release_memory
from grpo.log import tell
from grpo.packing import number_prompts, pack_by_tokens, whole_groups
from grpo_loss_triton import linear_logps


def score_sequences(model, prompts, completions, *, budget, temperature, vocab_size):
    """Yields {index of a sequence: its log-probs (T,)}, float32 on the CPU, a batch at a time, the
    shortest completions first.

    `model` is a CompletionModel, which runs a prompt once for neighbours that have the same. A
    batch has at most `budget` padded tokens, and is halved while it does not fit the GPU. Raises
    OutOfMemoryError if a single sequence does not fit.
    """
    numbers = number_prompts(prompts, model.shares)
    sizes = [(n, len(p), len(c)) for n, p, c in zip(numbers, prompts, completions, strict=True)]
    batches = pack_by_tokens(sizes, whole_groups(sizes, budget), budget)
    while batches:
        batch = batches.pop()  # the last has the shortest
        p, c = [prompts[i] for i in batch], [completions[i] for i in batch]
        try:
            logps = score_batch(model, p, c, temperature, vocab_size)
        except torch.OutOfMemoryError:
            if len(batch) == 1:
                raise
            logps = None
        if logps:
            yield dict(zip(batch, logps, strict=True))
        else:  # out here, where the error no longer holds the batch's tensors
            release_memory()
            half = len(batch) // 2
            tell(f"out of memory: {len(batch)} sequences are scored in two halves")
            batches += [batch[half:], batch[:half]]


@torch.no_grad()
def score_batch(model, prompts, completions, temperature, vocab_size):
    """Returns the log-probs (T,) of each completion."""
    hidden, ids = model(prompts, completions)
    logps = linear_logps(hidden, model.head, ids, temperature=temperature, vocab_size=vocab_size)
    parts = logps.cpu().split([len(c) for c in completions])
    return [part.clone() for part in parts]  # not views, which would keep the batch alive
