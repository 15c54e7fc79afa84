"""Chat templates that open a tag, such as <think>: rewards see it before each completion."""

import re

TAG = re.compile(r"([<\[])([\w:-]+)[>\]]\s*$")  # such as "<think>\n", at a prompt's end
THINKS = re.compile("think|thought|reason|reflect|analysis|scratchpad", re.IGNORECASE)
ROLES = {"assistant", "model", "bot", "gpt", "ai"}  # a template may write a role as a tag


def opening_of(tokenizer, ids):
    """Returns the tag that the chat template has opened at the end of a prompt's `ids`, with the
    space after it, or "". The model never writes that tag ("<think>\n": DeepSeek-R1's distilled
    models, Qwen3-Thinking). Other tags than those for thoughts count if they can be closed."""
    found = tokenizer.chat_template and TAG.search(tokenizer.decode(ids[-16:]))
    if not found or found[2].lower() in ROLES:
        return ""
    end = found[0].strip().replace(found[1], f"{found[1]}/", 1)  # </think>
    can_end = end in str(tokenizer.chat_template) or end in tokenizer.get_vocab()
    return found[0] if can_end or THINKS.search(found[2]) else ""
