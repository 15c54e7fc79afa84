"""A tiny random model of every family, and its log-probs, plainly computed."""

import itertools

import torch
import transformers
from transformers import AutoModelForCausalLM

from grpo.models import has_softcap
from grpo.prepare import decoder_of
from grpo.sampler import sample_groups

VOCAB = 110  # ids of the tokenizer; the models embed 120, as real ones pad their embedding
# Float32, cached and batched against plain; measured over families and seeds: 2.4e-6.
TOLERANCE = 1e-5
PROMPTS = [[7], [3, 99, 4, 11, 5], [9, 8, 7, 6, 5, 4, 3, 2, 1], [5, 6, 0]]  # 0 is also the filler
EOS = set(range(10, 26))  # many, so that rows end at different tokens

SHAPE = {
    "vocab_size": 120,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
LLAMA = SHAPE | {"intermediate_size": 64, "num_key_value_heads": 2}
GEMMA = LLAMA | {"head_dim": 8}
GPT = {"vocab_size": 120, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
MAMBA = {"vocab_size": 120, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}
FAMILIES = {  # name: config class and sizes; windows slide within the prompts and the completions
    "qwen2": ("Qwen2Config", LLAMA),
    "llama": ("LlamaConfig", LLAMA),
    "qwen3": ("Qwen3Config", GEMMA),
    "gemma": ("GemmaConfig", GEMMA),
    "gemma2": ("Gemma2Config", GEMMA | {"sliding_window": 4}),
    "gemma3": ("Gemma3TextConfig", GEMMA | {"sliding_window": 4}),
    "gpt2": ("GPT2Config", GPT),
    "mistral": ("MistralConfig", LLAMA | {"sliding_window": 4}),
    "opt": ("OPTConfig", SHAPE | {"ffn_dim": 64, "word_embed_proj_dim": 32}),
    "bloom": ("BloomConfig", {"vocab_size": 120, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "mixtral": ("MixtralConfig", LLAMA | {"num_local_experts": 4}),
    "mamba": ("MambaConfig", MAMBA),
    "gpt1": ("OpenAIGPTConfig", GPT),
    "lfm2": ("Lfm2Config", LLAMA | {"layer_types": ["conv", "full_attention"]}),
}
CAPPED = {"attn_logit_softcapping": 2.0}  # hard
WIDE = {  # the same with windows wider than any text here
    "gemma2 wide": ("Gemma2Config", GEMMA | CAPPED | {"sliding_window": 64}),
    "gemma3 wide": ("Gemma3TextConfig", GEMMA | {"sliding_window": 64}),
    "mistral wide": ("MistralConfig", LLAMA | {"sliding_window": 64}),
}
MIXTURE = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8}
DEEPSEEK = SHAPE | MIXTURE | LATENT | {"v_head_dim": 8, "moe_intermediate_size": 16}
SINKS = GEMMA | {"num_local_experts": 4, "layer_types": ["full_attention"] * 2}
OTHERS = {  # a cache of its own format; attention with sinks
    "deepseek v3": ("DeepseekV3Config", DEEPSEEK),
    "gpt-oss": ("GptOssConfig", SINKS),
}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}  # rope_parameters of Llama
SLOW = {"mamba", "gpt1", "lfm2"}  # their past is not (only) a key-value cache


def tiny_model(family, seed=0, **changes):
    """-> a random model in eval mode whose next-token distribution is far from flat."""
    name, sizes, *_ = (OTHERS | FAMILIES | WIDE)[family]
    sizes = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0} | sizes | changes
    torch.manual_seed(seed)
    config = getattr(transformers, name)(**sizes)
    how = {"attn_implementation": "eager"} if has_softcap(config) else {}  # as load_model
    model = AutoModelForCausalLM.from_config(config, **how)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.15 * torch.randn_like(parameter))
    return model.eval()


def plain_logps(model, prompt, completion, temperature):
    """-> log-probs of the completion's tokens from one forward of the one row, float32 (T,)."""
    ids = torch.tensor([prompt + completion])
    logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
    log_probs = torch.log_softmax(logits[:, :VOCAB].float() / temperature, dim=-1)
    return log_probs[torch.arange(len(completion)), torch.tensor(completion)]


def settings_for(model, seed=0, **changes):
    """-> what stream_groups and sample_groups take beside the prompts."""
    settings = {"group_size": 3, "max_new_tokens": 12, "temperature": 1.0, "eos_ids": EOS}
    settings |= {"vocab_size": VOCAB, "generator": torch.Generator().manual_seed(seed)}
    return settings | {"decoder": decoder_of(model)} | changes


def sample(model, prompts, seed=0, **changes):
    return sample_groups(model, prompts, **settings_for(model, seed, **changes))


def assert_well_formed(groups, prompts=4, group_size=3, max_new_tokens=12, eos_ids=EOS):
    assert [len(group) for group in groups] == [group_size] * prompts
    for c in itertools.chain(*groups):
        assert 1 <= len(c.ids) == len(c.logps) <= max_new_tokens
        assert all(0 <= i < VOCAB for i in c.ids)
        assert not eos_ids & set(c.ids[:-1])  # nothing follows EOS
        assert c.truncated == (c.ids[-1] not in eos_ids)
        assert len(c.ids) == max_new_tokens or not c.truncated


@torch.no_grad()
def assert_plain_logps(model, prompts, groups, temperature=1.0, tolerance=TOLERANCE):
    """The completions' log-probs are those of a plain forward of each."""
    for prompt, group in zip(prompts, groups, strict=True):
        for c in group:
            gap = torch.tensor(c.logps) - plain_logps(model, prompt, c.ids, temperature)
            assert gap.abs().max() < tolerance


class Shapes:
    """The shapes of the ids that a model is given."""

    def __init__(self, model):
        self.model, self.seen = model, []

    def __enter__(self):
        self.hook = self.model.register_forward_pre_hook(
            lambda module, args, kwargs: self.seen.append(tuple(kwargs["input_ids"].shape)),
            with_kwargs=True,
        )
        return self.seen

    def __exit__(self, *_):
        self.hook.remove()


MANY = [[3 + i] * n for i, n in enumerate([1, 9, 4, 2, 12, 1, 7, 3, 5])]  # of different lengths
