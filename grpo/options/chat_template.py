"""CHAT_TEMPLATE: are these options of the model's chat template, and does each change a prompt?"""

import difflib
import re

import jinja2

from grpo.log import say
from grpo.models import prompt_ids
from grpo.task import load_chat

TRUTHS = "true", "false", "none", "null"  # as texts all of them are true to a template


def check_options(recipe, tokenizer):
    """Logs which options leave the first prompt as it is. Raises SystemExit for an option that the
    template does not name, if it names a similar one, and for the text of a truth value."""
    c, words = recipe.c, set(re.findall(r"\w+", str(tokenizer.chat_template)))
    _, item, ids = recipe.prompts[0]
    for name, value in c.CHAT_TEMPLATE.items():
        given = f"CHAT_TEMPLATE = {c.CHAT_TEMPLATE}"
        quoted = re.search(rf"['\"]{re.escape(str(value))}['\"]", str(tokenizer.chat_template))
        if isinstance(value, str) and value.lower() in TRUTHS and not quoted:
            raise SystemExit(
                f"{given}: {name} is the text {value!r}, which is true to a template: write True,"
                " False or None without quotes"
            )
        options = {k: v for k, v in recipe.chat_options.items() if k != name}
        try:
            without = prompt_ids(tokenizer, load_chat(c.TASK, recipe.task, item), **options)
        except jinja2.TemplateError:  # the template needs the option
            continue
        if without != ids:
            continue
        near = difflib.get_close_matches(name, words, n=1, cutoff=0.8)
        if near and near != [name]:
            raise SystemExit(
                f"{given}: the chat template of {c.MODEL} has no option {name}: did you mean"
                f" {near[0]}?"
            )
        say(f"{given}: {name} changes nothing in the first prompt")
