"""A model without a KV cache that can be used: each token runs its whole sequence again, which is
slow, but right for any causal model. decoder.py explains the methods."""

import torch

from grpo.models import padded, supported


class PlainDecoder:
    joins, compaction = False, 8
    cost = ' (each token runs the whole sequence again: SAMPLER = "vllm" avoids that)'

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
        columns, at = last.unique(return_inverse=True)  # few logits, if the model can leave others
        keep = supported(self.model, logits_to_keep=columns)
        logits = self.model(input_ids=ids, use_cache=False, **keep).logits
        return logits[torch.arange(len(ids), device=ids.device), at if keep else last]
