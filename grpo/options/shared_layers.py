"""Models with other layers than Llama's: SharedDecoder shares prompts within transformers' layers.

It needs a model whose attention goes through transformers' attention interface. S, K, R and D are
those of shared_prompt.py.
"""

from transformers import AttentionInterface
from transformers.cache_utils import Cache

from grpo.attention import attention_is
from grpo.models import last_logits
from grpo.options.any_attention import attend_any
from grpo.shared_prompt import GroupDecoder

SHARED = "grpo_split_shared_prompts"  # the name of shared_attention among transformers' attentions


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
    out = layer.attention(query, slots, scaling, softcap=softcap)
    return out.reshape(size, 1, heads, -1), None


AttentionInterface.register(SHARED, shared_attention)


class SharedDecoder(GroupDecoder):
    feature = "shared prompts"

    def __init__(self, model, max_new_tokens):
        super().__init__(model, max_new_tokens)
        self.attend = attend_any

    def forward(self, tokens, slots):
        """Returns logits (S, V') after one more token of each sequence, which takes its slot."""
        with attention_is(SHARED, self.model.config):
            cache = SharedCache(self.layers, slots)
            return last_logits(self.model, tokens[:, None], slots.positions[:, None], cache)
