"""The simple, always right decoders."""

import torch
from transformers import DynamicCache

from grpo.models import accepts


def run(model, ids, *, positions, cache, mask=None):
    """-> logits (rows, V') of the last column of `ids`; `mask` is None where nothing is padded."""
    inputs = {"input_ids": ids, "past_key_values": cache, "use_cache": True}
    if mask is not None:
        inputs["attention_mask"] = mask
    if accepts(model, "position_ids"):
        inputs["position_ids"] = positions
    if accepts(model, "logits_to_keep"):
        inputs["logits_to_keep"] = 1
    return model(**inputs).logits[:, -1]


def prefill(model, prompts):
    """Runs prompts, left-padded so that all end in the same column.

    -> logits (B, V'), their DynamicCache, the mask (B, P) and each prompt's length (B,).
    """
    longest, device = max(map(len, prompts)), model.device
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts], device=device)
    lengths = torch.tensor([len(p) for p in prompts], device=device)
    mask = torch.arange(longest, device=device) >= longest - lengths[:, None]
    # Left padding shifts the columns, so positions count real tokens only.
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    cache = DynamicCache(config=model.config)
    padded = None if len(set(map(len, prompts))) == 1 else mask.long()  # the mask hides the zeros
    logits = run(model, ids, positions=positions, cache=cache, mask=padded)
    return logits, cache, mask, lengths


def on_top(old, new, dim):
    """-> both, one after the other, padded on the left of dimension `dim` to the same width."""
    if old is None:
        return new
    width = max(old.shape[dim], new.shape[dim])

    def widened(x):
        pad = [0, 0] * (x.dim() - 1 - dim) + [width - x.shape[dim], 0]
        return torch.nn.functional.pad(x, pad)

    return torch.cat([widened(old), widened(new)])


# --- Any key-value cache ------------------------------------------------------------
class CachedDecoder:
    """A cache of transformers' own, with a prompt's part repeated for each of its rows."""

    joins, bunch = False, 8

    def __init__(self, model):
        self.model = model

    def admit(self, prompts, group_size):
        logits, self.cache, mask, lengths = prefill(self.model, prompts)
        self.padded = not bool(mask.all())
        self.cache.batch_repeat_interleave(group_size)
        self.mask = mask.long().repeat_interleave(group_size, 0)  # (S, P)
        self.positions = lengths[:, None].repeat_interleave(group_size, 0)
        return logits.repeat_interleave(group_size, 0)

    def step(self, tokens):
        self.mask = torch.cat([self.mask, self.mask.new_ones(len(tokens), 1)], 1)
        mask = self.mask if self.padded else None
        logits = run(
            self.model, tokens[:, None], positions=self.positions, cache=self.cache, mask=mask
        )
        self.positions = self.positions + 1
        return logits

    def keep(self, rows):
        self.cache.batch_select_indices(rows)
        self.mask, self.positions = self.mask[rows], self.positions[rows]


# --- Any causal model ---------------------------------------------------------------
class PlainDecoder:
    """No cache: slow (each token runs the whole row again) but exact for every causal model."""

    joins, bunch = False, 8

    def __init__(self, model):
        self.model, self.rows = model, []

    def admit(self, prompts, group_size):
        new = [list(p) for p in prompts for _ in range(group_size)]
        self.rows += new
        return self._forward(new)

    def step(self, tokens):
        for row, token in zip(self.rows, tokens.tolist(), strict=True):
            row.append(token)
        return self._forward(self.rows)

    def keep(self, rows):
        self.rows = [self.rows[i] for i in rows.tolist()]

    def _forward(self, rows):
        longest = max(map(len, rows))
        ids = [row + [0] * (longest - len(row)) for row in rows]  # causal: later is unseen
        ids = torch.tensor(ids, device=self.model.device)
        last = torch.tensor([len(row) - 1 for row in rows], device=ids.device)
        logits = self.model(input_ids=ids, use_cache=False).logits
        return logits[torch.arange(len(ids), device=ids.device), last]
