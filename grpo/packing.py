"""Packs sequences: plans micro-batches of a limited number of tokens, and runs attention over one
row of packed sequences. Only this file knows where each sequence begins.

    rounds = plan_micro_batches(sizes, world, budget)  # rounds[number][rank]: numbers of sequences

    row = Row(prompts, completions, device)
    with attention_is(PACKED, model.config):
        model(input_ids=row.ids, position_ids=row.positions, packed=row)

The row holds a prompt, its completions, the next prompt, and so on. It is cut into parts: a prompt
with its first completion, and each further completion with the keys and values of its prompt
gathered in front. A part's last query sees all keys of the part, each query before it one key less.

scaled_dot_product_attention runs buckets. A bucket holds parts of similar length, padded on the
right, whose prompts have equally many keys.

Symbols: L tokens of the row, D width of a head, B parts of a bucket.
"""

import functools
import sys

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import repeat_kv

PACKED = "grpo_packed"  # under this name transformers finds packed_attention
# A bucket may have this many padded pairs of query and key, which cost less than another call. More
# make fewer, larger buckets. The number for CPUs was measured, the one for GPUs is a guess.
SLACK, SLACK_ON_GPUS = 4_000, 1_000_000


class Row:
    """Prompts and completions as one row: `ids` and `positions` (1, L), and `states` (N,), the
    indices of the states that predict completions. Neighbors with the same prompt share it."""

    def __init__(self, prompts, completions, device):
        self.device, self.parts, self.masks = device, [], {}
        self.tensor = functools.partial(torch.tensor, dtype=torch.int64, device=device)
        self.windows = set()  # that layers ask for
        ids, positions, states, last = [], [], [], None
        for prompt, completion in zip(prompts, completions, strict=True):
            new, begin = completion[:-1], len(ids)  # the state after the last token is not needed
            if prompt != last:
                last, before = prompt, range(begin, begin + len(prompt))
                ids += prompt
                positions += range(len(prompt))
            states += [before[-1], *range(len(ids), len(ids) + len(new))]
            ids += new
            positions += range(len(prompt), len(prompt) + len(new))
            if len(ids) > begin:  # a first completion has its prompt in its part
                keys = before if begin > before.start else range(0)
                self.parts.append((keys, range(begin, len(ids))))
        self.ids, self.positions = self.tensor([[ids], [positions]])
        self.states = self.tensor(states)

    @functools.cached_property
    def buckets(self):
        """Returns the buckets, each (B, prompt keys, new tokens); the indices of all their queries
        and keys; and the place of each token among the queries."""
        sizes = [(len(keys), len(new)) for keys, new in self.parts]
        buckets, queries, keys, place = [], [], [], [0] * self.ids.shape[1]
        slack = SLACK if self.device.type == "cpu" else SLACK_ON_GPUS
        for numbers in of_like_length(sizes, slack):
            buckets.append((len(numbers), *sizes[numbers[0]]))
            for before, new in map(self.parts.__getitem__, numbers):
                place[new.start : new.stop] = range(len(queries), len(queries) + len(new))
                padded = [*new, *[0] * (buckets[-1][2] - len(new))]
                queries += padded
                keys += [*before, *padded]
        return buckets, *map(self.tensor, (queries, keys, place))

    def mask(self, before, new, window, like):
        """Returns the mask that is added to a bucket's scores (new, before + new). All layers share
        it."""
        if (before, new, window) not in self.masks:
            pairs = like.new_ones(new, before + new, dtype=torch.bool)
            hidden = pairs.triu(before + 1)
            if window is not None:
                hidden |= pairs.tril(before - window)
            mask = like.new_zeros(pairs.shape).masked_fill_(hidden, -torch.inf)
            self.masks[before, new, window] = mask
        return self.masks[before, new, window]


def of_like_length(sizes, slack):
    """Groups the indices of `sizes`, which are (prompt keys, new tokens), into lists of similar
    length, the longest first. Padding to a list's first adds a quarter or `slack` pairs at most.

    >>> of_like_length([(0, 9), (9, 3), (9, 4), (0, 8)], slack=20)
    [[2, 1], [0, 3]]
    """
    lists, real = [], 0
    for number in sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True):
        before, new = sizes[number]
        if lists:
            real += new * (before + new)
            keys, long = sizes[lists[-1][0]]
            padding = (len(lists[-1]) + 1) * long * (keys + long) - real
        if not lists or before != keys or padding > max(slack, real / 4):
            lists.append([])
            real = new * (before + new)
        lists[-1].append(number)
    return lists


def packed_attention(
    module, query, key, value, _, *, packed, scaling=None, sliding_window=None, **options
):
    """A layer's attention as transformers calls it: (1, heads, L, D) -> (1, L, heads, D), None"""
    window = sliding_window
    packed.windows.add(window)
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))  # (L, heads, D)
    options = {name: options.get(name) for name in ("softcap", "s_aux")}  # Gemma 2; gpt-oss's sinks
    plain = set(map(type, options.values())) == {type(None)}
    buckets, queries, keys, place = packed.buckets
    query = query.index_select(0, queries).split([b * new for b, _, new in buckets])
    sizes = [b * (before + new) for b, before, new in buckets]
    key, value = (x.index_select(0, keys).split(sizes) for x in (key, value))
    out = []
    for (b, before, new), *qkv in zip(buckets, query, key, value, strict=True):
        q, k, v = (x.unflatten(0, (b, -1)).transpose(1, 2) for x in qkv)  # (B, heads, any, D)
        causal = plain and not before and (window is None or window >= new)
        mask = None if causal else packed.mask(before, new, window, q)
        if plain:
            # On GPUs grouped heads with a mask would select the slowest kernel
            k, v = (repeat_kv(x, q.shape[1] // x.shape[1]) for x in (k, v))
            found = scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=scaling)
            found = found.transpose(1, 2)
        else:  # the eager code of the model's file
            attend = sys.modules[type(module).__module__].eager_attention_forward
            found, _ = attend(module, q, k, v, mask[None, None], scaling=scaling, **options)
        out.append(found.flatten(0, 1))
    return torch.cat(out).index_select(0, place)[None], None


AttentionInterface.register(PACKED, packed_attention)


# --- Micro-batches: every rank plans the whole step, without communication ----------------
GROWTH = 1.02  # factor to the next budget tried; higher is faster to plan, less even


def sizes_of(prompts, completions, packs):
    """Returns the size of each sequence: (its tokens, the tokens that it adds to a batch that ends
    with the sequence before it). Sequences side by side run a shared prompt once. If the model does
    not pack, the second number is None, and a sequence is padded to the longest of its batch.

    >>> sizes_of([[1, 2], [1, 2], [3]], [[4], [5], [6]], packs=True)
    [(3, 3), (3, 1), (2, 2)]
    """
    sizes = []
    for last, prompt, completion in zip([None, *prompts], prompts, completions):
        alone = len(prompt) + len(completion)
        more = len(completion) if prompt == last else alone
        sizes.append((alone, more if packs else None))
    return sizes


def pack_by_tokens(sizes, budget):
    """Returns batches (lists of sequence numbers) of at most `budget` tokens; a longer sequence is
    alone. Packed sequences keep their order; others are sorted, the longest first.

    >>> pack_by_tokens([(8, 8), (7, 2), (5, 5)], budget=10)
    [[0, 1], [2]]
    >>> pack_by_tokens([(6, None), (7, None), (8, None)], budget=14)
    [[2], [1, 0]]
    """
    batches, tokens = [], 0
    for number in sorted(range(len(sizes)), key=lambda i: sizes[i][1] is None and -sizes[i][0]):
        alone, more = sizes[number]
        if more is None and batches:
            more = sizes[batches[-1][0]][0]  # as long as the batch's first
        if batches and tokens + more <= budget:
            batches[-1].append(number)
            tokens += more
        else:
            batches.append([number])
            tokens = alone
    return batches


def plan_micro_batches(sizes, world, budget):
    """Returns rounds; a round has one micro-batch (a list of sequence numbers) per rank.

    ZeRO-2 communicates in every backward, so all ranks need the same number of micro-batches, and
    in each round they wait for the largest. We therefore plan as few rounds as the budget allows,
    with micro-batches of equal size. In the last round a rank may get an empty list.

    >>> plan_micro_batches([(9, 9), (7, 7), (5, 5)], world=2, budget=9)
    [[[0], [1]], [[2], []]]
    """
    count = -(-len(pack_by_tokens(sizes, budget)) // world) * world
    least = sum(more or alone for alone, more in sizes)
    limit = min(budget, least / max(count, 1))
    while len(batches := pack_by_tokens(sizes, limit)) > count:
        limit = min(budget, GROWTH * limit)
    batches += [[]] * (-len(batches) % world)
    return [batches[i : i + world] for i in range(0, len(batches), world)]


def plan_rounds(samples, packs, rank, world, budget):
    """Returns this rank's (samples, is_filler) in each round of plan_micro_batches. All ranks join
    each round, so a rank without a micro-batch gets a filler."""
    sizes = sizes_of([s.group.prompt for s in samples], [s.ids for s in samples], packs)
    filler = min(samples, key=lambda s: len(s.ids))  # its loss is multiplied by 0
    plan = plan_micro_batches(sizes, world, budget)
    mine = [[samples[i] for i in batches[rank]] for batches in plan]
    return [(batch or [filler], not batch) for batch in mine]
