"""One decoding step of Llama-like models, with less between the matrix products: for decode.py.

A step of a small batch is bound by the number of operations and calls, not by their size. Against
transformers' layers this has half of the calls and three quarters of the operations; what it brings
is in benchmarks/results/sampling.md. It knows one kind of block, that of Llama, Mistral, Qwen2 and
Qwen3: RMS norm, rotary attention, RMS norm, gated MLP, each on top of the residual. decode.py holds
it against the general way on the model itself, as all that it takes from a model's inside.

Symbols: S rows, H hidden size, A query heads, K key-value heads, D width of a head.
"""

import torch
from torch.nn.functional import rms_norm

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")


def knows(model):
    return getattr(model.config, "model_type", None) in MODEL_TYPES


def step(model, tokens, positions, layers):
    """-> logits (S, V') of one new token of each row; tokens and positions (S,), int64.

    `layers` keep the past: decode.SharedLayer, with `write` and `attend`.
    """
    body = model.model
    hidden = body.embed_tokens(tokens)  # (S, H)
    cos, sin = body.rotary_emb(hidden, positions[:, None])  # (S, 1, D)
    for block, past in zip(body.layers, layers, strict=True):
        attention = block.self_attn
        normed = norm(block.input_layernorm, hidden)
        query, key, value = (
            projection(normed).unflatten(-1, (-1, attention.head_dim))
            for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        if hasattr(attention, "q_norm"):  # Qwen3
            query, key = norm(attention.q_norm, query), norm(attention.k_norm, key)
        both = rotated(torch.cat([query, key], 1), cos, sin)
        query, key = both[:, : query.shape[1]], both[:, query.shape[1] :]
        past.write(key, value)
        query = query.unflatten(1, (key.shape[1], -1))  # (S, K, A / K, D)
        out = past.attend(query, attention.scaling)
        hidden = hidden + attention.o_proj(out.flatten(1))
        mlp, normed = block.mlp, norm(block.post_attention_layernorm, hidden)
        hidden = hidden + mlp.down_proj(mlp.act_fn(mlp.gate_proj(normed)).mul_(mlp.up_proj(normed)))
    return logits_of(model.lm_head, norm(body.norm, hidden))


def logits_of(head, hidden):
    """Returns logits (S, V'), on a GPU in float32 also for bfloat16 states: rounded to bfloat16, a
    logit of 20 is off by up to 0.06, and the log-probs that are trained on are of what is drawn.
    (Models that this file does not know give their logits as they like.)"""
    if not hidden.is_cuda or hidden.dtype == torch.float32 or type(head) is not torch.nn.Linear:
        return head(hidden)
    logits = torch.bmm(hidden[None], head.weight.T[None], torch.float32)[0]
    return logits if head.bias is None else logits + head.bias


def norm(module, x):
    return rms_norm(x, module.weight.shape, module.weight, module.variance_epsilon)


def rotated(x, cos, sin):
    """Rotary positions: x (S, A + K, D) by cos, sin (S, 1, D)."""
    half = x.shape[-1] // 2
    turned = torch.cat([-x[..., half:], x[..., :half]], -1)
    return torch.addcmul(x * cos, turned, sin)
