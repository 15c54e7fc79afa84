"""Samples groups of completions from a model: token ids, and the log-prob of each.

    groups = sample_groups(model, prompts, group_size=8, max_new_tokens=512, temperature=1.0,
                           eos_ids={2}, vocab_size=151_665, generator=None)

We do not use `model.generate`: it takes every setting that we do not name from the model's
generation config (Qwen2.5-Instruct ships top_p 0.8, top_k 20, repetition_penalty 1.05), and then we
would train on log-probs of another distribution than the sampled one. Here there is one
distribution, softmax(logits / temperature) over the tokenizer's ids. It is also faster: a prompt
runs once for its group (decoders), and sequences that have ended leave the batch.
Symbols: G completions of a prompt, S sequences in the batch, T completion tokens, V tokenizer ids.
"""

import itertools
import math

import torch
from transformers import DynamicCache

from grpo.forward import supported
from grpo.sample import Prompt, Sample

# Sequences that have ended leave together, as that copies the cache of the others: once they are
# more than one in LEAVE (chosen, not measured)
LEAVE = 8


def sample_groups(model, prompts, *, max_sequences=None, **settings):
    """Returns a list of G Samples for each of the prompts, which are lists of token ids.

    At most `max_sequences` are sampled at once (None: all); stream_groups explains the `settings`.
    """
    settings["max_sequences"] = max_sequences or len(prompts) * settings["group_size"]
    groups = dict(stream_groups(model, itertools.starmap(Prompt, enumerate(prompts)), **settings))
    return [groups[i] for i in range(len(prompts))]


@torch.no_grad()
def stream_groups(
    model,
    prompts,
    *,
    group_size,
    max_sequences,
    max_new_tokens,
    temperature,
    eos_ids,
    vocab_size,
    generator,
    stop_strings=None,
    decoder=None,
):
    """Yields (key, [Sample] * G) for each group, as soon as its last completion has ended.

    Groups are sampled in waves. A wave begins with as many prompts as `max_sequences` has room for,
    and ends with its last sequence. `prompts` is an iterator of Prompts, read when a wave begins.
    Completions are drawn from softmax(logits / temperature); temperature 0 is greedy, with
    log-probs at temperature 1. The softmax excludes ids from `vocab_size` on, the embedding's
    padding, here, in the trainer and in the reference server. `generator` is a
    torch.Generator on the model's device. With `stop_strings`, a StopStrings, each token costs
    more waits for the device, and the host checks every new id. `decoder` is a class, CachedDecoder
    if None. Raises RuntimeError if a completion ends whose logits were not finite.
    """
    assert max_sequences >= group_size, (max_sequences, group_size)
    while new := list(itertools.islice(prompts, max_sequences // group_size)):
        wave = Wave(new, group_size, max_new_tokens, eos_ids, stop_strings, model.device)
        cache = (decoder or CachedDecoder)(model)
        logits = cache.begin([prompt.ids for prompt in new], group_size)  # (S, V'), with padding
        while True:
            yield from wave.write(*draw(logits[:, :vocab_size], temperature, generator))
            if not wave.unfinished:
                break
            if wave.is_due:
                cache.keep(wave.drop_ended())
            logits = cache.next_logits(wave.ids[:, wave.length - 1])


class Wave:
    """S sequences that began together. Ended ones stay, unread, until drop_ended removes them."""

    def __init__(self, prompts, group_size, limit, eos_ids, stop_strings, device):
        self.eos_ids, self.stop_strings = eos_ids, stop_strings
        self.eos = torch.tensor(sorted(eos_ids), device=device)
        self.rows, limits = [], []  # (S,) of each: key and completions of its group, its number
        for key, _, own in prompts:
            group = [None] * group_size
            self.rows += [(key, group, i) for i in range(group_size)]
            limits += [own or limit] * group_size
        self.limits = torch.tensor(limits, device=device)  # (S,)
        self.ids = self.limits.new_zeros(len(limits), max(limits))  # (S, T)
        self.logps = torch.zeros(self.ids.shape, device=device)  # (S, T)
        self.active = self.limits > 0  # (S,) all
        self.unfinished, self.length = len(limits), 0  # length: tokens of each so far
        self.shortest = min(limits)

    @property
    def is_due(self):
        """Whether ended sequences must leave: they are many, or one has reached its own limit,
        beyond which the model may have no positions."""
        ended = len(self.rows) - self.unfinished
        return ended > len(self.rows) // LEAVE or self.length >= self.shortest

    def drop_ended(self):
        """Removes ended sequences; returns the indices (S',) of the remaining ones."""
        stay = self.active.nonzero().flatten()
        self.rows = [self.rows[i] for i in stay.tolist()]
        self.limits, self.active = self.limits[stay], self.active[stay]
        self.ids, self.logps = self.ids[stay], self.logps[stay]
        self.shortest = min(self.limits.tolist())
        return stay

    def write(self, tokens, logps):
        """Adds a token to each sequence; yields (key, [Sample] * G) of groups that are complete."""
        self.ids[:, self.length], self.logps[:, self.length] = tokens, logps
        self.length += 1
        stopped = []
        if self.stop_strings:
            stopped = self.stop_strings.ended(self.ids[:, : self.length], self.active)
        ended = torch.isin(tokens, self.eos) | (self.limits == self.length)
        if stopped:
            ended[stopped] = True
        ended &= self.active
        self.active &= ~ended
        last = ended.nonzero().flatten()  # the only wait for the device per token
        self.unfinished -= len(last)
        lists = (x[last, : self.length].tolist() for x in (self.ids, self.logps))
        for i, ids, found in zip(last.tolist(), *lists, strict=True):
            if not math.isfinite(sum(found)):
                raise RuntimeError("the model's logits are not finite: its weights are broken")
            key, group, number = self.rows[i]
            truncated = ids[-1] not in self.eos_ids and i not in stopped
            group[number] = Sample(ids, found, truncated)
            if all(group):
                yield key, group


def draw(logits, temperature, generator):
    """Returns tokens (S,) drawn from logits (S, V), and their log-probs (S,): the inverse of the
    distribution function, at one uniform number per sequence."""
    log_probs = torch.log_softmax(logits.float() / (temperature or 1.0), dim=-1)
    if temperature:
        below = log_probs.exp().cumsum(-1, dtype=torch.float64)  # float32 sums would lose rare ids
        uniform = below.new_empty(len(below), 1).uniform_(generator=generator)
        tokens = torch.searchsorted(below, uniform * below[:, -1:], right=True).squeeze(1)
        tokens = tokens.clamp_(max=below.shape[1] - 1)  # for NaN it finds V, beyond all ids
    else:
        tokens = log_probs.argmax(-1)
    return tokens, log_probs.gather(1, tokens[:, None]).squeeze(1)


# --- The decoder ------------------------------------------------------------------------
class CachedDecoder:
    """transformers' KV cache, with a prompt's part repeated for each of its sequences.

    begin(prompts, times), each prompt once for `times` sequences, and next_logits(tokens) return
    logits (S, V'), V' columns of the LM head; keep(indices) drops all sequences but these.
    """

    def __init__(self, model):
        self.model = model
        self.cache = self.mask = self.positions = None

    def begin(self, prompts, times):
        ids, positions, self.mask = left_padded(prompts, self.model.device)
        self.cache = DynamicCache(config=self.model.config)
        logits = last_logits(self.model, ids, positions, self.cache, self.mask)
        self.cache.batch_repeat_interleave(times)
        if self.mask is not None:
            self.mask = self.mask.repeat_interleave(times, 0)  # (S, P)
        self.positions = positions[:, -1:].repeat_interleave(times, 0) + 1  # (S, 1)
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


def left_padded(prompts, device):
    """Returns ids (B, P) padded on the left, their positions, and the mask (0: padding) or None if
    nothing is padded; all int64."""
    lengths = torch.tensor([[len(ids)] for ids in prompts], device=device)
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(ids)) + ids for ids in prompts], device=device)
    positions = torch.arange(-width, 0, device=device) + lengths
    mask = None if min(map(len, prompts)) == width else (positions >= 0).long()
    return ids, positions.clamp(min=0), mask


def last_logits(model, ids, positions, cache, mask=None):
    """Returns logits (S, V') of the last column of `ids` (S, any). `mask` hides padding, if any."""
    optional = supported(model, position_ids=positions, logits_to_keep=1)
    return model(
        input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=True, **optional
    ).logits[:, -1]
