"""TRL's reward functions, unchanged: reward_func(prompts, completions, **columns).

    pip install trl==1.16.0 math-verify    # only for TRL's functions
    python -m tasks trl                    # or my/trl.py

Copy this file and set DATA, functions(), REWARD_WEIGHTS and OUTCOME. With accuracy_reward set
REWARD_PROCESSES: hostile LaTeX takes ten seconds, and math-verify's alarm replaces ours. Values are
TRL's (benchmarks/results/trl_rewards.md), but what functions get differs:
- A call has the G completions of one prompt (greedy evaluations: one); TRL's has a whole batch.
- There are no completion_ids and no trainer_state: a function that needs them fails at the start.
- log_extra and log_metric do nothing.
- A text as a prompt becomes the user's message in the chat template; TRL has no template then.
- If the template opens the answer, as with <think>, completions begin with that; TRL's do not.
"""

import asyncio
import inspect

from tasks.data import records

DATA = "trl-lib/DeepMath-103K"  # on the hub; or a file, or a folder with SPLIT.jsonl
REWARD_WEIGHTS = {"accuracy": 1.0, "format": 0.1}
OUTCOME = "accuracy"
LOOP = asyncio.Runner()  # one for all calls, as in TRL: a client may keep its connections


def functions():
    """Returns {name: reward function, plain or async}, imported here."""
    from trl.rewards import accuracy_reward, think_format_reward

    return {"accuracy": accuracy_reward, "format": think_format_reward}


def load(split):
    """Returns the items of `split`: the "prompt", a text or messages, and the other columns."""
    return records(DATA, split)


def messages(item):
    """Returns the item's prompt as a chat."""
    prompt = item["prompt"]
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def group_rewards(item, completions):
    """Returns {name: a number, or None} for each completion, from one call of each function."""
    if not isinstance(item["prompt"], str):
        completions = [[{"role": "assistant", "content": text}] for text in completions]
    columns = {name: [value] * len(completions) for name, value in item.items()}
    columns["prompts"], columns["completions"] = columns.pop("prompt"), completions
    ignored = dict.fromkeys(["log_extra", "log_metric"], lambda name, value: None)
    found = {name: function(**columns, **ignored) for name, function in functions().items()}
    found = {n: LOOP.run(v) if inspect.iscoroutine(v) else v for n, v in found.items()}
    return [dict(zip(found, values, strict=True)) for values in zip(*found.values(), strict=True)]
