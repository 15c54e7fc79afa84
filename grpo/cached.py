"""The simple decoders, which work for all models. choice.py chooses one and explains methods."""

import torch

from grpo.models import last_logits, padded, prefill


def repeated(x, sizes):
    """Returns a tensor whose row i is repeated sizes[i] times."""
    return x.repeat_interleave(repeats(sizes, x.device), 0)


def repeats(sizes, device):
    """Returns `sizes` in torch's form: one number if all are equal, without a wait for the GPU."""
    return sizes[0] if len(set(sizes)) == 1 else torch.tensor(sizes, device=device)


class CachedDecoder:
    """transformers' own KV cache, with a prompt's part repeated for each of its sequences."""

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


class PlainDecoder:
    """No cache: slow, since each token runs its whole sequence, but right for any causal model."""

    joins, compaction = False, 8

    def __init__(self, model):
        self.model, self.sequences = model, []

    def admit(self, prompts, sizes):
        new = [list(p) for p, size in zip(prompts, sizes, strict=True) for _ in range(size)]
        self.sequences += new
        return self._logits(new)

    def next_logits(self, tokens):
        for sequence, token in zip(self.sequences, tokens.tolist(), strict=True):
            sequence.append(token)
        return self._logits(self.sequences)

    def keep(self, indices):
        self.sequences = [self.sequences[i] for i in indices.tolist()]

    def _logits(self, sequences):
        ids = padded(sequences, self.model.device)  # on the right, which a causal model never sees
        last = torch.tensor([len(s) - 1 for s in sequences], device=ids.device)
        logits = self.model(input_ids=ids, use_cache=False).logits
        return logits[torch.arange(len(ids), device=ids.device), last]
