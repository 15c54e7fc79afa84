"""Calls a task's reward functions, and turns what they return into floats.

    rewarded(recipe, group, begin_rewards(recipe, group))    # sets each sample's rewards and total

A task returns a number, a bool, None (no reward), or a dict of them. A sample has a float for each
name of REWARD_WEIGHTS, in that order; NaN is None, and so is what a call that takes too long gives.
"""

import copy
import math
import numbers

from grpo.calls import TooSlow, answers, begin, environment_rewards, mistake
from grpo.log import say
from grpo.sample import Group, Sample


# --- What is called ---------------------------------------------------------------------
def calls_of(recipe, group):
    """Returns the calls that reward a group; where there may be turns, a plain text is one turn."""
    task, texts = recipe.task, [sample.text for sample in group.samples]
    if recipe.has_turns:
        texts = [[text] if isinstance(text, str) else list(text) for text in texts]
    calls = []
    if hasattr(task, "rewards"):
        calls += [(task.rewards, group.item, copy.copy(text)) for text in texts]
    if hasattr(task, "group_rewards"):
        calls.append((task.group_rewards, group.item, texts))
    return calls


def begin_rewards(recipe, group):
    """Begins a group's async calls, beside the sampling of others. Returns answers_of's futures."""
    return begin(recipe.c.REWARD_TIMEOUT_SECONDS, calls_of(recipe, group))


def answers_of(recipe, group, futures):
    """Returns what the calls of a group return, None if one is too slow. TaskError if one fails."""
    calls, seconds = calls_of(recipe, group), recipe.c.REWARD_TIMEOUT_SECONDS
    what = f"the rewards of question {group.item.get('question', group.item)!r:.80}"
    found = answers(seconds, what, calls, futures)
    late = [number for number, answer in enumerate(found) if isinstance(answer, TooSlow)]
    for number, error in enumerate(found):
        if isinstance(error, BaseException) and number not in late:
            raise call_mistake(recipe, *calls[number], error) from error
    if late:
        say(
            f"REWARD_TIMEOUT_SECONDS: {what} took more than {seconds} s: {len(late)} of"
            f" {len(calls)} calls count as None, from that of {calls[late[0]][2]!r:.200} on"
        )
    return [None if number in late else answer for number, answer in enumerate(found)]


def call_mistake(recipe, function, item, seen, error):
    """Returns the TaskError of a function that has raised `error` for the text or texts `seen`."""
    name = "rewards" if function == getattr(recipe.task, "rewards", None) else "group_rewards"
    kind = "completions" if name == "group_rewards" else "completion"
    given = f"; question {item!r:.500}, {kind} {seen!r:.500}"
    must = f"take (item, {kind}) and reward any"
    return mistake(recipe.c.TASK, f"{name}()", must, given, error=error)


# --- What is made of it -----------------------------------------------------------------
def rewarded(recipe, group, futures):
    """Sets rewards and total of a group's samples, which already have their texts and the rewards
    of their environments. `futures` is the result of begin_rewards. Raises TaskError if the task
    fails (a bug, not a reward), or returns other rewards than REWARD_WEIGHTS names.
    """
    found = values_of(recipe, group, futures)
    for sample, values in zip(group.samples, found, strict=True):
        sample.rewards = floats_of(recipe, group.item, sample.text, values)
        sample.total = total_of(recipe, sample)
        sample.environment = None  # values of the task's, of any type: ranks send each other floats


def reward_texts(recipe, item, texts):
    """Returns the rewards that sampled completions with these texts would get. If an environment
    rewards a completion, its turns are played again."""
    group = group_of(recipe, item, texts)
    rewarded(recipe, group, begin_rewards(recipe, group))
    return [sample.rewards for sample in group.samples]


def group_of(recipe, item, texts):
    """Returns a Group of texts that nobody has sampled."""
    samples = [Sample([], [], text=text) for text in texts]
    if environment_rewards(recipe.task):
        from grpo.options.turns.turns import play

        for sample, text in zip(samples, texts, strict=True):
            written = [text] if isinstance(text, str) else text[::2]
            _, sample.environment, _ = play(recipe, item, written)
    return Group(-1, item, [], samples)


def values_of(recipe, group, futures):
    """Returns {name: what the task returned} for each sample. A group's None is one for each."""
    task, size = recipe.task, len(group.samples)
    answers, columns = answers_of(recipe, group, futures), []
    if environment_rewards(task):
        columns.append([sample.environment for sample in group.samples])
    if hasattr(task, "rewards"):
        columns.append(answers[:size])
    if hasattr(task, "group_rewards"):
        together = [None] * size if answers[-1] is None else answers[-1]
        is_list = hasattr(together, "__getitem__") and not isinstance(together, str | dict)
        if not is_list or len(together) != size:
            must = f"return a list of {size} rewards, or dicts of rewards: one for each text"
            raise mistake(recipe.c.TASK, "group_rewards()", must, got=together)
        columns.append(together)
    return [merged(recipe, parts) for parts in zip(*columns, strict=True)]


def merged(recipe, parts):
    """Returns the values of one sample, of which each function has returned a part: a dict, or the
    value of "reward". None in place of a part means that the sample has no reward at all."""
    if recipe.weights and any(part is None for part in parts):
        return dict.fromkeys(recipe.weights)
    named = [part if isinstance(part, dict) else {"reward": part} for part in parts]
    values = {name: value for part in named for name, value in part.items()}
    if len(values) < sum(map(len, named)):
        functions = "Environment.rewards(), rewards() and group_rewards()"
        raise mistake(recipe.c.TASK, functions, "use different names", got=named)
    return values


def floats_of(recipe, item, text, values):
    floats = {name: as_float(values[name]) for name in recipe.weights if name in values}
    wrong = [x for x in floats if values[x] is not None and not math.isfinite(floats[x])]
    if floats.keys() == values.keys() == recipe.weights.keys() and not wrong:
        return floats
    kinds = "".join(f", whose {x!r} is a {type(values[x]).__name__}," for x in wrong)
    given = f"{kinds} for the question {item!r} and the completion {text!r}"
    must = f"return a number below 1e30, True, False or None for each of {list(recipe.weights)}"
    must += " and no other (REWARD_WEIGHTS; 0: only logged)" * (not wrong)
    raise mistake(recipe.c.TASK, " and ".join(functions_of(recipe.task)), must, given, got=values)


def functions_of(task):
    """Returns the names of the functions that reward a completion."""
    plain = [f"{name}()" for name in ("rewards", "group_rewards") if hasattr(task, name)]
    return plain + ["Environment.rewards()"] * environment_rewards(task)


def as_float(value):
    """Returns a number (of Python, NumPy or torch) or bool as a float. Anything else becomes NaN,
    and so does a number beyond 1e30, because advantages are float32, which ends at 3e38."""
    if getattr(value, "ndim", None) == 0:
        value = value.item()
    is_small = isinstance(value, numbers.Real) and abs(value) < 1e30
    return float(value) if is_small else math.nan


def total_of(recipe, sample):
    """Returns the weighted sum of a sample's rewards that apply, as TRL's nansum; NaN if none."""
    weighted = [
        recipe.weights[name] * value
        for name, value in sample.rewards.items()
        if not math.isnan(value)
    ]
    return sum(weighted) if weighted else math.nan
