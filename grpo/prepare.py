"""Prepares a run: tokenizer, recipe and server, a preview of the task, and then the policy.

Trainer, workers, evaluate.py and `python -m tasks` use it. Here, in start.py and in the worker the
constants and the task choose what is imported from options/; it is handed on as a value. Torch is
imported only when a tokenizer is needed, so that a mistake in the task's file is reported at once.
"""

import functools
import math
from dataclasses import replace

from grpo.faults import TaskError, called
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
    recipe = recipe_of(c, task, tokenizer)
    if server:
        server.check(c, tokenizer)
    recipe = replace(recipe, prompts=load_split(recipe, split, tokenizer)).resolved()
    preview(recipe, tokenizer, shown)
    return tokenizer, recipe


def recipe_of(c, task, tokenizer=None):
    """Returns the Recipe, without prompts, of a task's module, with what the module switches on."""
    if not any(hasattr(task, name) for name in ("reply", "Environment", "TOOLS")):
        return Recipe(c, task)
    from grpo.options.turns import tools, turns

    schemas, parse = tools.schemas_of(c.TASK, task), None
    if schemas and getattr(tokenizer, "response_template", None):
        parse = functools.partial(tokenizer.parse_response, prefix="", tools=schemas)
    return Recipe(c, task, turns=turns, tools=schemas, parse=parse)


# --- Preview --------------------------------------------------------------------------
def preview(recipe, tokenizer, number):
    """Prints the first `number` prompts as the model sees them, and the rewards of an empty
    completion and of the gold answer. Raises set_rewards' errors; TaskError if gold() is wrong.

    The model may sample an empty completion: a reward function that fails on it would end the run
    hours later.
    """
    c = recipe.c
    if "tools" in recipe.chat_options and "tools" not in str(tokenizer.chat_template):
        say("the chat template does not show TOOLS: messages() must explain them and their calls")
    elif recipe.tools:
        from grpo.options.turns.tools import show_unread_call

        show_unread_call(recipe, tokenizer)
    say(f"REWARD_WEIGHTS = {recipe.weights}; OUTCOME = {recipe.outcome!r}, above 0 if right")
    for index, item, ids, opening in recipe.prompts[:number]:
        text = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        say(f"prompt {index} as {c.MODEL} sees it, {len(ids)} tokens:\n{text}")
        for message in load_chat(c.TASK, recipe.task, item):
            if "".join(message["content"].split()) not in "".join(text.split()):
                say(f"the chat template loses or changes the {message['role']} message")
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
    """Prints the rewards of gold(item), which must be right or None. Without gold(), the item's
    "answer" is rewarded. If the task has reply(), gold() may return several turns. The
    model's turns begin with `opening`, unless a stop string ended the turn before."""
    c, gold, turns = recipe.c, getattr(recipe.task, "gold", None), recipe.turns
    if turns:
        turns.play(recipe, item, [opening])
    if not gold and item.get("answer") is None:
        return say('no right answer is tried: the item has no "answer", and the task no gold()')
    must = f"return a right completion, one whose reward {recipe.outcome!r} (OUTCOME) is above 0"
    text = gold_of(recipe, item, must, or_none=True)
    if text is None:
        return
    if turns:
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


def gold_of(recipe, item, must, or_none=False):
    """Returns gold(item), or item["answer"] without gold(): a right text, or a list of the model's
    turns if the task has reply(). Raises TaskError with `must` for anything else."""
    task, kinds = recipe.task, (str, list) if recipe.turns else str
    gold = lambda: task.gold(item) if hasattr(task, "gold") else str(item["answer"])
    holds = lambda got: (isinstance(got, kinds) and got != []) or (got is None and or_none)
    return called(recipe.c.TASK, f"gold({item!r:.500})", must, gold, holds)


def show_rewards(recipe, item, what, text):
    """Prints and returns the rewards of a completion."""
    (rewards,) = reward_texts(recipe, item, [text])
    values = {n: "does not apply" if math.isnan(v) else f"{v:g}" for n, v in rewards.items()}
    right = rewards[recipe.outcome]  # NaN: does not apply
    counts = "right" if right > 0 else "wrong" if right <= 0 else "neither: None is no reward"
    say(f"rewards of {what}: {', '.join(map(' '.join, values.items()))}; it counts as {counts}")
    return rewards


# --- The policy -----------------------------------------------------------------------
def make_policy(c, tokenizer):
    """Returns the Policy of the constants `c`. Raises SystemExit if they do not fit the model."""
    import torch

    from grpo.models import check_context

    torch.manual_seed(c.SEED)  # adapters are initialized at random
    more = {"lora_rank": c.LORA_RANK, "stop_strings": c.STOP_STRINGS, "bits": c.BASE_BITS}
    policy = load_policy(c.MODEL, tokenizer, c.DTYPE, c.STOP_TOKENS, **more)
    check_context(c, policy.model.config)
    stops = [*tokenizer.convert_ids_to_tokens(sorted(policy.eos_ids)), *map(repr, c.STOP_STRINGS)]
    say(f"completions end at {', '.join(stops)}")
    return policy


def load_policy(name, tokenizer, dtype, stop_tokens=(), lora_rank=0, stop_strings=(), bits=16):
    """Returns the Policy of a model (hub name or folder); see load_model for `dtype`. `bits`:
    BASE_BITS, those of a weight in the linear layers."""
    from grpo.models import load_model, stop_ids, vocab_size_of
    from grpo.policy import NOISE, Policy

    vocab_size, contexts = vocab_size_of(tokenizer), []
    model, dtype = load_model(name, dtype, vocab_size, loader_of(bits))
    if dtype != "float32":
        from grpo.bfloat16 import ConvertedHead, give_float32_head

        give_float32_head(model)
        contexts.append(functools.partial(ConvertedHead, model))
    if lora_rank:
        from grpo.options.lora import MergedAdapters, add_adapters

        add_adapters(model, lora_rank)
        if bits == 16:
            contexts.append(functools.partial(MergedAdapters, model))
    vocab_size = min(vocab_size, len(model.get_input_embeddings().weight))
    eos_ids = stop_ids(name, tokenizer, stop_tokens, vocab_size)
    model.generation_config.eos_token_id = sorted(eos_ids)  # a checkpoint ends where the run did
    stops = None
    if stop_strings:
        from grpo.options.stop_strings import StopStrings

        stops = StopStrings(tokenizer, stop_strings)
    more = NOISE[dtype], decoder_of(model), stops, lora_rank > 0, contexts
    return Policy(model, tokenizer, eos_ids, vocab_size, dtype, *more)


def loader_of(bits):
    """Returns models.whole_model, or a function like it, for BASE_BITS."""
    from grpo.models import whole_model

    if bits == 16:
        return whole_model
    from grpo.options.four_bits import load_in_4_bits

    return functools.partial(load_in_4_bits, whole_model)


def decoder_of(model):
    """Returns the class of the decoder with a KV cache, or of one that is right for any model."""
    from grpo.forward import can_cache
    from grpo.sampler import CachedDecoder

    if can_cache(model):
        return CachedDecoder
    from grpo.options.plain_decoder import PlainDecoder

    return PlainDecoder
