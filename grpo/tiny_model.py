"""The demo's tiny model, before GRPO: 126 000 parameters that learned from sloppy examples.

    warm_start("runs/demo/warm_start", arithmetic, seed=0, steps=800)    # 45 s on one core

It stands for a real base model: it knows the arithmetic, the operators and the tags, but rarely
combines them. Its examples are true equations and sloppy answers to questions.
"""

import functools
import random
import time

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from grpo.models import own_device, prompt_ids

CHAT = (  # ChatML, as Qwen2.5, without a system prompt
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Qwen2's splitting of text into words, single digits and punctuation
SPLIT = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+"


def make_tokenizer(task):
    """Returns a byte-level BPE tokenizer of about 400 ids; each tag is one id."""
    split = pre_tokenizers.Split(Regex(SPLIT), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=byte_level.alphabet(),
        show_progress=False,
    )
    chats = [task.messages(item) for item in task.load("train")[:2000]]
    bpe.train_from_iterator([m["content"] for chat in chats for m in chat], trainer)
    bpe.add_tokens(["<think>", "</think>", "<answer>", "</answer>"])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = CHAT
    return tokenizer


def make_model(tokenizer, heads):
    config = Qwen2Config(
        vocab_size=416,  # the tokenizer's ids, padded as real models pad theirs
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=2,
        max_position_embeddings=256,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        initializer_range=0.1,  # 0.02 made the arithmetic slower to learn
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen2ForCausalLM(config).to(own_device())


def sloppy(item, draw):
    """Returns a completion for the warm start: a true equation, often not the one asked for.

    The shares 0.1 and 0.62 decide how hard GRPO's part is. A subtraction usually adds, so greedy
    accuracy begins near 50 %; an addition seldom subtracts, so the model does tell them apart.
    """
    a, b, operator = item["a"], item["b"], item["operator"]
    if draw.random() < {"+": 0.1, "-": 0.62}[operator]:
        operator = {"+": "-", "-": "+"}[operator]
        a, b = max(a, b), min(a, b)
    value = a + b if operator == "+" else a - b
    answer = draw.choice([a, b]) if draw.random() < 0.1 else value
    work, kind = f"{a}{operator}{b}={value}", draw.random()
    if kind < 0.25:
        return f"<think>{work}</think><answer>{answer}</answer>"
    if kind < 0.75:
        return f"{work} so {answer}"
    broken = [f"<think>{work}<answer>{answer}</answer>", f"{work}</think><answer>{answer}"]
    return draw.choice(broken)


def next_token_loss(model, examples):
    """Returns the mean cross-entropy of examples (ids, how many of the first are not learned)."""
    labels = [torch.tensor([-100] * given + ids[given:]) for ids, given in examples]
    labels = pad_sequence(labels, batch_first=True, padding_value=-100).to(model.device)
    ids = pad_sequence([torch.tensor(ids) for ids, _ in examples], batch_first=True)
    return model(input_ids=ids.to(model.device), labels=labels).loss


def warm_start(folder, task, seed, steps, heads=4, answer=sloppy):
    """Trains the tiny model on examples, answer(item, draw) to the task's questions, and saves it;
    also on true equations, if the task makes items of them (make_item, as arithmetic's). With 2
    `heads` vLLM can run it on a CPU."""
    torch.set_num_threads(1)  # two are a fifth faster on free cores, and much slower on busy ones
    torch.manual_seed(seed)
    draw, tokenizer, train_items = random.Random(seed), make_tokenizer(task), task.load("train")
    model = make_model(tokenizer, heads)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1, betas=(0.9, 0.99), weight_decay=0.01)
    prompt_of = functools.cache(lambda i: prompt_ids(tokenizer, task.messages(train_items[i])))
    end, started = [tokenizer.eos_token_id], time.perf_counter()
    for step in range(steps):
        examples = []
        for number in draw.choices(range(len(train_items)), k=32):
            prompt = prompt_of(number)
            completion = tokenizer(answer(train_items[number], draw))["input_ids"] + end
            examples.append((prompt + completion, len(prompt)))
        loss = next_token_loss(model, examples)
        if hasattr(task, "make_item"):
            items = [task.make_item(draw) for _ in range(64)]
            equations = tokenizer(["{a}{operator}{b}={answer}".format(**item) for item in items])
            equations = [(ids + end, 1) for ids in equations["input_ids"]]
            # a batch of its own: padded to the length of examples it would take as long again
            loss = loss + next_token_loss(model, equations)
        for group in optimizer.param_groups:  # up in 30 steps, and from halfway down to a 20th
            group["lr"] = 4e-3 * min((step + 1) / 30, 1, 0.05 + 1.9 * (1 - step / steps))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 100 == 99:
            print(f"  step {step + 1}/{steps}, loss {loss.item():.3f}", flush=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    print(f"  took {time.perf_counter() - started:.0f} s", flush=True)
