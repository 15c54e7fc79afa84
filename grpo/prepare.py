"""Prepares a run before a model is loaded: tokenizer, recipe and server, and a preview of the task.

Trainer, workers, evaluate.py and `python -m tasks` use it. Torch is imported only when a tokenizer
is needed, so that a mistake in the task's file is reported at once.
"""

import functools
import math

from grpo.calls import TaskError, called
from grpo.log import say
from grpo.rewards import reward_texts
from grpo.task import Recipe, load_chat, load_split, load_task


def prepare(c, needs_server=False):
    """Returns (tokenizer, recipe, server). Checks task, prompts, rewards and server before a model
    is loaded. `server` is None if it is not needed; `c` has the trainer's constants."""
    from grpo.models import check_context

    server = None
    if needs_server:
        from grpo.remote import ReferenceClient

        server = ReferenceClient(c.REF_SERVER, c.WAIT_LIMIT_SECONDS)
    tokenizer, recipe = prepare_task(c, split="train", shown=1, server=server)
    check_context(c)
    return tokenizer, recipe, server


def prepare_task(c, *, split, shown, server=None):
    """Returns (tokenizer, recipe). Before that it checks the `server`, if there is one, and checks
    and prints the first `shown` prompts of `split` and their rewards."""
    from grpo.models import load_tokenizer

    task, tokenizer = load_task(c.TASK), load_tokenizer(c.MODEL)
    if server:
        server.check(c, tokenizer)
    prompts, parts = load_split(c, task, split, tokenizer), {}
    ends = {tuple(ids[-4:]) for _, _, ids in prompts}  # few: those of the chat template
    tags = any(tokenizer.decode(end).rstrip().endswith((">", "]")) for end in ends)
    if tags or any(hasattr(ids, "opening") for _, _, ids in prompts):
        from grpo.options.rewards.opening import opening_of

        parts["opening"] = functools.partial(opening_of, tokenizer)
    if hasattr(task, "TOOL_SCHEMAS") and getattr(tokenizer, "response_template", None):
        tools = {"prefix": "", "tools": task.TOOL_SCHEMAS}
        parts["parse"] = functools.partial(tokenizer.parse_response, **tools)
    recipe = Recipe(c, task, prompts, **parts).resolved()
    preview(recipe, tokenizer, shown)
    return tokenizer, recipe


# --- Preview --------------------------------------------------------------------------
def preview(recipe, tokenizer, number):
    """Prints the first `number` prompts as the model sees them, and the rewards of an empty
    completion and of the gold answer. Raises rewarded's errors; TaskError if gold() is wrong.

    The model may sample an empty completion: a reward function that fails on it would end the run
    hours later.
    """
    c = recipe.c
    if "tools" in recipe.chat_options and "tools" not in str(tokenizer.chat_template):
        say("the chat template does not show TOOLS: messages() must explain them and their calls")
    elif hasattr(recipe.task, "TOOL_SCHEMAS"):
        from grpo.options.turns.tools import FORM, unread_call

        if call := unread_call(recipe, tokenizer):
            say(f"calls as the chat template writes them are not read ({call!r:.200}): {FORM}")
    say(f"REWARD_WEIGHTS = {recipe.weights}; OUTCOME = {recipe.outcome!r}, above 0 if right")
    for index, item, ids in recipe.prompts[:number]:
        text = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        say(f"prompt {index} as {c.MODEL} sees it, {len(ids)} tokens:\n{text}")
        for message in load_chat(c.TASK, recipe.task, item):
            if "".join(message["content"].split()) not in "".join(text.split()):
                say(f"the chat template loses or changes the {message['role']} message")
        opening = recipe.opening(ids)
        if opening:
            say(f"the prompt opens the answer with {opening!r}, so rewards see it, too")
        show_rewards(recipe, item, "an empty completion", opening)
        check_gold(recipe, item, tokenizer, opening)


def as_seen(opening, text):
    """Returns a right answer as rewards see it: after the tag that the chat template has opened."""
    tag = opening.strip()
    is_open = tag and text.lstrip().startswith(tag)
    return opening + (text.lstrip().removeprefix(tag) if is_open else text)


def check_gold(recipe, item, tokenizer, opening):
    """Prints and returns the rewards of gold(item), which must be right or None. Without gold(),
    the item's "answer" is rewarded. If the task has reply(), gold() may return several turns. The
    model's turns begin with `opening`, unless a stop string ended the turn before."""
    c, gold = recipe.c, getattr(recipe.task, "gold", None)
    if recipe.has_turns:
        from grpo.options.turns import turns  # here, as it imports torch

        turns.play(recipe, item, [opening])
    if not gold and item.get("answer") is None:
        return {}
    must = f"return a right completion, one whose reward {recipe.outcome!r} (OUTCOME) is above 0"
    text = gold_of(recipe, item, must, or_none=True)
    if text is None:
        return {}
    if recipe.has_turns:
        begins, said = True, []
        for turn in [text] if isinstance(text, str) else text:
            said.append(as_seen(opening, turn) if begins else turn)
            begins = not turns.is_open(c, turn)
        text, _, roles = turns.play(recipe, item, said)
        turns.show_turns(recipe, tokenizer, text, roles)
    else:
        text = as_seen(opening, text)
    rewards = show_rewards(recipe, item, f"the gold answer {text!r:.200}", text)
    if gold and rewards[recipe.outcome] <= 0:  # NaN (does not apply) is not wrong
        got = f"returned {text!r:.500}, which earns {rewards}"
        raise TaskError(c.TASK, f"gold({item!r:.500})", got, must)
    return rewards


def gold_of(recipe, item, must, or_none=False):
    """Returns gold(item), or item["answer"] without gold(): a right text, or a list of the model's
    turns if the task has reply(). Raises TaskError with `must` for anything else."""
    task, kinds = recipe.task, (str, list) if recipe.has_turns else str
    gold = lambda: task.gold(item) if hasattr(task, "gold") else str(item["answer"])
    holds = lambda got: (isinstance(got, kinds) and got != []) or (got is None and or_none)
    return called(recipe.c.TASK, f"gold({item!r:.500})", must, gold, holds)


def show_rewards(recipe, item, what, text):
    """Prints and returns the rewards of a completion."""
    (rewards,) = reward_texts(recipe, item, [text])
    values = {n: "does not apply" if math.isnan(v) else f"{v:g}" for n, v in rewards.items()}
    right = rewards[recipe.outcome]  # NaN: does not apply
    counts = "right" if right > 0 else "wrong" if right <= 0 else "neither right nor wrong"
    say(f"rewards of {what}: {', '.join(map(' '.join, values.items()))}; it counts as {counts}")
    return rewards
