"""SharedDecoder: a prompt's keys and values are kept, and attended to, once for its whole group.

The G sequences of a group attend to their prompt in one matrix product, and their completions
are written in place (transformers' cache copies everything for each token). New prompts may join a
running batch. It needs a model whose attention goes through transformers' attention interface.

Symbols: B prompts, G sequences of each, S sequences in all, P prompt tokens, K key-value heads,
R query heads for each of them, D width of a head, C tokens that a sequence has room for.
"""

from dataclasses import dataclass
from itertools import groupby

import torch
from torch.nn.functional import pad
from transformers import AttentionInterface
from transformers.cache_utils import Cache, DynamicLayer

from grpo.attention import attention_is
from grpo.cached import repeated
from grpo.decode_attention import attend, mask_of
from grpo.models import last_logits, prefill

ROOM = 64  # C at first; doubled when it is full
SHARED = "grpo_split_shared_prompts"  # the name of shared_attention among transformers' attentions


# --- Where everything is ------------------------------------------------------------
@dataclass(frozen=True, eq=False)  # compared by identity
class Layout:
    """Which prompt each sequence continues; made anew when sequences join or leave.

    Row b of the grid (B, Gm) has the sequences of prompt b; Gm is the size of the largest group.
    """

    start: torch.Tensor  # (S,) position of the first token: how many its prompt has
    grid: tuple[int, int]
    place: torch.Tensor | None  # (S,) in the flattened grid; None where that is 0, 1, 2, ...
    padding: torch.Tensor | None  # (B, 1, 1, P) added to scores; None where no prompt is padded

    def to_grid(self, x):
        """Returns (S, K, R, D) as (B, K, Gm * R, D); places without a sequence hold zeros."""
        if self.place is not None:
            x = x.new_zeros(self.grid[0] * self.grid[1], *x.shape[1:]).index_copy_(0, self.place, x)
        return x.unflatten(0, self.grid).transpose(1, 2).flatten(2, 3)

    def from_grid(self, x):
        """Returns (B, K, Gm * R, D) as (S, K, R, D)."""
        x = x.unflatten(2, (self.grid[1], -1)).transpose(1, 2).flatten(0, 1)
        return x if self.place is None else x[self.place]


@dataclass(frozen=True)
class Slots:
    """Where each sequence's next token goes in the cache, and what it attends to."""

    layout: Layout
    positions: torch.Tensor  # (S,)
    where: tuple  # index of what is written, into (S, K, C, D)
    seen: int  # of the C columns
    unwritten: torch.Tensor | None  # (S, 1, 1, seen) added to scores; None where all is written


# --- The cache ----------------------------------------------------------------------
class SharedLayer(DynamicLayer):
    """A layer's keys and values: of prompts, (B, K, P, D), and of sequences, (S, K, C, D)."""

    def __init__(self):
        super().__init__()
        self.is_initialized, self.prompts, self.sequences = True, [None, None], [None, None]

    def admit(self, layer, count, room):
        """Adds the prompts in a layer of transformers' cache, and room for their sequences."""
        for i, new in enumerate((layer.keys, layer.values)):
            rows = new.new_zeros(count, new.shape[1], room, new.shape[3])
            if self.sequences[i] is not None:
                rows, both = torch.cat([self.sequences[i], rows]), (self.prompts[i], new)
                width = max(x.shape[2] for x in both)
                new = torch.cat([pad(x, (0, 0, width - x.shape[2], 0)) for x in both])
            self.prompts[i], self.sequences[i] = new, rows

    def keep(self, indices, prompts):
        """Drops all but the sequences `indices`, and all but `prompts` unless that is None."""
        self.sequences = [x[indices] for x in self.sequences]
        if prompts is not None:
            self.prompts = [x[prompts] for x in self.prompts]

    def write(self, keys, values, slots):
        """Writes the next token's keys and values, (S, K, D)."""
        self.sequences[0][slots.where], self.sequences[1][slots.where] = keys, values

    def attention(self, query, slots, scaling, softcap):
        """Returns the attention (S, K, R, D) of the next tokens' queries (S, K, R, D).

        The softmax over prompt and completion is the mean of each part's attention, weighted by its
        sum of exponentials (FlashAttention, arXiv 2205.14135): so the prompt's part is one matrix
        product for all sequences of a group, (G * R, D) x (D, P).
        """
        layout, (keys, values) = slots.layout, (x[:, :, : slots.seen] for x in self.sequences)
        alone, alone_log = attend(query, keys, values, slots.unwritten, scaling, softcap)
        grid = layout.to_grid(query)
        shared, log = attend(grid, *self.prompts, layout.padding, scaling, softcap)
        shared, log = layout.from_grid(shared), layout.from_grid(log[..., None])
        weight = torch.sigmoid(log - alone_log[..., None])  # exp(log) / (exp(log) + exp(alone_log))
        return torch.lerp(alone.to(weight.dtype), shared.to(weight.dtype), weight).to(alone.dtype)


class SharedCache(Cache):
    """The layers as the cache of a transformers model, for one token of each sequence."""

    def __init__(self, layers, slots):
        super().__init__(layers=layers)
        self.slots = slots

    def get_seq_length(self, layer_idx=0):
        return self.layers[0].prompts[0].shape[2] + self.slots.seen - 1

    def update(self, keys, values, layer_idx, *args, **kwargs):
        """Takes the next token's keys and values, (S, K, 1, D)."""
        self.layers[layer_idx].write(keys[:, :, 0], values[:, :, 0], self.slots)
        # transformers gives its attention functions the keys, but no cache: the keys carry it. If a
        # model makes other keys of them, shared_attention refuses it, and decoder.py finds that out
        keys.shared = self.layers[layer_idx], self.slots
        return keys, values


def shared_attention(
    module, query, key, value, attention_mask, scaling=None, softcap=None, s_aux=None, **_
):
    """SharedLayer.attention for transformers' layers: (S, K * R, 1, D) -> (S, 1, K * R, D), None"""
    if s_aux is not None:
        raise NotImplementedError("its attention has sinks")
    if not hasattr(key, "shared"):  # the layer computes its keys from what it has cached
        raise NotImplementedError("its attention keeps its own cache format")
    layer, slots = key.shared
    size, heads, _, width = query.shape
    query = query.view(size, key.shape[1], -1, width)
    scaling = width**-0.5 if scaling is None else scaling
    out = layer.attention(query, slots, scaling, softcap)
    return out.reshape(size, 1, heads, -1), None


AttentionInterface.register(SHARED, shared_attention)


# --- The decoder --------------------------------------------------------------------
class SharedDecoder:
    feature = "shared prompts"
    joins, compaction = True, 8

    def __init__(self, model, max_new_tokens):
        self.model, self.limit, self.room = model, max_new_tokens, min(max_new_tokens, ROOM)
        self.layers, self.layout = None, None
        self.prompt_lengths, self.prompt_of = [], []  # (B,) in tokens; (S,) each sequence's prompt
        self.lengths, self.columns = [], None  # (S,) tokens so far; the same on the device

    def admit(self, prompts, sizes):
        logits, cache, _ = prefill(self.model, prompts)
        self.layers = self.layers or [SharedLayer() for _ in cache.layers]
        for layer, new in zip(self.layers, cache.layers, strict=True):
            layer.admit(new, sum(sizes), self.room)
        for prompt, size in zip(prompts, sizes, strict=True):
            self.prompt_of += [len(self.prompt_lengths)] * size
            self.prompt_lengths.append(len(prompt))
            self.lengths += [0] * size
        self._arrange()
        return repeated(logits, sizes)

    def keep(self, indices):
        """Drops all but these sequences, and prompts that none of them continues."""
        index = indices.tolist()
        left = sorted({self.prompt_of[i] for i in index})
        fewer = len(left) < len(self.prompt_lengths)
        prompts = torch.tensor(left, device=indices.device) if fewer else None
        for layer in self.layers:
            layer.keep(indices, prompts)
        self.prompt_lengths = [self.prompt_lengths[prompt] for prompt in left]
        self.prompt_of = [left.index(self.prompt_of[i]) for i in index]
        self.lengths = [self.lengths[i] for i in index]
        self._arrange()

    def _arrange(self):
        like = self.layers[0].prompts[0]
        prompts, device, width = len(like), like.device, like.shape[2]
        ranks = [rank for _, run in groupby(self.prompt_of) for rank, _ in enumerate(run)]
        largest = 1 + max(ranks)
        place = [prompt * largest + rank for prompt, rank in zip(self.prompt_of, ranks)]
        full = place == list(range(prompts * largest))
        padding = None
        if min(self.prompt_lengths) < width:
            first = torch.tensor([[[[width - n]]] for n in self.prompt_lengths], device=device)
            padding = mask_of(torch.arange(width, device=device) < first, like)
        start = [self.prompt_lengths[prompt] for prompt in self.prompt_of]
        self.layout = Layout(
            start=torch.tensor(start, device=device),
            grid=(prompts, largest),
            place=None if full else torch.tensor(place, device=device),
            padding=padding,
        )
        self.columns = torch.tensor(self.lengths, device=device)

    def next_logits(self, tokens):
        self.make_room()
        longest = max(self.lengths)
        if min(self.lengths) == longest:  # a slice is written faster, and needs no mask
            positions, where = self.layout.start + self.columns, (..., longest, slice(None))
            slots = Slots(self.layout, positions, where, longest + 1, None)
        else:
            slots = self.slots_for(self.columns, longest + 1)
        logits = self.forward(tokens, slots)
        self.advance()
        return logits

    def slots_for(self, columns, seen):
        """Returns the Slots of tokens that go to `columns` (S,), each of them below `seen`."""
        layout, like = self.layout, self.layers[0].sequences[0]
        after = torch.arange(seen, device=columns.device) > columns[:, None, None, None]
        where = torch.arange(len(columns), device=columns.device), slice(None), columns
        return Slots(layout, layout.start + columns, where, seen, mask_of(after, like))

    def forward(self, tokens, slots):
        """Returns logits (S, V') after one more token of each sequence, which takes its slot."""
        with attention_is(SHARED, self.model.config):
            cache = SharedCache(self.layers, slots)
            return last_logits(self.model, tokens[:, None], slots.positions[:, None], cache)

    def make_room(self):
        """Doubles the room if it is full: on average a token is copied less than once."""
        if max(self.lengths) == self.room:
            self.room = min(self.limit, 2 * self.room)
            for layer in self.layers:
                new = self.room - layer.sequences[0].shape[2]
                layer.sequences = [pad(x, (0, 0, 0, new)) for x in layer.sequences]

    def advance(self):
        # A sequence that has ended may stay for a while, unread, and must not outgrow its room
        self.lengths = [min(n + 1, self.limit - 1) for n in self.lengths]
        # Computed on the device: to copy the list would take a wait for each token
        self.columns = (self.columns + 1).clamp_(max=self.limit - 1)
