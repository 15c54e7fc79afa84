"""Calls a task's reward functions, and turns what they return into floats."""

import math
import numbers

from grpo.calls import (
    FAILED,
    TaskError,
    TooSlow,
    by_name,
    environment_rewards,
    finished,
    has_turns,
    task_file,
    timely,
)
from grpo.log import announced


def calls_of(task, item, texts):
    """Returns the calls that reward a group: [(function, item, text or texts)]. If completions may
    have several turns, a plain text becomes a completion of one turn."""
    if has_turns(task):
        texts = [[text] if isinstance(text, str) else text for text in texts]
    alone = [("rewards", item, text) for text in texts if hasattr(task, "rewards")]
    return alone + [("group_rewards", item, texts)] * hasattr(task, "group_rewards")


def begin_rewards(recipe, item, texts):
    """Returns the Futures of a group's calls, if rewards are not computed here; else []."""
    calls, submit = calls_of(recipe.task, item, texts), recipe.submit
    return [submit(*call) for call in calls if submit.takes(call[0])] if submit else []


def reward_group(recipe, item, texts, futures=(), from_environments=None, truncated=()):
    """Returns a dict of floats for each completion's text, in REWARD_WEIGHTS' order; NaN means that
    a reward does not apply. `futures` is the result of begin_rewards, if it was called.
    `from_environments` are the rewards of each completion's environment; None: its turns are played
    again, but for the reply to a last turn that is `truncated` (a bool for each text; (): none is).

    Raises RuntimeError if the task raises (that is a bug, not a reward) or takes too long;
    TaskError if the rewards do not have the names in REWARD_WEIGHTS.
    """
    if from_environments is None:
        from_environments = played(recipe, item, texts, truncated)
    found = rewards_by_name(recipe, item, texts, futures, from_environments)
    if recipe.failures:
        recipe.failures.count([r is FAILED for r in found])
    return [named_floats(recipe, r, item, text) for r, text in zip(found, texts, strict=True)]


def played(recipe, item, texts, truncated=()):
    """Returns the rewards of each text's environment, whose turns are played again; None if the
    task's environments give none."""
    if not environment_rewards(recipe.task):
        return None
    from grpo.options.turns import play

    written = [[text] if isinstance(text, str) else text[::2] for text in texts]
    pairs = zip(written, truncated or [False] * len(texts), strict=True)
    return [play(recipe, item, turns, cut)[1] for turns, cut in pairs]


def rewards_by_name(recipe, item, texts, futures=(), from_environments=None):
    """Returns a dict of rewards by name for each text, or FAILED: those of its environment
    (`from_environments`), of rewards(), and of group_rewards()."""
    task, name = recipe.task, recipe.c.TASK
    results = results_of(recipe, item, calls_of(task, item, texts), futures)
    nothing = [{}] * len(texts)
    by_turns = [one or {} for one in from_environments or nothing]
    alone = results[: len(texts)] if hasattr(task, "rewards") else nothing
    together = results[-1] if hasattr(task, "group_rewards") else nothing
    together = [FAILED] * len(texts) if together is FAILED else together
    must = f"return a list of {len(texts)} rewards, or dicts of rewards: one for each text"
    is_list = hasattr(together, "__len__") and not isinstance(together, str | dict)
    if not is_list or len(together) != len(texts):
        raise TaskError(name, "group_rewards()", f"returned {together!r:.500}", must)
    merged = []
    for parts in zip(by_turns, alone, together, strict=True):
        if any(part is FAILED for part in parts):
            merged.append(FAILED)
            continue
        named = list(map(by_name, parts))
        merged.append({name: value for part in named for name, value in part.items()})
        if len(merged[-1]) < sum(map(len, named)):
            got = f"returned {named!r:.500}"
            must = "use different names"
            raise TaskError(name, "Environment.rewards(), rewards() and group_rewards()", got, must)
    return merged


def results_of(recipe, item, calls, futures):
    """Returns the results of a group's calls; FAILED where one fails and may fail."""
    name, results = task_file(recipe.c.TASK), []
    what = f"{name}'s rewards of question {item.get('question', item)!r:.80}"
    while len(results) < len(calls):
        try:
            # Futures apply the time limit themselves: the wait for a free process does not count
            with announced(what) if futures else timely(recipe.c.REWARD_TIMEOUT_SECONDS, what):
                for future in futures[len(results) :]:
                    results.append(future.result(recipe.submit.limit))
                for function, *arguments in calls[len(results) :]:
                    results.append(finished(getattr(recipe.task, function)(*arguments)))
        except (Exception, SystemExit, TooSlow) as error:  # a task's sys.exit() is a mistake, too
            function, _, seen = calls[min(len(results), len(calls) - 1)]  # the alarm may ring late
            slow = isinstance(error, TooSlow)
            remedy = "; raise REWARD_TIMEOUT_SECONDS if it needs longer" if slow else ""
            why = str(error) if futures or slow else repr(error)  # a process has sent text alone
            failure = RuntimeError(
                f"{name}: {function}() failed: {why}{remedy}; question {item!r},"
                f" {'completions' if 'group' in function else 'completion'} {seen!r}"
            )
            if not recipe.failures:
                raise failure from error
            failure.__cause__ = error
            recipe.failures.take(failure)
            results[len(results) :] = [FAILED] * (len(results) < len(calls))
    return results


def named_floats(recipe, rewards, item, text):
    names = list(recipe.weights)
    if rewards is FAILED:
        return dict.fromkeys(names, math.nan)
    if rewards.keys() == recipe.weights.keys():
        floats = {name: as_float(rewards[name]) for name in names}
        if all(rewards[name] is None or math.isfinite(floats[name]) for name in names):
            return floats
    functions = [f"{name}()" for name in ("rewards", "group_rewards") if hasattr(recipe.task, name)]
    functions += ["Environment.rewards()"] * environment_rewards(recipe.task)
    raise TaskError(
        recipe.c.TASK,
        " and ".join(functions),
        f"returned {rewards!r:.500} for the question {item!r} and the completion {text!r}",
        "return a value (a number below 1e30, True, False or None: does not apply) for each name in"
        f' REWARD_WEIGHTS, {names}, as a dict, or the bare value if "reward" is the only name',
    )


def as_float(value):
    """Returns a number (of Python, NumPy or torch) or bool as a float, and anything else as NaN; so
    are numbers beyond 1e30, as groups are sent in float32, which ends at 3e38."""
    if getattr(value, "ndim", None) == 0:
        value = value.item()
    is_small = isinstance(value, numbers.Real) and abs(value) < 1e30
    return float(value) if is_small else math.nan


def total(rewards, weights):
    """Returns the weighted sum of the rewards (floats by name) that apply to a completion, as TRL's
    nansum; NaN if none applies.

    >>> total({"a": 1.0, "b": math.nan}, {"a": 2.0, "b": 1.0}), total({"b": math.nan}, {"b": 1.0})
    (2.0, nan)
    """
    values = [weights[name] * value for name, value in rewards.items() if not math.isnan(value)]
    return sum(values) if values else math.nan
