"""Runs a model token by token, for the S sequences of a wave (sampler.py).

    decoder = make_decoder(model)
    logits = decoder.begin(prompts, times)  # (S, V'): each prompt runs once, for `times` sequences
    logits = decoder.next_logits(tokens)    # (S, V'), after one more token of each sequence
    decoder.keep(indices)                   # drops all sequences but these

V' are the columns of the LM head.
"""

import torch

from grpo.models import can_cache, last_logits, prefill


def make_decoder(model):
    """Returns a decoder with a KV cache, or the one without, which is right for any model."""
    if can_cache(model):
        return CachedDecoder(model)
    from grpo.options.sampling.plain_decoder import PlainDecoder

    return PlainDecoder(model)


class CachedDecoder:
    """transformers' KV cache, with a prompt's part repeated for each of its sequences."""

    def __init__(self, model):
        self.model = model
        self.cache = self.mask = self.positions = None

    def begin(self, prompts, times):
        logits, self.cache, self.mask = prefill(self.model, prompts)
        lengths = torch.tensor([[len(ids)] for ids in prompts], device=logits.device)
        self.cache.batch_repeat_interleave(times)
        if self.mask is not None:
            self.mask = self.mask.repeat_interleave(times, 0)  # (S, P)
        self.positions = lengths.repeat_interleave(times, 0)  # (S, 1)
        return logits.repeat_interleave(times, 0)

    def next_logits(self, tokens):
        if self.mask is not None:
            self.mask = torch.nn.functional.pad(self.mask, (0, 1), value=1)
        logits = last_logits(self.model, tokens[:, None], self.positions, self.cache, self.mask)
        self.positions = self.positions + 1
        return logits

    def fill(self, number):
        """Gives each sequence `number` tokens more, of zeros, to see whether their cache fits."""
        for number_of_layer, layer in enumerate(self.cache.layers):
            rows, heads, _, width = layer.keys.shape
            keys = layer.keys.new_zeros(rows, heads, number, width)
            values = keys.new_zeros(rows, heads, number, layer.values.shape[3])
            self.cache.update(keys, values, number_of_layer)
        if self.mask is not None:
            self.mask = torch.nn.functional.pad(self.mask, (0, number), value=1)
        self.positions = self.positions + number

    def keep(self, indices):
        self.cache.batch_select_indices(indices)
        self.mask = None if self.mask is None else self.mask[indices]
        self.positions = self.positions[indices]
