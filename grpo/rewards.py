"""Calls a task's reward functions with a time limit, and turns what they return into floats.

    set_rewards(recipe, group, begin_rewards(recipe, group))    # of each sample, and its total

A task returns a number, a bool, None (no reward), or a dict of them. A sample has a float for each
name of REWARD_WEIGHTS, in that order; NaN is None, and so is what a call that takes too long gives.
Plain functions run in the main thread, one after another; `async` ones, such as those that ask a
judge behind an API, on an event loop, all at the same time and while others are sampled.
"""

import contextlib
import copy
import faulthandler
import inspect
import math
import numbers
import os
import signal
import sys
import threading
import time

from grpo.faults import TooSlow, mistake
from grpo.log import announced, say
from grpo.sample import Group, Sample

GRACE_SECONDS = 10  # after the time limit, for code that does not stop at once


# --- What is called ---------------------------------------------------------------------
def environment_rewards(task):
    """Returns whether the task's environments reward their completions themselves."""
    return hasattr(getattr(task, "Environment", None), "rewards")


def begin_rewards(recipe, group):
    """Begins the calls that reward a group, async ones beside the sampling of others. Returns
    begin's list. Where there may be turns, a plain text is one turn."""
    task, texts = recipe.task, [sample.text for sample in group.samples]
    if recipe.turns:
        texts = [[text] if isinstance(text, str) else list(text) for text in texts]
    calls = []
    if hasattr(task, "rewards"):
        calls += [(task.rewards, group.item, copy.copy(text)) for text in texts]
    if hasattr(task, "group_rewards"):
        calls.append((task.group_rewards, group.item, texts))
    return begin(recipe.c.REWARD_TIMEOUT_SECONDS, calls)


def results_of(recipe, group, begun):
    """Returns what the calls of a group return, None if one is too slow. TaskError if one fails."""
    seconds = recipe.c.REWARD_TIMEOUT_SECONDS
    what = f"the rewards of question {group.item.get('question', group.item)!r:.80}"
    found = results(seconds, what, begun)
    late = [call for (call, _), got in zip(begun, found, strict=True) if isinstance(got, TooSlow)]
    for (call, _), got in zip(begun, found, strict=True):
        if isinstance(got, BaseException) and not isinstance(got, TooSlow):
            raise call_mistake(recipe, *call, got) from got
    if late:
        say(
            f"REWARD_TIMEOUT_SECONDS: {what} took more than {seconds} s: {len(late)} of"
            f" {len(begun)} calls count as None, from that of {late[0][2]!r:.200} on"
        )
    return [None if isinstance(got, TooSlow) else got for got in found]


def call_mistake(recipe, function, item, seen, error):
    """Returns the TaskError of a function that has raised `error` for the text or texts `seen`."""
    name = "rewards" if function == getattr(recipe.task, "rewards", None) else "group_rewards"
    kind = "completions" if name == "group_rewards" else "completion"
    given = f"; question {item!r:.500}, {kind} {seen!r:.500}"
    must = f"take (item, {kind}) and reward any"
    return mistake(recipe.c.TASK, f"{name}()", must, given, error=error)


# --- What is made of it -----------------------------------------------------------------
def set_rewards(recipe, group, begun):
    """Sets rewards and total of a group's samples, which already have their texts and the rewards
    of their environments. `begun` is the result of begin_rewards. Raises TaskError if the task
    fails (a bug, not a reward), or returns other rewards than REWARD_WEIGHTS names.
    """
    found = values_of(recipe, group, begun)
    for sample, values in zip(group.samples, found, strict=True):
        sample.rewards = floats_of(recipe, group.item, sample.text, values)
        sample.total = total_of(recipe, sample)
        sample.environment = None  # values of the task's, of any type: ranks send each other floats


def reward_texts(recipe, item, texts):
    """Returns the rewards that sampled completions with these texts would get. If an environment
    rewards a completion, its turns are played again."""
    group = group_of(recipe, item, texts)
    set_rewards(recipe, group, begin_rewards(recipe, group))
    return [sample.rewards for sample in group.samples]


def group_of(recipe, item, texts):
    """Returns a Group of texts that nobody has sampled."""
    samples = [Sample([], [], text=text) for text in texts]
    if environment_rewards(recipe.task):
        for sample, text in zip(samples, texts, strict=True):
            written = [text] if isinstance(text, str) else text[::2]
            _, sample.environment, _ = recipe.turns.play(recipe, item, written)
    return Group(-1, item, [], samples)


def values_of(recipe, group, begun):
    """Returns {name: what the task returned} for each sample. A group's None is one for each."""
    task, size = recipe.task, len(group.samples)
    found, columns = results_of(recipe, group, begun), []
    if environment_rewards(task):
        columns.append([sample.environment for sample in group.samples])
    if hasattr(task, "rewards"):
        columns.append(found[:size])
    if hasattr(task, "group_rewards"):
        together = [None] * size if found[-1] is None else found[-1]
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


# --- Calls ----------------------------------------------------------------------------
def begin(seconds, calls):
    """Begins those of `calls`, [(function, *arguments)], whose function is async. Returns
    [(call, its Future, or None)]."""
    futures = [None] * len(calls)
    for number, call in enumerate(calls):
        if inspect.iscoroutinefunction(call[0]):
            from grpo.async_calls import begin_async

            futures[number] = begin_async(seconds, *call)
    return list(zip(calls, futures, strict=True))


def results(seconds, what, begun, *, shared=True):
    """Returns what the calls return, in order, or the error that one has raised; TooSlow if it
    takes longer than `seconds`, which plain calls share unless `shared` is false. `begun` is
    begin's result."""
    found, left, end = [], seconds, time.monotonic() + seconds + GRACE_SECONDS  # of blocked loops
    with announced(what):
        for call, future in begun:
            began = time.monotonic()
            try:
                if future:
                    found.append(future.result(max(0, end - began)))
                else:
                    found.append(call_plain(left if shared else seconds, call))
            except KeyboardInterrupt:  # the user's
                raise
            except BaseException as error:  # noqa: BLE001 (of any kind)
                is_late = future and isinstance(error, TimeoutError)  # it raises no other
                found.append(TooSlow(seconds) if is_late else error)
            left -= 0 if future else time.monotonic() - began
    return found


def call_plain(seconds, call):
    """Returns what a plain call returns. Raises TooSlow."""
    if seconds <= 0:  # others have used them
        raise TooSlow(seconds)
    (function, *arguments), began = call, time.monotonic()
    with timely(seconds):
        found = function(*arguments)
    if time.monotonic() - began > seconds:  # the function has caught TooSlow
        raise TooSlow(seconds)
    return found


@contextlib.contextmanager
def timely(seconds):
    """Raises TooSlow in the block after `seconds`. The line that runs then is printed, also of C
    code that does not return to Python. If such code computes, the process ends once it has used so
    many seconds, and GRACE_SECONDS, of all cores' time; if it sleeps, others log that they wait. A
    block that sets another alarm, as math-verify does, or catches TooSlow must look at the clock.
    Sets no limit outside the main thread; blocks do not nest."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(*_):
        raise TooSlow(seconds)

    before = signal.signal(signal.SIGALRM, ring)
    faulthandler.register(signal.SIGALRM, sys.__stderr__, all_threads=False, chain=True)
    # Threads of torch add to this time, so a single one may take as long as all cores together
    signal.setitimer(signal.ITIMER_VIRTUAL, os.cpu_count() * (seconds + GRACE_SECONDS))
    # Again and again, as Python drops what a handler raises within a hook of fork() or a __del__
    signal.setitimer(signal.ITIMER_REAL, seconds, GRACE_SECONDS)
    try:
        yield
    finally:
        try:
            signal.setitimer(signal.ITIMER_REAL, 0)
        finally:  # also if the alarm rings here
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            faulthandler.unregister(signal.SIGALRM)
            signal.signal(signal.SIGALRM, before)
