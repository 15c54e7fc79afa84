"""Makes a tiny model without a hub: 126,000 parameters, trained on sloppy examples.

    warm_start("runs/demo/warm_start", arithmetic, seed=0, steps=800)    # 45 s on one core
    python -m tasks my/task.py OUT=runs/my_model                         # for your task

It plays the role of a real base model, which can do the task but often does something else. The
demo's model learned from true equations and sloppy answers, so it knows arithmetic, operators and
tags but rarely combines them. For another task it learns from right and wrong answers.
"""

import itertools
import random
import time

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from grpo.models import as_umask, own_device, prompt_ids

CHAT = (  # ChatML as in Qwen2.5, without a system prompt
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# The chat around a task's reply, a turn of the role that stands first; the model continues after it
TURN = "<|im_end|>\n<|im_start|>{}\n{}<|im_end|>\n<|im_start|>assistant\n"
# Qwen2's rule, which splits text into words, single digits and punctuation
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
    chats = map(task.messages, itertools.islice(task.load("train"), 2000))
    bpe.train_from_iterator([message["content"] for chat in chats for message in chat], trainer)
    bpe.add_tokens(["<think>", "</think>", "<answer>", "</answer>"])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = CHAT
    return tokenizer


def make_model(tokenizer, context=256):
    """Returns a random model of the demo's sizes."""
    config = Qwen2Config(
        vocab_size=416,  # the tokenizer's ids, padded as in real models
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.1,  # 0.02 made the arithmetic slower to learn
        max_position_embeddings=context,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen2ForCausalLM(config).to(own_device())


def next_token_loss(model, examples):
    """Returns the mean cross-entropy of examples (ids, how many of the first are not learned)."""
    labels = [torch.tensor([-100] * given + ids[given:]) for ids, given in examples]
    labels = pad_sequence(labels, batch_first=True, padding_value=-100).to(model.device)
    ids = pad_sequence([torch.tensor(ids) for ids, _ in examples], batch_first=True)
    return model(input_ids=ids.to(model.device), labels=labels).loss


def is_flat(losses, share):
    """Returns whether, after 100 more steps, these have not lowered the mean loss by `share`."""
    before = losses[-200:-100]
    return len(losses) % 100 == 0 < len(before) and sum(losses[-100:]) > (1 - share) * sum(before)


def warm_start(folder, task, seed, steps, answer=None, flat=0.0):
    """Trains the tiny model on a task's examples and saves it; returns its context in tokens. Ends
    before `steps` if 100 of them lower the mean loss by less than the share `flat`.

    An example's text is answer(item, draw), by default the task's sloppy(item, draw). The task may
    also have drill(draw), an additional text to learn. `draw` is a random.Random.
    """
    torch.set_num_threads(1)  # two are a fifth faster on idle cores and much slower on busy ones
    torch.manual_seed(seed)
    draw, tokenizer, items = random.Random(seed), make_tokenizer(task), list(task.load("train"))
    pairs = [(item, prompt_ids(tokenizer, task.messages(item))) for item in items]
    answer, other = answer or task.sloppy, random.Random(seed)  # to measure lengths
    answers = tokenizer([answer(item, other) for item in items])["input_ids"]
    longest = max(map(len, answers)) + max(len(prompt) for _, prompt in pairs)
    model = make_model(tokenizer, context=max(256, 2 * longest))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1, betas=(0.9, 0.99), weight_decay=0.01)
    end, started, losses = [tokenizer.eos_token_id], time.perf_counter(), []
    for step in range(steps):
        drawn = [(p, tokenizer(answer(x, draw))["input_ids"]) for x, p in draw.choices(pairs, k=32)]
        loss = next_token_loss(model, [(prompt + ids + end, len(prompt)) for prompt, ids in drawn])
        if hasattr(task, "drill"):
            drills = tokenizer([task.drill(draw) for _ in range(64)])["input_ids"]
            # a separate batch, as padding drills to the length of examples would double the time
            loss = loss + next_token_loss(model, [(ids + end, 1) for ids in drills])
        for group in optimizer.param_groups:  # rises in 30 steps, in the end falls to a 20th
            group["lr"] = 4e-3 * min((step + 1) / 30, 1, 0.05 + 1.9 * (1 - step / steps))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 100 == 99 or step == 9:
            done, loss = len(losses), losses[-1]
            left = (time.perf_counter() - started) / done * (steps - done)
            print(f"  step {done}/{steps}, loss {loss:.3f}, {left:.0f} s left", flush=True)
        if flat and is_flat(losses, flat):
            break
    model.save_pretrained(folder)
    as_umask(folder)
    tokenizer.save_pretrained(folder)
    print(f"  took {time.perf_counter() - started:.0f} s", flush=True)
    return model.config.max_position_embeddings
