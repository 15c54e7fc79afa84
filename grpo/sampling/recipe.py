"""What is sampled and how it is rewarded: task, prompts, settings."""

import hashlib
import importlib
import json
import traceback
from dataclasses import dataclass

from grpo.log import say
from grpo.models import prompt_ids
from grpo.sampling.rollout import rewarded


def load_task(name):
    """-> the module tasks/NAME.py. Raises SystemExit if there is none, or it lacks a function."""
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


def load_prompts(name, task, split, tokenizer, max_prompt_tokens):
    """-> [(index, item, prompt_ids)] of the split, without longer prompts. Raises SystemExit with a
    sentence where the task gives no questions, or none that fits."""
    items = load_items(name, task, split)
    ids = [prompt_ids(tokenizer, chat_of(name, task, item["question"])) for item in items]
    prompts = [
        (index, item, prompt)
        for index, (item, prompt) in enumerate(zip(items, ids, strict=True))
        if len(prompt) <= max_prompt_tokens
    ]
    say(f"{name}/{split}: {len(items)} questions, {len(items) - len(prompts)} left out as too long")
    if not prompts:
        raise SystemExit(f"no question fits MAX_PROMPT_TOKENS = {max_prompt_tokens}: raise it")
    return prompts


def load_items(name, task, split):
    """-> the task's items of the split. Raises SystemExit where load() gives anything else."""
    call, splits = f"tasks/{name}.py: load({split!r})", 'for "train" and EVAL_SPLIT'
    must = f'it must return a list of dicts, each with a "question", {splits}'
    try:
        items = list(task.load(split))
    except Exception as error:
        raise SystemExit(f"{call} failed with {error!r}{line_of(task, error)}: {must}") from error
    if not items:
        raise SystemExit(f"{call} returned no item: {must}")
    for number, item in enumerate(items):
        if not (isinstance(item, dict) and "question" in item):
            raise SystemExit(f"{call} returned {item!r:.500} as item {number}: {must}")
    return items


def chat_of(name, task, question):
    """-> the task's messages for a question. Raises SystemExit where messages() gives no chat."""
    call = f"tasks/{name}.py: messages({question!r:.500})"
    must = 'it must return a list of {"role": ..., "content": ...}, both texts'
    try:
        chat = task.messages(question)
    except Exception as error:
        raise SystemExit(f"{call} failed with {error!r}{line_of(task, error)}: {must}") from error
    is_chat = isinstance(chat, list | tuple) and chat and all(isinstance(m, dict) for m in chat)
    if not is_chat or not all(isinstance(m.get(k), str) for m in chat for k in ("role", "content")):
        raise SystemExit(f"{call} returned {chat!r:.500}: {must}")
    return chat


def check_rewards(recipe):
    """Has the task reward an empty completion of its first question, before anything heavy is
    loaded. Raises SystemExit where that fails, with its traceback, or gives no such rewards."""
    try:
        rewarded(recipe, recipe.prompts[0][1], [""])
    except RuntimeError as error:
        trace = "".join(traceback.format_exception(error.__cause__))
        must = "a task must reward any completion, and an empty one can be sampled"
        raise SystemExit(f"{trace}{error}: {must}") from error


def line_of(task, error):
    """-> " in line 9", the task's own that led to the error; "" where none did."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [f.lineno for f in frames if f.filename == getattr(task, "__file__", None)]
    return f" in line {lines[-1]}" if lines else ""


@dataclass
class Recipe:
    """What is sampled, and how it is rewarded: the same in the trainer and in all workers."""

    task_name: str
    task: object  # the module tasks/NAME.py
    prompts: list  # [(index, item, prompt ids)] of the training split
    group_size: int
    sample_batch: int  # completions sampled at once
    max_prompt_tokens: int
    max_completion_tokens: int
    temperature: float
    reward_weights: dict
    outcome: str
    skip_flat_groups: bool
    max_refills: int
    seed: int
    stop_tokens: list
    reward_timeout_seconds: float

    def settings(self):
        """-> what a worker must have as the trainer has it, for JSON."""
        texts = json.dumps([[index, ids] for index, _, ids in self.prompts])
        settings = {
            "TASK": self.task_name,
            "GROUP_SIZE": self.group_size,
            "MAX_PROMPT_TOKENS": self.max_prompt_tokens,
            "MAX_COMPLETION_TOKENS": self.max_completion_tokens,
            "TEMPERATURE": self.temperature,
            "REWARD_WEIGHTS": list(self.reward_weights.items()),  # in this order
            "OUTCOME": self.outcome,
            "SKIP_FLAT_GROUPS": self.skip_flat_groups,
            "SEED": self.seed,
            "STOP_TOKENS": self.stop_tokens,
            "prompts (tokenizer, task and its data)": hashlib.sha256(texts.encode()).hexdigest(),
        }
        return json.loads(json.dumps(settings))  # as it comes over the wire
