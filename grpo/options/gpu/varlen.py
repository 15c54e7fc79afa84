"""NVIDIA's GPUs in bfloat16: one kernel, torch's varlen_attn, runs all parts of a packed row,
without padding or mask."""

import functools
import inspect
import itertools

import torch

from grpo.attention import Row, packed_attention


class VarlenRow(Row):
    @functools.cached_property
    def ends(self):
        """Returns the indices of all parts' keys, and the ends and lengths for varlen_attn."""
        sizes = [*zip(*((len(own), len(keys) + len(own)) for keys, own in self.parts))]
        ends = self.tensor([[0, *itertools.accumulate(x)] for x in sizes], torch.int32)
        keys = [i for before, own in self.parts for i in (*before, *own)]
        return self.tensor(keys), (*ends, *map(max, sizes))

    def kernel(self, query, key, value, window, **settings):
        """Returns the attention (L, heads, D) of queries, keys and values (L, heads, D)."""
        # torch 2.14 may run cuDNN's kernel here, whatever own_device has set (pytorch #193630)
        from torch.nn.attention.varlen import varlen_attn

        keys, ends = self.ends
        key, value = key.index_select(0, keys), value.index_select(0, keys)
        # FlashAttention aligns a causal mask to the end of the keys
        settings["window_size"] = -1 if window is None else window - 1, 0
        if "enable_gqa" not in inspect.signature(varlen_attn).parameters:  # torch 2.11
            del settings["enable_gqa"]  # its kernel takes grouped heads without asking
        return varlen_attn(query.contiguous(), key, value, *ends, **settings)

    def trial(self, like):
        """Returns pairs (from the kernel, from buckets) of the attention and of its gradients on
        200 keys, beyond one tile of the kernel; in the form that the layers have `reported`."""
        prompts, completions = [[1] * 90] * 3 + [[2] * 3], [[1] * 112, [1], [1] * 71, [1] * 40]
        rows = [kind(prompts, completions, like.device) for kind in (VarlenRow, Row)]
        draw, pairs = torch.Generator().manual_seed(0), []
        for window, *shapes in self.reported:
            shapes = [(1, heads, rows[0].ids.shape[1], width) for heads, width in shapes]
            qkv = [torch.randn(x, generator=draw).to(like).requires_grad_() for x in shapes]
            found, options = [], {"sliding_window": window and min(window, 64)}
            with torch.enable_grad():
                for row in rows:
                    out, _ = packed_attention(None, *qkv, None, packed=row, **options)
                    found.append((out, *torch.autograd.grad(out.square().sum(), qkv)))
            pairs += zip(*found, strict=True)
        return pairs
