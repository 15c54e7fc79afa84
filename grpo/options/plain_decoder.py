"""A model without a KV cache that can be used: each token runs its whole sequence again, which is
slow, but right for any causal model. sampler.py explains the methods."""

import torch

from grpo.forward import padded, supported


class PlainDecoder:
    def __init__(self, model):
        self.model, self.sequences = model, []

    def begin(self, prompts, times):
        self.sequences = [list(ids) for ids in prompts for _ in range(times)]
        return self._logits()

    def next_logits(self, tokens):
        for sequence, token in zip(self.sequences, tokens.tolist(), strict=True):
            sequence.append(token)
        return self._logits()

    def fill(self, number):
        self.sequences = [sequence + [0] * number for sequence in self.sequences]

    def keep(self, indices):
        self.sequences = [self.sequences[i] for i in indices.tolist()]

    def _logits(self):
        ids = padded(self.sequences, self.model.device)  # on the right, unseen by a causal model
        last = torch.tensor([len(s) - 1 for s in self.sequences], device=ids.device)
        columns, at = last.unique(return_inverse=True)  # few logits, if the model can leave others
        keep = supported(self.model, logits_to_keep=columns)
        logits = self.model(input_ids=ids, use_cache=False, **keep).logits
        return logits[torch.arange(len(ids), device=ids.device), at if keep else last]
