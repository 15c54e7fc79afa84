"""Loads a task: checks its file, and makes its prompts (rewards.py computes its rewards).

Trainer, workers, evaluate.py and `python -m tasks` use it. Everything that a task returns is
checked: a TaskError names the file, the function, what it returned, and what it must return. Torch
is imported only when a tokenizer is needed, so that a mistake in the file is reported at once.
"""

import contextlib
import datetime
import importlib.util
import itertools
import json
import math
import random
import re
import statistics
import sys
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path

from grpo.constants import real
from grpo.faults import TaskError, called, task_file
from grpo.log import announced, say
from grpo.rewards import begin_rewards, environment_rewards, group_of, values_of
from grpo.sample import Question

# The day that a chat template shows by strftime_now, on every machine and in every year: the one to
# which Llama 3.2's template falls back
DAY = datetime.date(2024, 7, 26)
TAG = re.compile(r"([<\[])([\w:-]+)[>\]]\s*$")  # such as "<think>\n", at a prompt's end
THINKS = re.compile("think|thought|reason|reflect|analysis|scratchpad", re.IGNORECASE)
ROLES = {"assistant", "model", "bot", "gpt", "ai"}  # a template may write a role as a tag


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
    return task


def check_task_file(name):
    """Raises SystemExit if the task's file does not exist. Does not import it."""
    if name.endswith(".py"):
        found = Path(name).expanduser().is_file()
    else:
        found = f"tasks.{name}" in sys.modules or name in task_files()
    if not found:
        meant = "".join(f": did you mean {x}?" for x in get_close_matches(name, task_files(), n=1))
        raise SystemExit(f"TASK = {name!r}: there is no file {task_file(name)}{meant}")


def module_at(path):
    """Returns the module in the file `path`, which can import from its folder."""
    file = Path(path).expanduser().resolve()
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))  # last: it must not shadow Python's modules
    spec = importlib.util.spec_from_file_location(name := module_name(file), file)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
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
@dataclass(frozen=True)
class Recipe:
    """The task, its prompts, and the constants: the same in the trainer and in all workers.
    prepare.recipe_of makes it."""

    c: object  # the Constants, or a changed copy of them (others)
    task: object  # the module tasks/NAME.py, or at a path
    prompts: list = ()  # Questions: the training split's, in a run
    weights: dict | None = None  # {reward: weight}: REWARD_WEIGHTS, or the task's (resolved)
    outcome: str = ""  # the reward that decides correctness: OUTCOME, or the task's (resolved)
    turns: object = None  # the module options/turns/turns.py, if there may be several turns
    tools: list | None = None  # the schemas of TOOLS
    parse: object = None  # the tokenizer's parse_response, if it reads calls of TOOLS

    def others(self, **changes):
        """Returns a copy of the recipe with some constants changed."""
        return replace(self, c=self.c.but(**changes))

    @property
    def chat_options(self):
        """The chat template's options: those in CHAT_TEMPLATE, the TOOLS, and a clock that stands
        still (DAY)."""
        tools = {"tools": self.tools} if self.tools else {}
        return {"strftime_now": DAY.strftime} | tools | self.c.CHAT_TEMPLATE

    def resolved(self):
        """Returns a copy with weights and outcome: REWARD_WEIGHTS and OUTCOME of the trainer, else
        of the task. Without them each reward weighs 1 (an empty completion shows the names), and
        the outcome is the only reward or "correctness". Raises TaskError if they do not fit."""
        c, task = self.c, self.task
        weights = c.REWARD_WEIGHTS or getattr(task, "REWARD_WEIGHTS", None)
        if weights is None:
            group = group_of(self, self.prompts[0].item, [""])
            (empty,) = values_of(self, group, begin_rewards(self, group))
            weights = dict.fromkeys(empty, 1.0)
        if c.REWARD_WEIGHTS == {}:  # rewards are only logged, and OUTCOME evaluated
            weights = dict.fromkeys(weights, 0.0)
        if not (weights and isinstance(weights, dict) and all(map(real, weights.values()))):
            what = "REWARD_WEIGHTS, or else the rewards of an empty completion,"
            raise TaskError(c.TASK, what, f"is {weights!r}", "be {name: number}")
        set_to = getattr(task, "OUTCOME", None) if c.OUTCOME is None else c.OUTCOME
        default = next(iter(weights)) if len(weights) == 1 else "correctness"
        outcome = default if set_to is None else set_to
        if outcome not in weights:
            must = f"name the reward that is above 0 if an answer is right, one of {list(weights)}"
            raise TaskError(c.TASK, "OUTCOME, in the task or the trainer,", f"is {set_to!r}", must)
        return replace(self, weights=weights, outcome=outcome)


# --- Prompts --------------------------------------------------------------------------
def load_split(recipe, split, tokenizer):
    """Returns the Questions of the split, without prompts over MAX_PROMPT_TOKENS.
    Raises SystemExit if the task's questions are not valid, or if none fits."""
    from grpo.models import config_of

    c = recipe.c
    items = load_items(c.TASK, recipe.task, split)
    prompts, faults = [], []
    for index, item in enumerate(items):
        try:
            prompts.append(Question(index, item, *prompt_of(recipe, item, tokenizer)))
        except TaskError as fault:
            faults.append(fault)
    if faults and not prompts:
        raise faults[0]  # of messages(), or of the chat template
    if faults:
        first = "".join(f"\n  {fault}" for fault in faults[:3])
        what = f"{len(faults)} of the {len(items)} items of load({split!r}) are wrong"
        raise SystemExit(f"{what}: correct them, or leave them out{first}")
    lengths = sorted(len(prompt.ids) for prompt in prompts)
    rows = getattr(config_of(c.MODEL), "vocab_size", math.inf)
    known, high = [p for p in prompts if max(p.ids) < rows], max(max(p.ids) for p in prompts)
    if strange := len(prompts) - len(known):
        say(f"{strange} questions are left out: {c.MODEL} has no embedding for token {high}")
    prompts = [prompt for prompt in known if len(prompt.ids) <= c.MAX_PROMPT_TOKENS]
    same = len(prompts) - len(different(prompts))
    say(
        f"{c.TASK}/{split}: {len(items)} questions, {f'{same} of them duplicates, ' * (same > 0)}"
        f"{len(known) - len(prompts)} left out as too"
        f" long; the shortest prompt has {lengths[0]} tokens, the median"
        f" {statistics.median_low(lengths)}, the longest {lengths[-1]}"
    )
    if not prompts:
        raise SystemExit(
            f"no question fits MAX_PROMPT_TOKENS = {c.MAX_PROMPT_TOKENS}: raise it;"
            f" {lengths[-1]} is enough for all questions"
        )
    return prompts


def different(prompts, most=None):
    """Returns the prompts without repetitions, because repeated questions make an accuracy no more
    precise. Prompts of equal ids differ if their items do: a game's secret is only there. Of more
    than `most`, takes one by chance from each of as many equal parts: a file may be sorted."""
    whole = lambda x: x.tolist() if hasattr(x, "tolist") else repr(x)  # it cuts long arrays
    # JSON has these whole, but no keys such as (1, 2)
    text = lambda p: json.dumps([p.ids, repr(p.item), p.item], default=whole, skipkeys=True)
    found = list({hash(text(p)): p for p in reversed(prompts)}.values())[::-1]
    if not most or most >= len(found):
        return found
    draw, ends = random.Random(0), [part * len(found) // most for part in range(most + 1)]
    return [found[draw.randrange(*part)] for part in itertools.pairwise(ends)]


def load_questions(recipe, tokenizer):
    """Returns the different Questions of the evaluation; [] if EVAL_STEPS is 0. Logs how many of
    them are trained on."""
    c = recipe.c
    if not c.EVAL_STEPS:
        return []
    found = different(load_split(recipe, c.EVAL_SPLIT, tokenizer), c.EVAL_QUESTIONS)
    trained = {tuple(prompt.ids) for prompt in recipe.prompts}
    if known := sum(tuple(prompt.ids) in trained for prompt in found):
        say(
            f"{known} of the {len(found)} questions of the evaluation are also trained on, so the"
            f" accuracy is not that of new questions: load({c.EVAL_SPLIT!r}) should return others"
        )
    return found


def load_items(name, task, split):
    call, must = f"load({split!r})", 'return a list of dicts, for "train" and EVAL_SPLIT'
    are_many = lambda got: hasattr(got, "__iter__")
    loaded = lambda: called(name, call, must, lambda: task.load(split), are_many)
    with announced(f"{call} of {task_file(name)}"):
        items = called(name, call, must, lambda: list(loaded()), bool)  # a generator's code, too
    for item in items:
        if not isinstance(item, dict):
            raise TaskError(name, call, f"returned {item!r:.500}", must)
    return items


def load_chat(name, task, item):
    must = 'return a list of {"role": text, "content": text}'
    return called(name, f"messages({item!r:.500})", must, lambda: task.messages(item), is_chat)


def is_chat(chat):
    are_dicts = isinstance(chat, list | tuple) and all(isinstance(m, dict) for m in chat)
    texts = [m.get(key) for m in chat for key in ("role", "content")] if are_dicts else []
    return texts and all(isinstance(text, str) for text in texts)


def prompt_of(recipe, item, tokenizer):
    """Returns (the prompt's ids, how it opens the answer): by a last message of the assistant, or
    by a tag of the chat template. TaskError if the template refuses the chat."""
    from grpo.models import prompt_ids

    c, chat = recipe.c, load_chat(recipe.c.TASK, recipe.task, item)
    must = f"return a chat that MODEL = {c.MODEL!r} accepts with CHAT_TEMPLATE = {c.CHAT_TEMPLATE}"
    what, options = f"messages({item!r:.500}) in the chat template", recipe.chat_options
    ids = called(c.TASK, what, must, lambda: prompt_ids(tokenizer, chat, **options))
    if chat[-1]["role"] != "assistant" or not chat[-1]["content"]:
        return ids, opened_tag(tokenizer, ids)
    content, text = chat[-1]["content"], tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    return ids, content if text.endswith(content) else content.strip()  # as the model sees it


def opened_tag(tokenizer, ids):
    """Returns the tag that the chat template has opened at the end of a prompt's `ids`, with the
    space after it, or "". The model never writes that tag ("<think>\n": DeepSeek-R1's distilled
    models, Qwen3-Thinking). Other tags than those for thoughts count if they can be closed."""
    found = tokenizer.chat_template and TAG.search(tokenizer.decode(ids[-16:]))
    if not found or found[2].lower() in ROLES:
        return ""
    end = found[0].strip().replace(found[1], f"{found[1]}/", 1)  # </think>
    known = THINKS.search(found[2]) or end in str(tokenizer.chat_template)
    return found[0] if known or end in tokenizer.get_vocab() else ""  # the last is slow
