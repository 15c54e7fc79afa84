"""Log-probs of a frozen model, in batches: all that the KL penalty needs from the reference.

for part in score_sequences(model, prompts, completions, ...):    # {index: log-probs (T,)}
"""

import torch

from grpo.devices import release_memory
from grpo.log import tell
from grpo.packing import pack_by_tokens, sizes_of
from grpo_loss_triton import linear_logps


def score_sequences(model, prompts, completions, *, budget, temperature, vocab_size):
    """Yields {index of a sequence: its log-probs (T,)}, float32 on the CPU, a batch at a time.

    `model` is a CompletionModel, which runs a prompt once for neighbours that share it. A batch has
    at most `budget` tokens and is halved until it fits the GPU. Raises OutOfMemoryError if a single
    sequence does not fit.
    """
    batches = pack_by_tokens(sizes_of(prompts, completions, model.packs), budget)
    while batches:
        batch = batches.pop(0)
        p, c = [prompts[i] for i in batch], [completions[i] for i in batch]
        try:
            logps = score_batch(model, p, c, temperature, vocab_size)
        except torch.OutOfMemoryError:
            if len(batch) == 1:
                raise
            logps = None
        if logps:
            yield dict(zip(batch, logps, strict=True))
        else:  # outside of `except`, where the error no longer keeps tensors alive
            release_memory()
            half = len(batch) // 2
            tell(f"out of memory: scoring {len(batch)} sequences in two halves")
            batches[:0] = batch[:half], batch[half:]


@torch.no_grad()
def score_batch(model, prompts, completions, temperature, vocab_size):
    """Returns the log-probs (T,) of each completion."""
    hidden, ids = model(prompts, completions)
    logps = linear_logps(hidden, model.head, ids, temperature=temperature, vocab_size=vocab_size)
    parts = logps.cpu().split([len(c) for c in completions])
    return [part.clone() for part in parts]  # copies, as views would keep the batch alive
