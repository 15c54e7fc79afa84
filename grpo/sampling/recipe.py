"""The recipe: what is sampled and how it is rewarded, the same in the trainer and in all workers.

Everything that a task returns is checked here: an error names the task's file, what it returned and
what it must return.
"""

import difflib
import functools
import hashlib
import importlib
import importlib.util
import inspect
import json
import math
import numbers
import statistics
import sys
import traceback
from dataclasses import dataclass, replace
from pathlib import Path

import jinja2

from grpo.constants import real, set_for_run, with_constants
from grpo.log import say
from grpo.sampling.reward_timeout import TooSlow, timely

# What a worker must have as the trainer has it, beside task, prompts and REWARD_WEIGHTS
SHARED = "GROUP_SIZE MAX_PROMPT_TOKENS MAX_COMPLETION_TOKENS TEMPERATURE OUTCOME SKIP_FLAT_GROUPS"
SHARED += " STOP_TOKENS STOP_STRINGS"


@dataclass
class Recipe:
    """The task, its prompts, and the constants."""

    c: object  # the constants, as attributes: the trainer's module, or some changed (others)
    task: object  # the module tasks/NAME.py, or at a path
    prompts: list  # [(index, item, prompt ids)] of the training split
    reward_processes: object = None  # start_processes' submit; None: rewards in place

    def others(self, **changes):
        """Returns the recipe with some constants changed."""
        return replace(self, c=with_constants(self.c, **changes))

    def settings(self):
        """Returns what the trainer publishes and a worker compares, as JSON gives it back."""
        prompts = json.dumps([[index, ids] for index, _, ids in self.prompts]).encode()
        settings = {name: getattr(self.c, name) for name in SHARED.split()} | {
            "TASK": Path(self.c.TASK).name,  # a file of one's own may lie elsewhere
            "REWARD_WEIGHTS": list(self.c.REWARD_WEIGHTS.items()),  # in this order
            "prompts (tokenizer, task and its data)": hashlib.sha256(prompts).hexdigest(),
        }
        return json.loads(json.dumps(settings))

    def resolve(self):
        """Sets REWARD_WEIGHTS and OUTCOME where they are None: to the task's; where it has none, to
        1 for each reward of an empty completion, and to the sole reward or "correctness".
        SystemExit if they do not fit."""
        c, task, file = self.c, self.task, task_file(self.c.TASK)
        weights = c.REWARD_WEIGHTS or getattr(task, "REWARD_WEIGHTS", None)
        if weights is None:
            (empty,) = given_rewards(self, self.prompts[0][1], [""])
            weights = dict.fromkeys(empty, 1.0)
        if not (weights and isinstance(weights, dict) and all(map(real, weights.values()))):
            raise SystemExit(f"{file}: REWARD_WEIGHTS = {weights!r} must be numbers by name")
        set_to = getattr(task, "OUTCOME", None) if c.OUTCOME is None else c.OUTCOME
        default = next(iter(weights)) if len(weights) == 1 else "correctness"
        outcome = default if set_to is None else set_to
        if outcome not in weights:
            raise SystemExit(
                f"{file}: OUTCOME = {set_to!r} must name the reward that says right (> 0) or wrong,"
                f" one of {list(weights)}: set it there, or in the trainer"
            )
        skips = "outcome" if c.SKIP_FLAT_GROUPS is True else c.SKIP_FLAT_GROUPS
        values = {"REWARD_WEIGHTS": weights, "OUTCOME": outcome, "SKIP_FLAT_GROUPS": skips}
        set_for_run(vars(c), values)


# --- The task's file ----------------------------------------------------------------
def task_file(name):
    """Returns the path by which errors name a task's file.

    >>> task_file("gsm8k"), task_file("my/task.py")
    ('tasks/gsm8k.py', 'my/task.py')
    """
    return name if name.endswith(".py") else f"tasks/{name}.py"


def load_task(name):
    """Returns the module tasks/NAME.py, or that at a path such as my/task.py, from whose folder it
    may import. Raises SystemExit if it is missing or lacks a function."""
    file = task_file(name)
    try:
        task = module_at(file) if name == file else importlib.import_module(f"tasks.{name}")
    except ModuleNotFoundError as error:
        near = difflib.get_close_matches(name, task_files(), n=1)
        meant = f": is {near[0]} meant?" if near and error.name == f"tasks.{name}" else ""
        raise SystemExit(
            f"TASK = {name!r}: no {file} that can be imported ({error}){meant}"
        ) from None
    except Exception as error:
        at = line_of(error, file)
        raise SystemExit(f"TASK = {name!r}: {file}{at} can't be imported: {error!r}") from error
    missing = sorted({"load", "messages"} - vars(task).keys())
    if not {"rewards", "group_rewards"} & vars(task).keys():
        missing.append("rewards (or group_rewards)")
    if missing:
        raise SystemExit(f"{file} lacks {', '.join(missing)}; see tasks/gsm8k.py")
    for function, takes in {"rewards": "completion", "group_rewards": "completions"}.items():
        signature = inspect.signature(getattr(task, function, lambda item, given: None))
        try:
            signature.bind(None, None)
        except TypeError:
            must = f"{function}{signature} must be {function}(item, {takes})"
            raise SystemExit(f"{file}: {must}") from None
    if (given := parameter_of(task.messages)) not in ("item", "question"):
        raise SystemExit(
            f"{file}: messages({given}) must be messages(item), which gets the whole dict, or"
            ' messages(question), which gets its "question" alone: the name decides'
        )
    return task


def line_of(error, file):
    """Returns ", line N", where in a task's file an error arose; "" if it was elsewhere."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if Path(frame.filename).name == Path(file).name]
    lines += [error.lineno] if isinstance(error, SyntaxError) else []
    return f", line {lines[-1]}" if lines else ""


@functools.cache
def parameter_of(function):
    """Returns the name of a function's first parameter."""
    return next(iter(inspect.signature(function).parameters), "")


def task_files():
    """Returns {name: path} of the tasks in tasks/, which are the files that have `messages`."""
    folders = map(Path, importlib.import_module("tasks").__path__)
    files = [path for folder in folders for path in sorted(folder.glob("[!_]*.py"))]
    return {file.stem: file for file in files if "messages" in file.read_text("utf-8")}


def module_at(path):
    """Returns the module in the file `path`; what lies beside it can be imported."""
    file = Path(path).expanduser().resolve()
    if not file.is_file():
        raise SystemExit(f"TASK = {path!r}: there is no file {file}")
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))  # last: it must not shadow Python's own modules
    spec = importlib.util.spec_from_file_location(f"task_of_{file.stem}", file)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# --- Questions ----------------------------------------------------------------------
def load_split(c, task, split, tokenizer):
    """Returns [(index, item, prompt ids)] of the split, without prompts over MAX_PROMPT_TOKENS; `c`
    is the trainer's constants. Raises SystemExit if the task has no valid questions, or none fits.
    """
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
            f"no question fits MAX_PROMPT_TOKENS = {c.MAX_PROMPT_TOKENS}: raise it, to"
            f" {lengths[-1]} for all of them"
        )
    return prompts


def load_questions(c, task, tokenizer):
    """Returns the evaluation's questions, as load_split; none if EVAL_STEPS is 0."""
    if not c.EVAL_STEPS:
        return []
    return load_split(c, task, c.EVAL_SPLIT, tokenizer)[: c.EVAL_QUESTIONS]


def ids_of(c, task, item, tokenizer):
    """Returns the prompt's ids. SystemExit if the model's chat template refuses the chat."""
    from grpo.models import prompt_ids  # with torch, seconds that a list of tasks needs not

    chat = load_chat(c.TASK, task, item)
    try:
        return prompt_ids(tokenizer, chat, **c.CHAT_TEMPLATE)
    except (jinja2.TemplateError, TypeError) as error:
        raise SystemExit(
            f"the chat template of MODEL = {c.MODEL!r}, with CHAT_TEMPLATE = {c.CHAT_TEMPLATE!r},"
            f" refuses what {task_file(c.TASK)}: messages() returned, {chat!r:.500}: {error}"
        ) from error


def load_items(name, task, split):
    call, splits = f"{task_file(name)}: load({split!r})", 'for "train" and EVAL_SPLIT'
    needed = parameter_of(task.messages) == "question"
    question = ', each with a "question" (or write messages(item))' if needed else ""
    must = f"it must return a list of dicts{question}, {splits}"
    try:
        items = list(task.load(split))
    except Exception as error:  # a mistake there, or no such split
        at = line_of(error, task_file(name))
        raise SystemExit(f"{call} failed with {error!r}{at}; {must}") from error
    if not items:
        raise SystemExit(f"{call} returned no item: {must}")
    for number, item in enumerate(items):
        if not isinstance(item, dict) or needed and "question" not in item:
            raise SystemExit(f"{call} returned {item!r:.500} as item {number}: {must}")
    return items


def load_chat(name, task, item):
    given = item["question"] if parameter_of(task.messages) == "question" else item
    call = f"{task_file(name)}: messages({given!r:.500})"
    must = 'it must return a list of {"role": ..., "content": ...}, both texts'
    try:
        chat = task.messages(given)
    except Exception as error:
        at = line_of(error, task_file(name))
        raise SystemExit(f"{call} failed with {error!r}{at}: {must}") from error
    is_chat = isinstance(chat, list | tuple) and chat and all(isinstance(m, dict) for m in chat)
    if not is_chat or not all(isinstance(m.get(k), str) for m in chat for k in ("role", "content")):
        raise SystemExit(f"{call} returned {chat!r:.500}: {must}")
    return chat


# --- Rewards ------------------------------------------------------------------------
def reward_group(recipe, item, texts):
    """Returns, for each completion's text, a dict of floats in the order of REWARD_WEIGHTS; NaN is
    a reward that does not apply to it.

    Raises RuntimeError if the task raises, which is a bug and not a reward, or takes too long;
    SystemExit if the rewards are not what REWARD_WEIGHTS names.
    """
    given = given_rewards(recipe, item, texts)
    return [named_floats(recipe, g, item, text) for g, text in zip(given, texts, strict=True)]


def given_rewards(recipe, item, texts):
    """Returns what the task's rewards() and group_rewards() give, a dict by name for each text."""
    task, file = recipe.task, task_file(recipe.c.TASK)
    what = f"the rewards of question {item.get('question', item)!r:.80}, {file},"
    rewards, call, together = [], "rewards", [{}] * len(texts)
    try:
        with timely(recipe.c.REWARD_TIMEOUT_SECONDS, what):
            if hasattr(task, "rewards"):
                for text in texts:
                    rewards.append(task.rewards(item, text))
            if hasattr(task, "group_rewards"):
                call = "group_rewards"
                together = task.group_rewards(item, texts)
    except (Exception, TooSlow) as error:
        seen = f"completions {texts!r:.2000}"
        if call == "rewards":
            seen = f"completion {texts[: len(rewards) + 1][-1]!r}"
        remedy = " (REWARD_TIMEOUT_SECONDS)" if isinstance(error, TooSlow) else ""
        raise RuntimeError(
            f"{file}: {call}() failed with {error!r}{remedy} for the question {item!r} and the"
            f" {seen}"
        ) from error
    must = f"it must return a list with a reward, or a dict of rewards, for each of {len(texts)}"
    if isinstance(together, str | dict) or not hasattr(together, "__len__"):
        raise SystemExit(f"{file}: group_rewards() returned {together!r:.500}: {must} completions")
    if len(together) != len(texts):
        raise SystemExit(f"{file}: group_rewards() returned {len(together)} values: {must}")
    merged = []
    for one, other in zip(map(by_name, rewards or [{}] * len(texts)), map(by_name, together)):
        if both := one.keys() & other.keys():
            raise SystemExit(f"{file}: rewards() and group_rewards() both return {sorted(both)}")
        merged.append(one | other)
    return merged


def by_name(rewards):
    return rewards if isinstance(rewards, dict) else {"reward": rewards}


def named_floats(recipe, rewards, item, text):
    names = list(recipe.c.REWARD_WEIGHTS)
    if rewards.keys() == recipe.c.REWARD_WEIGHTS.keys():
        floats = {name: as_float(rewards[name]) for name in names}
        if all(rewards[name] is None or math.isfinite(floats[name]) for name in names):
            return floats
    raise SystemExit(
        f"{task_file(recipe.c.TASK)}: {functions_of(recipe.task)} returned {rewards!r:.500} for"
        f" the question {item!r} and the completion {text!r}: it must return a dict of numbers"
        " below 1e30, True, False or None (does not apply) by the names in REWARD_WEIGHTS,"
        f' {names}, or one of these alone, which is called "reward"'
    )


def functions_of(task):
    """Returns the names of the functions that reward, as "rewards() and group_rewards()"."""
    given = [f"{name}()" for name in ("rewards", "group_rewards") if hasattr(task, name)]
    return " and ".join(given)


def as_float(value):
    """Returns a number (Python's, NumPy's or torch's) or truth value as a float; else NaN, also for
    one beyond 1e30: the wire's float32 ends at 3e38."""
    if getattr(value, "ndim", None) == 0:
        value = value.item()
    is_small = isinstance(value, numbers.Real) and abs(value) < 1e30
    return float(value) if is_small else math.nan


def total(rewards, weights):
    """Returns the weighted sum of a completion's rewards (floats by name) that apply, as TRL's
    nansum; NaN where none does.

    >>> total({"a": 1.0, "b": math.nan}, {"a": 2.0, "b": 1.0}), total({"b": math.nan}, {"b": 1.0})
    (2.0, nan)
    """
    values = [weights[name] * value for name, value in rewards.items() if not math.isnan(value)]
    return sum(values) if values else math.nan
