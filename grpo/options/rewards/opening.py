"""Prompts that begin the answer: rewards see this opening before each completion. It is the text
of a last message of the assistant, or a tag that the chat template opens, such as <think>."""

import re

TAG = re.compile(r"([<\[])([\w:-]+)[>\]]\s*$")  # such as "<think>\n", at a prompt's end
THINKS = re.compile("think|thought|reason|reflect|analysis|scratchpad", re.IGNORECASE)
ROLES = {"assistant", "model", "bot", "gpt", "ai"}  # a template may write a role as a tag


class Opened(list):
    """Ids of a prompt that ends within the assistant's turn; `opening` is the turn's beginning."""


def ids_within(prompt_ids, tokenizer, messages, options):
    """Returns the Opened ids of a chat whose last message is the assistant's, which goes on, as in
    TRL. `options` are the chat template's; models.prompt_ids calls this with itself."""
    begin = {"continue_final_message": True, "add_generation_prompt": False}
    ids = prompt_ids(tokenizer, messages, **begin | options)
    ids, content = Opened(ids), messages[-1]["content"]
    text = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    ids.opening = content if text.endswith(content) else content.strip()  # as the model sees it
    return ids


def opening_of(tokenizer, ids):
    """Returns the text of the prompt's last message if that is the assistant's (Opened). Else it
    returns the tag that the chat template has opened at the end of the prompt's `ids`, with the
    space after it, or "". The model never writes that tag ("<think>\n": DeepSeek-R1's distilled
    models, Qwen3-Thinking). Other tags than those for thoughts count if they can be closed."""
    if opening := getattr(ids, "opening", ""):
        return opening
    found = tokenizer.chat_template and TAG.search(tokenizer.decode(ids[-16:]))
    if not found or found[2].lower() in ROLES:
        return ""
    end = found[0].strip().replace(found[1], f"{found[1]}/", 1)  # </think>
    can_end = end in str(tokenizer.chat_template) or end in tokenizer.get_vocab()
    return found[0] if can_end or THINKS.search(found[2]) else ""


def without_opening(chat, written):
    """Returns what the model has to write of a right answer, a text or a list of its turns: without
    the last message of the chat, if that is the assistant's."""
    opening = chat[-1]["content"].strip() if chat[-1]["role"] == "assistant" else ""
    if isinstance(written, str):
        return written.lstrip().removeprefix(opening) if opening else written
    return [without_opening(chat, written[0]), *written[1:]]
