"""The ids of what a task replies between two turns of the model, by its chat template."""

import json
import re

import jinja2

MARK = "\u2402"  # a placeholder for the model's turn, to find its end in the chat template


def bridge(tokenizer, eos_ids, last, message, options):
    """Returns the ids between two turns of the model, if the first turn ended with the id `last`.
    No text in the reply (`message`, role and content) becomes a special token: it could end the
    turn and forge another one. `options` are the chat template's. SystemExit if the template can't
    contain the reply."""
    plain = message["content"]
    reply = without_specials(tokenizer, plain, eos_ids)
    if last not in eos_ids or not tokenizer.chat_template:
        return ids_in_pieces(tokenizer, reply)
    turns = ("user", "."), ("assistant", MARK)
    chat = [{"role": role, "content": text} for role, text in turns]
    chat.append(message | {"content": reply})
    options = {"add_generation_prompt": True, "tokenize": False} | options
    try:
        _, marked, after = tokenizer.apply_chat_template(chat, **options).partition(MARK)
        reason = "it drops the model's turn or the reply"
    except jinja2.TemplateError as error:
        marked, after, reason = "", "", repr(error)
    texts = reply, json.dumps(reply, ensure_ascii=False)  # Llama 3 writes a tool's result as JSON
    if not marked or not any("".join(x.split()) in "".join(after.split()) for x in texts):
        raise SystemExit(
            f"the chat template of MODEL = {tokenizer.name_or_path!r} can't continue a chat with"
            f" the reply {plain!r:.200} ({reason}): end the model's turns with STOP_STRINGS,"
            " which need no template, or give its tokenizer another template"
        )
    # The model has already sampled the end of its turn or (GLM) the role of the next turn
    return ids_in_pieces(tokenizer, after.removeprefix(tokenizer.decode([last])))


CUT = "\ue000"  # a private character: text is tokenized in pieces, cut where it stands


def without_specials(tokenizer, text, eos_ids=()):
    """Returns the text with a CUT in each text of a special token, so that ids_in_pieces makes
    plain ids of it. Special is also what the chat template writes (DeepSeek's roles)."""
    template, added = str(tokenizer.chat_template), tokenizer.added_tokens_decoder.items()
    written = lambda text: len(text) > 1 and text in template
    texts = [str(x) for i, x in added if x.special or i in eos_ids or written(str(x))]
    texts = sorted((x for x in texts if not x.isspace()), key=len, reverse=True)
    text = text.replace(CUT, "\ufffd")
    special = re.compile("|".join(map(re.escape, texts)) or "$^")
    while found := special.search(text):  # again from the start: texts may overlap
        at = found.start() + (len(found[0]) > 1)  # a single character is left out
        text = text[:at] + CUT + text[found.start() + 1 :]
    return text


def ids_in_pieces(tokenizer, text):
    """Returns the ids of a text, tokenized in pieces between CUTs."""
    pieces = (tokenizer(piece, add_special_tokens=False) for piece in text.split(CUT))
    return [token for piece in pieces for token in piece["input_ids"]]
