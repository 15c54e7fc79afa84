"""TL;DR: summaries of Reddit posts, rewarded for their length alone, as in TRL's first example.

    python grpo_ref_split.py TASK=tldr

Nothing reads the summary: a run learns its length and nothing else, and shows that a set-up works.
"""

from tasks.data import records

DATA = "trl-lib/tldr"  # on the hub; or a file or folder with a column "prompt"
CHARACTERS, NEAR = 20, 5  # the length that is rewarded, and how far from it is right
REWARD_WEIGHTS = {"length": 1.0, "near": 0.0}
OUTCOME = "near"


def load(split):
    """Returns the items {"prompt", ...}; the data's summaries are not used."""
    return records(DATA, split)


def messages(item):
    """Returns a chat of the prompt, which ends with "TL;DR:". (TRL's example had no chat.)"""
    return [{"role": "user", "content": item["prompt"]}]


def rewards(item, completion):
    """Returns minus the distance from CHARACTERS, and whether it is at most NEAR."""
    distance = abs(len(completion) - CHARACTERS)
    return {"length": -distance, "near": distance <= NEAR}
