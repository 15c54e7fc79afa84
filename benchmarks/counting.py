"""A task and a model for it, whose completions count, <c0><c1><c2>..., and stop after LOW to HIGH
tokens, all lengths equally likely: realistic work for samplers and trainers without a download.

    python grpo_ref_split.py TASK=benchmarks/counting.py MODEL=...    # a folder from make_model

The model is a Qwen2 of 1M parameters. Its weights make the next token depend on the last one alone,
so the model itself ends its completions, and every engine samples the same lengths.
"""

import os

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

LOW, HIGH = 64, 256  # tokens of a completion, EOS included
WORDS = 400
SHARP, EOS_SHARP = 20.0, 60.0  # logits
SPECIALS = ["<pad>", "<eos>", "<go>"]
FIRST_WORD = len(SPECIALS) + 256  # after the bytes
FIRST_COUNT = FIRST_WORD + WORDS
SHAPE = {  # 1.05M parameters
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1024,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}


def make_tokenizer():
    """-> a byte-level tokenizer, as Qwen2's, whose words are tokens added to it: <w0> ... of
    prompts, <c0> ... of counts. A prompt is a chat of one message, as it stands."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=FIRST_WORD, special_tokens=SPECIALS, initial_alphabet=alphabet
    )
    bpe.train_from_iterator([], trainer)
    bpe.add_tokens([f"<w{i}>" for i in range(WORDS)] + [f"<c{i}>" for i in range(HIGH)])
    assert bpe.token_to_id("<w0>") == FIRST_WORD and bpe.token_to_id("<c0>") == FIRST_COUNT
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )
    tokenizer.chat_template = "{{ messages[0].content }}"
    return tokenizer


def prompt(length, draw):
    """-> the text of a prompt of `length` tokens: random words, then <go>."""
    words = torch.randint(WORDS, (length - 1,), generator=draw).tolist()
    return "".join([f"<w{i}>" for i in words] + ["<go>"])


def make_model(folder):
    """Saves the counting model of SHAPE, float32, and its tokenizer."""
    build(SHAPE).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)


def build(shape):
    """-> a counting model of this shape (Qwen2Config's names), float32 on the CPU.

    Embeddings are unit vectors (a, b): a token's head is along the b of the token before it, with
    logit SHARP, EOS's along a. The blocks add little noise to them.
    """
    eos, first = SPECIALS.index("<eos>"), FIRST_COUNT
    torch.manual_seed(0)
    config = Qwen2Config(**shape, eos_token_id=eos, pad_token_id=0, bos_token_id=None)
    model = Qwen2ForCausalLM(config)
    width = config.hidden_size
    b = torch.nn.functional.normalize(torch.randn(config.vocab_size, width - 1), dim=1)
    # After c_i, token number i + 1 of the completion, EOS would be number n = i + 2
    n = torch.arange(HIGH) + 2.0
    odds = torch.full_like(n, -30.0)  # log-odds of ending, for lengths that are uniform
    odds[n >= LOW] = -((HIGH - n[n >= LOW]).clamp(min=0) + 1e-3).log()
    a = torch.full((config.vocab_size,), -0.3)
    for _ in range(100):  # EOS_SHARP a = SHARP sqrt(1 - a^2) + odds, for a
        a[first : first + HIGH] = (SHARP * (1 - a[first : first + HIGH] ** 2).sqrt() + odds) / (
            EOS_SHARP
        )
    head = torch.zeros(config.vocab_size, width)
    head[first, 1:] = b[2]  # <go>
    head[first + 1 : first + HIGH, 1:] = b[first : first + HIGH - 1]
    head *= SHARP
    head[eos, 0] = EOS_SHARP
    with torch.no_grad():
        for block in model.model.layers:
            block.self_attn.o_proj.weight.mul_(0.05)
            block.mlp.down_proj.weight.mul_(0.05)
        model.model.embed_tokens.weight.copy_(
            torch.cat([a[:, None], b * (1 - a[:, None] ** 2).sqrt()], 1)
        )
        model.lm_head.weight.copy_(head / width**0.5)  # the last norm's output has length sqrt(H)
    return model.eval()


# --- The task ---------------------------------------------------------------------------
def load(split):
    """Returns questions with as many tokens as the environment variable COUNTING_PROMPT_TOKENS."""
    draw = torch.Generator().manual_seed(0)
    tokens = int(os.environ.get("COUNTING_PROMPT_TOKENS", "200"))
    return [{"question": prompt(tokens, draw), "answer": "even"} for _ in range(512)]


def messages(item):
    return [{"role": "user", "content": item["question"]}]


def rewards(item, completion):
    """A completion is right if it counts to an even number."""
    return {"correctness": 1.0 if completion.count("<c") % 2 == 0 else -1.0}
