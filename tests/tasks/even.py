"""arithmetic's questions, with a reward that a random model meets half of the time: even length."""

from tasks import arithmetic
from tasks.arithmetic import REWARD_WEIGHTS, messages  # noqa: F401


def load(split):
    return arithmetic.load(split)[:64]  # prompts of all 6000 would take seconds at each start


def rewards(item, completion):
    return {
        "correctness": 1.0 if len(completion) % 2 == 0 else -1.0,
        "format": 1.25 if completion[:1].isalpha() else -1.0,
    }
