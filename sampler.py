"""Samples groups of completions from the live policy: token ids, and the log-prob of each.

    groups = sample_groups(model, prompts, group_size=8, max_new_tokens=512, temperature=1.0,
                           eos_ids={2}, vocab_size=151_665, generator=None)

Why not `model.generate`: transformers fills every setting that we do not name from the model's
own generation config (Qwen2.5-Instruct ships top_p 0.8, top_k 20, repetition_penalty 1.05), and
then the log-probs that we train on are not those of the distribution that was sampled. This loop
knows one distribution, softmax(logits / temperature) over the tokenizer's ids: nothing to inherit.
It is faster too: a prompt runs once for its whole group, and finished rows leave the batch.

It knows nothing of HTTP, DeepSpeed or rewards. Symbols: B prompts, G completions of each, P prompt
tokens, T completion tokens, V ids of the tokenizer.
"""

import functools
import inspect
from dataclasses import dataclass

import torch
from transformers import DynamicCache


@dataclass
class Completion:
    """One sampled completion; `ids` ends with EOS unless `truncated`."""

    ids: list[int]
    logps: list[float]  # log-prob of each sampled id, at the sampling temperature, from float32
    truncated: bool  # cut at max_new_tokens: its last token is not EOS


@torch.no_grad()
def sample_groups(
    model, prompts, *, group_size, max_new_tokens, temperature, eos_ids, vocab_size, generator
):
    """Samples `group_size` completions of every prompt from softmax(logits / temperature).

    `prompts` is a list of B lists of token ids. `temperature` 0 decodes greedily (log-probs are
    then those at temperature 1). Ids from `vocab_size` on are the padding of the embedding: they
    are left out of the softmax here, in the trainer and in the reference server alike.
    Returns B lists of G `Completion`s. `generator` is a torch.Generator on the model's device.
    """
    rows = len(prompts) * group_size
    device = model.device
    eos = torch.tensor(sorted(eos_ids), device=device)
    ids = torch.zeros(rows, max_new_tokens, dtype=torch.long, device=device)
    logps = torch.zeros(rows, max_new_tokens, device=device)
    lengths = torch.zeros(rows, dtype=torch.long, device=device)
    truncated = torch.ones(rows, dtype=torch.bool, device=device)

    decoder = (CachedDecoder if can_cache(model) else PlainDecoder)(model, group_size)
    logits = decoder.start(prompts)  # (B * G, V'): V' is V plus the padding of the embedding
    alive = torch.arange(rows, device=device)  # which completion each row of the batch is
    for t in range(max_new_tokens):
        scaled = logits[:, :vocab_size].float() / (temperature or 1.0)
        log_probs = torch.log_softmax(scaled, dim=-1)
        if t == 0 and not torch.isfinite(logits).all():
            raise RuntimeError("the model's logits are not finite: its weights are broken")
        if temperature == 0:
            tokens = log_probs.argmax(-1)
        else:
            tokens = torch.multinomial(log_probs.exp(), 1, generator=generator).squeeze(1)
        ids[alive, t] = tokens
        logps[alive, t] = log_probs.gather(1, tokens[:, None]).squeeze(1)
        lengths[alive] = t + 1
        ended = torch.isin(tokens, eos)
        truncated[alive[ended]] = False
        if t + 1 == max_new_tokens:
            break
        if ended.any():  # the one wait for the device in each token's turn
            going = (~ended).nonzero().squeeze(1)
            if len(going) == 0:
                break
            alive, tokens = alive[going], tokens[going]
            decoder.keep(going)
        logits = decoder.step(tokens)

    lengths, truncated = lengths.tolist(), truncated.tolist()
    done = [
        Completion(i[:n], p[:n], cut)
        for i, p, n, cut in zip(ids.tolist(), logps.tolist(), lengths, truncated, strict=True)
    ]
    return [done[i : i + group_size] for i in range(0, rows, group_size)]


def can_cache(model):
    """Whether the model's past is a key-value cache that can be repeated and thinned by rows.

    Recurrent and linear-attention models (Mamba, RWKV, Qwen3-Next) keep a state instead; some do so
    in a few layers and don't say it (LFM2), but their cache's layers tell. GPT-1 keeps nothing.
    """
    if getattr(model, "_is_stateful", False) or not accepts(model, "past_key_values"):
        return False
    layers = DynamicCache(config=model.config).layers
    return not any(hasattr(layer, "conv_states") for layer in layers)


def accepts(model, name):
    """Whether the model's forward takes the argument `name` (not every architecture takes all)."""
    model = getattr(model, "module", model)  # DeepSpeed wraps the model
    return name in forward_arguments(type(model))


@functools.cache
def forward_arguments(architecture):
    return inspect.signature(architecture.forward).parameters.keys()


class CachedDecoder:
    """Next-token logits with a key-value cache; the prompt is run once for its group."""

    def __init__(self, model, group_size):
        self.model, self.group_size = model, group_size
        self.cache = DynamicCache(config=model.config)

    def start(self, prompts):
        """Runs the prompts, left-padded so that all end in the same column. -> (B * G, V')."""
        longest, device = max(map(len, prompts)), self.model.device
        ids = [[0] * (longest - len(p)) + p for p in prompts]  # the mask hides the zeros
        mask = [[0] * (longest - len(p)) + [1] * len(p) for p in prompts]
        self.mask = torch.tensor(mask, device=device)  # (B, P)
        self.padded = not bool(self.mask.all())
        # Left padding shifts the columns, so positions count real tokens only.
        self.positions = (self.mask.cumsum(1) - 1).clamp(min=0)
        logits = self._forward(torch.tensor(ids, device=device))
        self.cache.batch_repeat_interleave(self.group_size)
        self.mask = self.mask.repeat_interleave(self.group_size, 0)  # (B * G, P)
        self.positions = self.positions[:, -1:].repeat_interleave(self.group_size, 0)
        return logits.repeat_interleave(self.group_size, 0)

    def step(self, tokens):
        self.mask = torch.cat([self.mask, self.mask.new_ones(len(tokens), 1)], 1)
        self.positions = self.positions + 1
        return self._forward(tokens[:, None])

    def keep(self, rows):
        # The cache is copied once more in a step where a row ends; appending copies it anyway.
        self.cache.batch_select_indices(rows)
        self.mask, self.positions = self.mask[rows], self.positions[rows]

    def _forward(self, ids):
        inputs = {"input_ids": ids, "past_key_values": self.cache, "use_cache": True}
        if self.padded:
            inputs["attention_mask"] = self.mask
        if accepts(self.model, "position_ids"):
            inputs["position_ids"] = self.positions
        if accepts(self.model, "logits_to_keep"):
            inputs["logits_to_keep"] = 1
        return self.model(**inputs).logits[:, -1]


class PlainDecoder:
    """Next-token logits without a cache, for models whose past is not one: slow (each token runs
    the whole row again) but exact for every causal model."""

    def __init__(self, model, group_size):
        self.model, self.group_size = model, group_size

    def start(self, prompts):
        self.rows = [list(p) for p in prompts for _ in range(self.group_size)]
        return self._forward()

    def step(self, tokens):
        for row, token in zip(self.rows, tokens.tolist(), strict=True):
            row.append(token)
        return self._forward()

    def keep(self, rows):
        self.rows = [self.rows[i] for i in rows.tolist()]

    def _forward(self):
        longest = max(map(len, self.rows))
        ids = [row + [0] * (longest - len(row)) for row in self.rows]  # causal: later is unseen
        ids = torch.tensor(ids, device=self.model.device)
        last = torch.tensor([len(row) - 1 for row in self.rows], device=ids.device)
        logits = self.model(input_ids=ids, use_cache=False).logits
        return logits[torch.arange(len(ids), device=ids.device), last]
