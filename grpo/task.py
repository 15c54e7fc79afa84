"""Loads a task: checks its file, makes its prompts, and computes its rewards.

Trainer, workers, evaluate.py and `python -m tasks` use it. Everything that a task returns is
checked: a TaskError names the file, the function, what it returned, and what it must return. Torch
is imported only when a tokenizer is needed, so that a mistake in the file is reported at once.
"""

import contextlib
import datetime
import difflib
import importlib.util
import inspect
import math
import numbers
import statistics
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from grpo.constants import real
from grpo.log import announced, say
from grpo.rewards import (
    FAILED,
    TaskError,
    TooSlow,
    by_name,
    called,
    environment_rewards,
    finished,
    has_turns,
    import_file,
    task_file,
    timely,
)

FUNCTIONS = "load", "messages", "group_rewards", "reply", "gold", "sloppy"
# The day that a chat template shows by strftime_now, on every machine and in every year: the one to
# which Llama 3.2's template falls back
DAY = datetime.date(2024, 7, 26)


# --- The file -------------------------------------------------------------------------
def task_files():
    """Returns {name: path} of the tasks: the files in tasks/ that define `messages`."""
    folders = map(Path, importlib.import_module("tasks").__path__)
    files = [path for folder in folders for path in sorted(folder.glob("[!_]*.py"))]
    return {file.stem: file for file in files if "messages" in file.read_text("utf-8")}


def load_task(name):
    """Returns the module tasks/NAME.py, or the one at a path such as my/task.py, which may import
    from its folder. SystemExit if the file or a function is missing."""
    check_task_file(name)
    by_name = lambda name: importlib.import_module(f"tasks.{name}")
    module = module_at if name.endswith(".py") else by_name
    task = called(name, "the file", "be a module that Python can import", lambda: module(name))
    if hasattr(task, "reply") and hasattr(task, "Environment"):
        raise TaskError(name, "reply()", "stands beside class Environment", "move into that class")
    rewards = "group_rewards" if hasattr(task, "group_rewards") else "rewards"
    for function in ("load", "messages", *[rewards] * (not environment_rewards(task))):
        if not hasattr(task, function):
            raise TaskError(name, function, "is missing", "be a function, as in tasks/gsm8k.py")
    for function, value in vars(task).items():
        if function in FUNCTIONS and inspect.iscoroutinefunction(value):
            must = "be a plain function; only rewards may be async"
            raise TaskError(name, f"{function}()", "can't be async", must)
    if hasattr(task, "TOOLS"):
        from grpo.options.tools import give_tools

        give_tools(name, task)
    return task


def check_task_file(name):
    """Raises SystemExit if the task's file does not exist. Does not import it."""
    if name.endswith(".py"):
        found = Path(name).expanduser().is_file()
    else:
        found = f"tasks.{name}" in sys.modules or name in task_files()
    if not found:
        near = difflib.get_close_matches(name, task_files(), n=1)
        meant = f": did you mean {near[0]}?" if near else ""
        path = "" if name.endswith(".py") else " (a file elsewhere needs its path: TASK=my/task.py)"
        raise SystemExit(f"TASK = {name!r}: there is no task {task_file(name)}{path}{meant}")


def module_at(path):
    """Returns the module in the file `path`, which can import from its folder."""
    file = Path(path).expanduser().resolve()
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))  # last: it must not shadow Python's modules
    import_file(name := module_name(file), file)
    return sys.modules[name]


def module_name(file):
    """Returns the file's own name, so that processes which the task starts can import it, unless
    Python finds another file by that name."""
    with contextlib.suppress(ImportError, ValueError):
        found = importlib.util.find_spec(file.stem)
        if found and found.origin and Path(found.origin).resolve() == file:
            return file.stem
    return f"task_of_{file.stem}"


# --- What a run begins with -------------------------------------------------------------
@dataclass
class Recipe:
    """The task, its prompts, and the constants: the same in the trainer and in all workers."""

    c: object  # the Constants, or a changed copy of them (others)
    task: object  # the module tasks/NAME.py, or at a path
    prompts: list  # [(index, item, prompt ids)] of the training split
    weights: dict | None = None  # {reward: weight}: REWARD_WEIGHTS, or the task's (resolve)
    outcome: str = ""  # the reward that decides correctness: OUTCOME, or the task's (resolve)
    batch: int | None = None  # completions sampled at once: SAMPLE_BATCH, or what fits
    submit: object = None  # calls a reward elsewhere (start_submit); None: here, one by one
    failures: object = None  # Failures, or None: the first failed reward ends the run
    # opening_of, by a prompt's ids: rewards and reply() see it before a completion
    opening: object = staticmethod(lambda ids: "")

    def others(self, batch=None, **changes):
        """Returns a copy of the recipe with some constants changed, and `batch` if it is given."""
        return replace(self, c=self.c.but(**changes), batch=batch or self.batch)

    @property
    def has_turns(self):
        """Whether a completion may have several turns."""
        return has_turns(self.task)

    @property
    def chat_options(self):
        return chat_options(self.c, self.task)

    def resolve(self):
        """Sets weights and outcome: to REWARD_WEIGHTS and OUTCOME, else to the constants of the
        task, else to a weight of 1 for each reward of an empty completion, and to the only reward
        or "correctness". Raises TaskError if they do not fit."""
        c, task = self.c, self.task
        weights = c.REWARD_WEIGHTS or getattr(task, "REWARD_WEIGHTS", None)
        if weights is None:
            item = self.prompts[0][1]
            (empty,) = rewards_by_name(self, item, [""], from_environments=played(self, item, [""]))
            weights = dict.fromkeys(empty, 1.0)
        if c.REWARD_WEIGHTS == {}:  # rewards are only logged, and OUTCOME evaluated
            weights = dict.fromkeys(weights, 0.0)
        if not (weights and isinstance(weights, dict) and all(map(real, weights.values()))):
            raise TaskError(c.TASK, "REWARD_WEIGHTS", f"is {weights!r}", "be {name: number}")
        set_to = getattr(task, "OUTCOME", None) if c.OUTCOME is None else c.OUTCOME
        default = next(iter(weights)) if len(weights) == 1 else "correctness"
        outcome = default if set_to is None else set_to
        if outcome not in weights:
            must = f"name the reward that is above 0 if an answer is right, one of {list(weights)}"
            raise TaskError(c.TASK, "OUTCOME, in the task or the trainer,", f"is {set_to!r}", must)
        self.weights, self.outcome = weights, outcome


# --- Prompts --------------------------------------------------------------------------
def chat_options(c, task):
    """Returns the options of the chat template: CHAT_TEMPLATE's, the task's TOOLS, and a clock that
    stands still (DAY)."""
    tools = {"tools": task.TOOL_SCHEMAS} if hasattr(task, "TOOL_SCHEMAS") else {}
    return {"strftime_now": DAY.strftime} | tools | c.CHAT_TEMPLATE


def load_split(c, task, split, tokenizer):
    """Returns [(index, item, prompt ids)] of the split, without prompts over MAX_PROMPT_TOKENS.
    Raises SystemExit if the task's questions are not valid, or if none fits."""
    items = load_items(c.TASK, task, split)
    prompts = [(i, item, ids_of(c, task, item, tokenizer)) for i, item in enumerate(items)]
    lengths = sorted(len(ids) for _, _, ids in prompts)
    prompts = [prompt for prompt in prompts if len(prompt[2]) <= c.MAX_PROMPT_TOKENS]
    say(
        f"{c.TASK}/{split}: {len(items)} questions, {len(items) - len(prompts)} left out as too"
        f" long; the shortest prompt has {lengths[0]} tokens, the median"
        f" {statistics.median_low(lengths)}, the longest {lengths[-1]}"
    )
    if not prompts:
        raise SystemExit(
            f"no question fits MAX_PROMPT_TOKENS = {c.MAX_PROMPT_TOKENS}: raise it;"
            f" {lengths[-1]} is enough for all questions"
        )
    return prompts


def load_questions(recipe, tokenizer):
    """Returns the evaluation's questions, in load_split's form; [] if EVAL_STEPS is 0. Logs how
    many of them are trained on."""
    c = recipe.c
    if not c.EVAL_STEPS:
        return []
    found = load_split(c, recipe.task, c.EVAL_SPLIT, tokenizer)[: c.EVAL_QUESTIONS]
    trained = {tuple(ids) for _, _, ids in recipe.prompts}
    if known := sum(tuple(ids) in trained for _, _, ids in found):
        say(
            f"{known} of the {len(found)} questions of the evaluation are also trained on, so the"
            f" accuracy is not that of new questions: load({c.EVAL_SPLIT!r}) should return others"
        )
    return found


def load_items(name, task, split):
    call, must = f"load({split!r})", 'return a list of dicts, for "train" and EVAL_SPLIT'
    items = called(name, call, must, lambda: list(task.load(split)))
    if not items:
        raise TaskError(name, call, "returned no items", must)
    for item in items:
        if not isinstance(item, dict):
            raise TaskError(name, call, f"returned {item!r:.500}", must)
    return items


def load_chat(name, task, item):
    must = 'return a list of {"role": text, "content": text}'
    return called(
        name, f"messages({item!r:.500})", must, lambda: task.messages(item), holds=is_chat
    )


def is_chat(chat):
    are_dicts = isinstance(chat, list | tuple) and all(isinstance(m, dict) for m in chat)
    texts = [m.get(key) for m in chat for key in ("role", "content")] if are_dicts else []
    return texts and all(isinstance(text, str) for text in texts)


def ids_of(c, task, item, tokenizer):
    """Returns the prompt's ids. TaskError if the model's chat template refuses the chat."""
    from grpo.models import prompt_ids

    chat = load_chat(c.TASK, task, item)
    must = f"return a chat that MODEL = {c.MODEL!r} accepts with CHAT_TEMPLATE = {c.CHAT_TEMPLATE}"
    what, options = f"messages({item!r:.500}) in the chat template", chat_options(c, task)
    return called(c.TASK, what, must, lambda: prompt_ids(tokenizer, chat, **options))


# --- Rewards --------------------------------------------------------------------------
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
