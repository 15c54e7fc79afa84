"""What the model will see and how it is rewarded, shown before anything heavy is loaded.

At the start of a run, and without a model's weights: `python -m tasks gsm8k`.
"""

import math

from grpo.log import say
from grpo.sampling.recipe import functions_of, line_of, load_chat, reward_group, task_file

LONGEST = 2000  # characters shown of a prompt


def preview(c, recipe, tokenizer, number):
    """Prints the first `number` prompts as the model sees them, and what an empty completion and
    the gold answer earn. `c` is the trainer's constants.

    An empty completion can be sampled: rewards that do not cope with it would end the run hours
    later. Raises what reward_group does; SystemExit if the task's gold() is not right by OUTCOME.
    """
    say(f"REWARD_WEIGHTS = {c.REWARD_WEIGHTS}; right is OUTCOME = {c.OUTCOME!r} above 0")
    for index, item, ids in recipe.prompts[:number]:
        show_prompt(c, recipe, tokenizer, index, item, ids)
        (empty,) = reward_group(recipe, item, [""])
        say(f"rewards of an empty completion: {shown(recipe, empty)}")
        check_gold(recipe, item)


def show_prompt(c, recipe, tokenizer, index, item, ids):
    text = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    cut = f" ... ({len(text) - LONGEST} characters more)" if len(text) > LONGEST else ""
    how = "" if tokenizer.chat_template else "; it has no chat template, so the texts are joined"
    say(f"prompt {index} as {c.MODEL} sees it, {len(ids)} tokens{how}:\n{text[:LONGEST]}{cut}")
    for message in load_chat(c.TASK, recipe.task, item):
        if "".join(message["content"].split()) not in "".join(text.split()):
            say(f"the chat template loses or changes the {message['role']}'s message: see above")


def check_gold(recipe, item):
    """Says what the gold answer of an item earns, if there is one."""
    file, gold = task_file(recipe.c.TASK), getattr(recipe.task, "gold", None)
    if not gold and item.get("answer") is None:
        return
    try:
        text = gold(item) if gold else str(item["answer"])
    except Exception as error:
        at = line_of(error, file)
        raise SystemExit(f"{file}: gold() failed with {error!r}{at} for {item!r:.500}") from error
    if not isinstance(text, str):
        raise SystemExit(f"{file}: gold({item!r:.500}) returned {text!r:.500}: it must be a text")
    (rewards,) = reward_group(recipe, item, [text])
    say(f"rewards of the gold answer {text!r:.200}: {shown(recipe, rewards)}")
    if rewards[recipe.c.OUTCOME] > 0 or math.isnan(rewards[recipe.c.OUTCOME]):
        return
    wrong = f"is wrong by OUTCOME = {recipe.c.OUTCOME!r}, which must be above 0 for it"
    if gold:
        raise SystemExit(
            f"{file}: gold() returned {text!r:.500} for the question {item!r:.500}, which {wrong}:"
            f" {functions_of(recipe.task)} gave {shown(recipe, rewards)}"
        )
    say(f'the "answer" alone {wrong}; write gold(item) in {file} for a completion that is right')


def shown(recipe, rewards):
    """Returns a completion's rewards by name, as text."""
    return ", ".join(
        f"{name} {'does not apply' if math.isnan(value) else format(value, 'g')}"
        for name, value in rewards.items()
    )
