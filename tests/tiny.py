"""The tiny model in Hugging Face format that most tests load."""

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from grpo.commands.tiny_model import make_tokenizer
from tasks import arithmetic


def make_tiny(folder, max_tokens=256):
    """-> the folder, with a random Qwen2 of 32 000 parameters, float32, and a byte-level tokenizer
    with ChatML as its template; the embedding has more rows (416) than the tokenizer has ids."""
    tokenizer = make_tokenizer(arithmetic)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=416,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=max_tokens,
        initializer_range=0.3,  # so that its distributions are far from uniform
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
