"""The recipe: what is sampled and how it is rewarded, the same in the trainer and in all workers.

Everything that a task returns is checked here: an error names the task's file, what it returned and
what it must return.
"""

import hashlib
import importlib
import json
import math
import numbers
from dataclasses import dataclass

from grpo.log import say
from grpo.models import prompt_ids
from grpo.sampling.reward_timeout import TooSlow, timely

# What a worker must have as the trainer has it, beside task, prompts and REWARD_WEIGHTS
SHARED = ("group_size", "max_prompt_tokens", "max_completion_tokens", "temperature", "outcome")
SHARED += ("skip_flat_groups", "seed", "stop_tokens", "stop_strings")


@dataclass
class Recipe:
    """The task, its prompts, and the trainer's constants that sampling needs, in lower case."""

    task_name: str
    task: object  # the module tasks/NAME.py
    prompts: list  # [(index, item, prompt ids)] of the training split
    group_size: int
    sample_batch: int
    max_prompt_tokens: int
    max_completion_tokens: int
    temperature: float
    reward_weights: dict
    outcome: str
    skip_flat_groups: str | bool  # "outcome", "reward" or False
    seed: int
    stop_tokens: list
    stop_strings: list
    reward_timeout_seconds: float
    reward_processes: object = None  # start_processes' submit; None: rewards in place

    def settings(self):
        """Returns what the trainer publishes and a worker compares, as JSON gives it back."""
        prompts = json.dumps([[index, ids] for index, _, ids in self.prompts]).encode()
        settings = {name.upper(): getattr(self, name) for name in SHARED} | {
            "TASK": self.task_name,
            "REWARD_WEIGHTS": list(self.reward_weights.items()),  # in this order
            "prompts (tokenizer, task and its data)": hashlib.sha256(prompts).hexdigest(),
        }
        return json.loads(json.dumps(settings))


# --- Questions ----------------------------------------------------------------------
def load_task(name):
    """Returns the module tasks/NAME.py. Raises SystemExit if it is missing or lacks a function."""
    try:
        task = importlib.import_module(f"tasks.{name}")
    except ModuleNotFoundError as error:
        raise SystemExit(
            f"TASK = {name!r}: no tasks/{name}.py that can be imported ({error})"
        ) from None
    missing = {"load", "messages", "rewards"} - vars(task).keys()
    if missing:
        raise SystemExit(f"tasks/{name}.py lacks {', '.join(sorted(missing))}; see tasks/gsm8k.py")
    return task


def load_split(c, task, split, tokenizer):
    """Returns [(index, item, prompt ids)] of the split, without prompts over MAX_PROMPT_TOKENS; `c`
    is the trainer's constants. Raises SystemExit if the task has no valid questions, or none fits.
    """
    items, prompts = load_items(c.TASK, task, split), []
    for index, item in enumerate(items):
        ids = prompt_ids(tokenizer, load_chat(c.TASK, task, item["question"]))
        if len(ids) <= c.MAX_PROMPT_TOKENS:
            prompts.append((index, item, ids))
    left_out = len(items) - len(prompts)
    say(f"{c.TASK}/{split}: {len(items)} questions, {left_out} left out as too long")
    if not prompts:
        raise SystemExit(f"no question fits MAX_PROMPT_TOKENS = {c.MAX_PROMPT_TOKENS}: raise it")
    return prompts


def load_items(name, task, split):
    call, splits = f"tasks/{name}.py: load({split!r})", 'for "train" and EVAL_SPLIT'
    must = f'it must return a list of dicts, each with a "question", {splits}'
    try:
        items = list(task.load(split))
    except (
        KeyError,
        ValueError,
    ) as error:  # as dicts and data sets say that there is no such split
        raise SystemExit(f"{call} failed with {error!r}; {must}") from error
    if not items:
        raise SystemExit(f"{call} returned no item: {must}")
    for number, item in enumerate(items):
        if not (isinstance(item, dict) and "question" in item):
            raise SystemExit(f"{call} returned {item!r:.500} as item {number}: {must}")
    return items


def load_chat(name, task, question):
    call = f"tasks/{name}.py: messages({question!r:.500})"
    must = 'it must return a list of {"role": ..., "content": ...}, both texts'
    chat = task.messages(question)
    is_chat = isinstance(chat, list | tuple) and chat and all(isinstance(m, dict) for m in chat)
    if not is_chat or not all(isinstance(m.get(k), str) for m in chat for k in ("role", "content")):
        raise SystemExit(f"{call} returned {chat!r:.500}: {must}")
    return chat


# --- Rewards ------------------------------------------------------------------------
def reward_group(recipe, item, texts):
    """Returns, for each completion's text, a dict of floats in the order of REWARD_WEIGHTS.

    Raises RuntimeError if the task raises, which is a bug and not a reward, or takes too long;
    SystemExit if the rewards are not what REWARD_WEIGHTS names.
    """
    rewards, question = [], item.get("question")
    what = f"the rewards of question {question!r:.80}, tasks/{recipe.task_name}.py,"
    try:
        with timely(recipe.reward_timeout_seconds, what):
            for text in texts:
                rewards.append(named_floats(recipe, recipe.task.rewards(item, text), item, text))
    except (Exception, TooSlow) as error:
        remedy = " (REWARD_TIMEOUT_SECONDS)" if isinstance(error, TooSlow) else ""
        raise RuntimeError(
            f"tasks/{recipe.task_name}.py: rewards() failed with {error!r}{remedy} for the question"
            f" {item!r} and the completion {texts[min(len(rewards), len(texts) - 1)]!r}"
        ) from error
    return rewards


def named_floats(recipe, rewards, item, text):
    names = list(recipe.reward_weights)
    if isinstance(rewards, dict) and rewards.keys() == recipe.reward_weights.keys():
        floats = {name: as_float(rewards[name]) for name in names}
        if all(map(math.isfinite, floats.values())):
            return floats
    raise SystemExit(
        f"tasks/{recipe.task_name}.py: rewards() returned {rewards!r:.500} for the question"
        f" {item!r} and the completion {text!r}: it must return a dict of finite numbers, or True"
        f" and False, by the names in REWARD_WEIGHTS, {names}"
    )


def as_float(value):
    """Returns a number (Python's, NumPy's or torch's) or truth value as a float; else NaN."""
    if getattr(value, "ndim", None) == 0:
        value = value.item()
    return float(value) if isinstance(value, numbers.Real) else math.nan
