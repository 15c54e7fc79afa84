"""The simple decoder, which works for all models with a KV cache (decoder.py explains methods)."""

import torch

from grpo.models import last_logits, prefill


def repeated(x, sizes):
    """Returns a tensor whose row i is repeated sizes[i] times."""
    return x.repeat_interleave(repeats(sizes, x.device), 0)


def repeats(sizes, device):
    """Returns `sizes` in torch's form: one number if all are equal, without a wait for the GPU."""
    return sizes[0] if len(set(sizes)) == 1 else torch.tensor(sizes, device=device)


class CachedDecoder:
    """transformers' KV cache, with a prompt's part repeated for each of its sequences."""

    joins, compaction = False, 8

    def __init__(self, model):
        self.model = model
        self.cache = self.mask = self.positions = None

    def admit(self, prompts, sizes):
        logits, self.cache, mask = prefill(self.model, prompts)
        self.cache.batch_repeat_interleave(repeats(sizes, logits.device))
        self.mask = None if mask is None else repeated(mask, sizes)  # (S, P)
        lengths = torch.tensor([[len(p)] for p in prompts], device=logits.device)
        self.positions = repeated(lengths, sizes)  # (S, 1)
        return repeated(logits, sizes)

    def next_logits(self, tokens):
        if self.mask is not None:
            self.mask = torch.nn.functional.pad(self.mask, (0, 1), value=1)
        logits = last_logits(self.model, tokens[:, None], self.positions, self.cache, self.mask)
        self.positions = self.positions + 1
        return logits

    def keep(self, indices):
        self.cache.batch_select_indices(indices)
        self.mask = None if self.mask is None else self.mask[indices]
        self.positions = self.positions[indices]
