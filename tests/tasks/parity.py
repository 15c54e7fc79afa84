"""GSM8K's questions, with a reward that a random model meets half of the time: an even length.

`tasks` has no __init__.py, so this folder joins the one in the root: a task may live anywhere.
"""

from tasks.gsm8k import REWARD_WEIGHTS, load, messages  # noqa: F401


def rewards(item, completion):
    return {
        "correctness": 1.0 if len(completion) % 2 == 0 else -1.0,
        "format": 1.25 if completion[:1].isalpha() else -1.0,
    }
