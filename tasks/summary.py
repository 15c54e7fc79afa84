"""Any prompts, and a reward for the length alone: until late 2025 TRL's first example, on TL;DR.

Nothing here can be right or wrong, so the reward is a distance: a task for trying out a setup, on
prompts of one's own. DATA may be a JSONL file with a "prompt" in each line.
"""

from tasks.data import records

DATA = "trl-lib/tldr"  # on the hub; or a file, prompts.jsonl; or a folder with SPLIT.jsonl
TARGET = 50  # characters that a completion should have
TOLERANCE = 10  # characters more or less still count as right


def load(split):
    """Returns the items {"prompt", ...} of `split`."""
    return records(DATA, split, "tasks/summary.py")


def messages(item):
    """Returns the chat of one message, the prompt as it is."""
    return [{"role": "user", "content": item["prompt"]}]


def rewards(item, completion):
    """Returns the sole reward, which is the OUTCOME, too: minus the distance to TARGET, as there
    (TRL 0.15; 20 characters), and TOLERANCE more. That changes no advantage, as a group's mean is
    subtracted; but above 0 is then right, and accuracy says how many are near enough."""
    return {"length": TOLERANCE - abs(len(completion) - TARGET)}


def gold(item):
    """Returns a completion of the length that is rewarded most."""
    return (item["prompt"] * TARGET)[:TARGET]
