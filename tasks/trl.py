"""TRL's reward functions, unchanged: reward_func(prompts, completions, **columns).

    pip install trl==1.16.0 math-verify    # only for TRL's functions
    python -m tasks trl                    # or my/trl.py

Copy this file and set DATA, functions(), REWARD_WEIGHTS and OUTCOME. accuracy_reward may need ten
seconds for hostile LaTeX, and math-verify's alarm replaces that of our time limit. Values are
TRL's (benchmarks/results/trl_rewards.md), but what functions get differs:
- A call has the G completions of one prompt (greedy evaluations: one); TRL's has a whole batch.
- There are no completion_ids and no trainer_state: a function that needs them fails at the start.
- log_extra and log_metric do nothing.
- If a prompt is a text, it becomes the user's message in the chat template; TRL uses no template.
- If the template opens the answer, as with <think>, completions begin with that; TRL's do not.
- There are no environments. TRL's environment_factory offers all public methods as tools. To use
  its class here, list them (docs/tasks.md), and put what reset() returns into messages(item):

    class Environment(WordleEnv):
        TOOLS = ["guess"]    # its public methods

        def __init__(self, item):
            super().__init__()
            self.reset(**item)

        def rewards(self, turns):
            return self.reward
"""

import asyncio
import inspect
from concurrent.futures import ThreadPoolExecutor

from tasks.data import records

DATA = "trl-lib/DeepMath-103K"  # on the hub; or a file, or a folder with SPLIT.jsonl
REWARD_WEIGHTS = {"accuracy": 1.0, "format": 0.1}
OUTCOME = "accuracy"
LOOP = asyncio.Runner()  # one for all calls, as in TRL: a client may keep its connections
THREAD = ThreadPoolExecutor(1)  # the loop's, as a notebook's main thread has another loop


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
    prompt, number = item["prompt"], len(completions)
    if not isinstance(prompt, str):
        completions = [as_messages(completion) for completion in completions]
        if prompt[-1]["role"] == "assistant":  # it begins each completion, as in TRL
            prompt = prompt[:-1]
    columns = {name: [value] * number for name, value in (item | {"prompts": prompt}).items()}
    columns |= {"completions": completions}
    del columns["prompt"]
    ignored = dict.fromkeys(["log_extra", "log_metric"], lambda name, value: None)
    found = {}
    for name, function in functions().items():
        result = function(**columns, **ignored)
        if inspect.iscoroutine(result):
            result = THREAD.submit(LOOP.run, result).result()
        found[name] = result
    return [dict(zip(found, values, strict=True)) for values in zip(*found.values(), strict=True)]


def as_messages(completion):
    """Returns a text, or the texts of several turns, as messages."""
    turns = [completion] if isinstance(completion, str) else completion
    return [{"role": ("assistant", "user")[i % 2], "content": x} for i, x in enumerate(turns)]
