"""Next-token logits for sampler.py: ways to remember the past of a batch of rows.

    decoder = make_decoder(model, max_new_tokens)
    logits = decoder.admit(prompts, group_size)   # (B * G, V'): each prompt has run once
    logits = decoder.step(tokens)                 # (S, V'), one token for each row
    decoder.keep(rows)                            # only these rows go on

`SharedDecoder` is the fast one. A prompt's keys and values are kept once for its group, not G
times, and its G rows attend to them in one matrix product; what a row adds is written in place
(transformers' own cache copies all of it for each token). New prompts may join running rows. Any
architecture whose attention goes through transformers' attention interface can have it: it is
tried on the model first, and held against `CachedDecoder`, which needs a key-value cache alone.
`LlamaDecoder` is the same with a step of our own, tried likewise (llama_step.py), and on a GPU its
step is recorded and replayed (cuda_graph.py). `PlainDecoder` runs each row from its start, for
models whose past is no such cache.

Symbols: B prompts, G completions of each, S rows in the batch, P prompt tokens, T completion tokens
so far, K key-value heads, R query heads for each of them, D width of a head.
"""

import contextlib
import weakref

import torch
from transformers import AttentionInterface
from transformers.cache_utils import Cache, DynamicLayer

from grpo.sampling.decoders import llama as llama_step
from grpo.sampling.decoders.cached import on_top, prefill, run

ROOM = 64  # tokens that a row has room for at first; doubled when they are full
SHARED = "grpo_split_shared_prompts"  # the name of shared_attention among transformers' attentions


# --- Shared prompts -----------------------------------------------------------------
class SharedLayer(DynamicLayer):
    """One layer's past: the prompts' keys and values, (B, K, P, D), and the rows' own, (S, K, C, D)
    with room for C tokens. `rows` is the SharedDecoder, which knows what belongs to whom."""

    def __init__(self, rows):
        super().__init__()
        self.rows, self.is_initialized = weakref.proxy(rows), True  # or it would stay in memory
        self.prompt_keys = self.prompt_values = None

    def get_seq_length(self):
        return self.rows.width + self.rows.longest

    def update(self, keys, values, *args, **kwargs):
        """Takes the new token's keys and values, (S, K, 1, D)."""
        self.write(keys[:, :, 0], values[:, :, 0])
        keys.past = self  # shared_attention finds it there
        return keys, values

    def write(self, keys, values):
        """Writes the new token's keys and values, (S, K, D), where each row has its next."""
        rows = self.rows
        if rows.even:
            self.keys[:, :, rows.longest], self.values[:, :, rows.longest] = keys, values
        else:
            self.keys[rows.number, :, rows.at], self.values[rows.number, :, rows.at] = keys, values

    def attend(self, query, scaling, softcap=None):
        """-> (S, K, R, D), attention of one new token of each row to its prompt and to its own.

        Softmax over both parts at once is the mean of each part's own attention, weighted by the
        parts' sums of exponentials (as in FlashAttention, arXiv 2205.14135): so the prompt's part
        is a matrix product over all rows of a group, (G * R, D) x (D, P). `query` (S, K, R, D).
        """
        rows, settings = self.rows, (scaling, softcap)
        keys, values = (x[:, :, : rows.seen] for x in (self.keys, self.values))
        own, own_log = attend(query, keys, values, rows.unwritten, *settings)
        past = self.prompt_keys, self.prompt_values, rows.prompt_padding
        shared, log = attend(rows.to_grid(query), *past, *settings)
        weight = torch.sigmoid(rows.from_grid(log[..., None]) - own_log[..., None])
        shared, dtype = rows.from_grid(shared), own.dtype
        return torch.lerp(own.to(weight.dtype), shared.to(weight.dtype), weight).to(dtype)


def attend(query, keys, values, mask, scaling, softcap):
    """-> attention of (B, K, Q, D) to (B, K, C, D), and the log of the sums of exponentials
    (B, K, Q). `mask` is None or added to the scores."""
    if query.device.type == "cpu" and softcap is None and query.shape[-1] == values.shape[-1]:
        # What scaled_dot_product_attention calls there; it alone gives the sums of exponentials too
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return flash(query.contiguous(), keys, values, attn_mask=mask, scale=scaling)
    # A score of 30, rounded to bfloat16, is off by 0.1: float32, as in PyTorch's kernels
    if query.device.type == "cuda" and query.dtype != torch.float32:
        flat = query.flatten(0, 1), keys.flatten(0, 1).transpose(1, 2)
        scores = torch.bmm(*flat, torch.float32).unflatten(0, query.shape[:2])
    else:
        scores = (query @ keys.transpose(-1, -2)).float()
    scores *= scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores += mask
    top = scores.amax(-1, keepdim=True)
    exps = scores.sub_(top).exp_()
    sums = exps.sum(-1, keepdim=True)
    return (exps / sums).to(values.dtype) @ values, (top + sums.log()).squeeze(-1)


def shared_attention(
    module, query, key, value, attention_mask, scaling=None, softcap=None, s_aux=None, **_
):
    """SharedLayer.attend, for transformers' layers. (S, K * R, 1, D) -> (S, 1, K * R, D), None"""
    if s_aux is not None:
        raise NotImplementedError("attention sinks")
    size, heads, _, width = query.shape
    query = query.view(size, key.shape[1], -1, width)
    out = key.past.attend(query, width**-0.5 if scaling is None else scaling, softcap)
    return out.reshape(size, 1, heads, -1), None


AttentionInterface.register(SHARED, shared_attention)


class SharedDecoder:
    """See the top of the file. A row's place in the grid (B, Gm) says whose prompt is its own."""

    joins = True  # admit() may be called while rows are running
    bunch = 8  # rows that ended are worth a keep() when they are this fraction of the batch

    def __init__(self, model, max_new_tokens):
        self.model, self.limit = model, max_new_tokens
        self.layers = None
        self.prompt, self.lengths = [], []  # of each row: its prompt's number, its tokens so far
        self.width = 0  # P
        self.mask = self.prompt_tokens = None  # (B, P); (B,)

    def admit(self, prompts, group_size):
        """Runs the prompts, and adds G rows for each after the others. -> their logits."""
        logits, cache, mask, tokens = prefill(self.model, prompts)
        if self.layers is None:
            self.layers = [SharedLayer(self) for _ in cache.layers]
            self.mask, self.prompt_tokens = mask[:0], tokens[:0]
        count, more = len(self.mask), len(prompts) * group_size
        room = self.layers[0].keys.shape[2] if self.lengths else min(self.limit, ROOM)
        for layer, new in zip(self.layers, cache.layers, strict=True):
            layer.prompt_keys = on_top(layer.prompt_keys, new.keys, dim=2)
            layer.prompt_values = on_top(layer.prompt_values, new.values, dim=2)
            for name in ("keys", "values"):
                like = getattr(new, name)
                own = like.new_zeros(more, like.shape[1], room, like.shape[3])
                setattr(
                    layer, name, torch.cat([getattr(layer, name), own]) if self.lengths else own
                )
        self.mask = on_top(self.mask, mask, dim=1)
        self.width = self.mask.shape[1]
        self.prompt_tokens = torch.cat([self.prompt_tokens, tokens])
        self.prompt += [count + i for i in range(len(prompts)) for _ in range(group_size)]
        self.lengths += [0] * more
        self._arrange()
        return logits.repeat_interleave(group_size, 0)

    def keep(self, rows):
        """Copies what the rows need; prompts without rows are forgotten."""
        index = rows.tolist()
        self.lengths = [self.lengths[i] for i in index]
        prompts = sorted({self.prompt[i] for i in index})
        renumbered = {old: new for new, old in enumerate(prompts)}
        gone = len(prompts) < len(self.mask)
        self.prompt = [renumbered[self.prompt[i]] for i in index]
        if gone:
            left = torch.tensor(prompts, device=rows.device)
            self.mask, self.prompt_tokens = self.mask[left], self.prompt_tokens[left]
        for layer in self.layers:
            layer.keys, layer.values = layer.keys[rows], layer.values[rows]
            if gone:
                layer.prompt_keys = layer.prompt_keys[left]
                layer.prompt_values = layer.prompt_values[left]
        self._arrange()

    def step(self, tokens):
        if self.longest == self.layers[0].keys.shape[2]:
            self._widen()
        logits = self._next(tokens)
        # A row that has ended may go on for a while, unread, and stays within its room
        self.lengths = [min(n + 1, self.limit - 1) for n in self.lengths]
        self.at = (self.at + 1).clamp_(max=self.limit - 1)  # a copy of the list would be waited for
        self._count()
        return logits

    def _widen(self):
        """Doubles the rows' room: each token is copied once or twice in all."""
        for layer in self.layers:
            room = min(self.limit, 2 * self.longest) - self.longest
            for name in ("keys", "values"):
                old = getattr(layer, name)
                new = old.new_zeros(*old.shape[:2], room, old.shape[3])
                setattr(layer, name, torch.cat([old, new], 2))

    def _next(self, tokens):
        self.seen, self.unwritten = self.longest + 1, None
        if not self.even:
            columns = torch.arange(self.seen, device=tokens.device)
            self.unwritten = self._hidden(columns > self.at[:, None, None, None])
        return self._run(tokens, self.first + self.at)

    def _run(self, tokens, positions):
        cache = Cache(layers=self.layers)
        with attention(self.model, SHARED):
            return run(self.model, tokens[:, None], positions=positions[:, None], cache=cache)

    def _hidden(self, where):
        """-> what is added to scores, so that what is True is not seen."""
        zeros = self.layers[0].keys.new_zeros(where.shape)
        return zeros.masked_fill_(where, -torch.inf)

    def _arrange(self):
        """Works out where the rows stand in the grid of prompts."""
        device, count = self.mask.device, len(self.mask)
        seen, places = [0] * count, []
        for prompt in self.prompt:
            places.append(seen[prompt])
            seen[prompt] += 1
        self.grid = (count, max(seen))
        places = [p * self.grid[1] + at for p, at in zip(self.prompt, places, strict=True)]
        full = places == list(range(count * self.grid[1]))
        self.place = None if full else torch.tensor(places, device=device)
        self.number = torch.arange(len(places), device=device)
        self.first = self.prompt_tokens[torch.tensor(self.prompt, device=device)]
        padded = not bool(self.mask.all())
        self.prompt_padding = self._hidden(~self.mask[:, None, None]) if padded else None
        self.at = torch.tensor(self.lengths, device=device)
        self._count()

    def _count(self):
        self.longest = max(self.lengths)
        self.even = min(self.lengths) == self.longest

    def to_grid(self, x):
        """(S, K, R, D) -> (B, K, Gm * R, D); places without a row hold zeros."""
        if self.place is not None:
            x = x.new_zeros(self.grid[0] * self.grid[1], *x.shape[1:]).index_copy_(0, self.place, x)
        return x.unflatten(0, self.grid).transpose(1, 2).flatten(2, 3)

    def from_grid(self, x):
        """(B, K, Gm * R, D) -> (S, K, R, D)"""
        x = x.unflatten(2, (self.grid[1], -1)).transpose(1, 2).flatten(0, 1)
        return x if self.place is None else x[self.place]


class LlamaDecoder(SharedDecoder):
    """The same with a step of our own, for the architectures that llama_step.py knows."""

    def _run(self, tokens, positions):
        return llama_step.step(self.model, tokens, positions, self.layers)


@contextlib.contextmanager
def attention(model, name):
    """The model's attention is the one of that name, for a while."""
    config = model.config
    before = config._attn_implementation
    config._attn_implementation = name
    try:
        yield
    finally:
        config._attn_implementation = before
