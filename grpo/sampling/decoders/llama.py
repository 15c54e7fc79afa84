"""LlamaDecoder: SharedDecoder with Llama's layers written out, in fewer operations and calls.

In a small batch a token's time goes by the number of operations, not their size. Here are half of
the calls and three quarters of the operations of transformers' layers; what that gains is in
benchmarks/results/sampling.md. There is one kind of block, that of Llama, Mistral, Qwen2 and Qwen3:
RMS norm (1910.07467), rotary attention (2104.09864), RMS norm, gated MLP (2002.05202), with a
residual around each half.

Symbols: S sequences, H hidden size, A query heads, K key-value heads, D width of a head.
"""

import torch
from torch.nn.functional import rms_norm

from grpo.devices import is_nvidia
from grpo.sampling.decoders.shared_prompt import SharedDecoder

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")


class LlamaDecoder(SharedDecoder):
    feature = "Llama layers of our own"

    def forward(self, tokens, slots):
        body = self.model.model
        hidden = body.embed_tokens(tokens)  # (S, H)
        cos, sin = body.rotary_emb(hidden, slots.positions[:, None])  # (S, 1, D)
        for block, layer in zip(body.layers, self.layers, strict=True):
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
            layer.write(key, value, slots)
            query = query.unflatten(1, (key.shape[1], -1))  # (S, K, A / K, D)
            out = layer.attention(query, slots, attention.scaling)
            hidden = hidden + attention.o_proj(out.flatten(1))
            mlp, normed = block.mlp, norm(block.post_attention_layernorm, hidden)
            gate = mlp.act_fn(mlp.gate_proj(normed))
            hidden = hidden + mlp.down_proj(gate.mul_(mlp.up_proj(normed)))
        return logits_of(self.model.lm_head, norm(body.norm, hidden))


def norm(module, x):
    return rms_norm(x, module.weight.shape, module.weight, module.variance_epsilon)


def rotated(x, cos, sin):
    """Returns x (S, A + K, D) with rotary positions, cos and sin (S, 1, D): with x = (x1, x2), its
    halves, (x1, x2) cos + (-x2, x1) sin."""
    half = x.shape[-1] // 2
    turned = torch.cat([-x[..., half:], x[..., :half]], -1)
    return torch.addcmul(x * cos, turned, sin)


def logits_of(head, hidden):
    """Returns logits (S, V'), on a GPU in float32 also for bfloat16 states: rounded to bfloat16, a
    logit of 20 is off by up to 0.06, and with it the log-prob that is trained on.
    (transformers' own layers give logits in the model's dtype.)"""
    exact = is_nvidia(hidden.device) and hidden.dtype != torch.float32
    if not exact or type(head) is not torch.nn.Linear:
        return head(hidden)
    logits = torch.bmm(hidden[None], head.weight.T[None], torch.float32)[0]
    return logits if head.bias is None else logits + head.bias
