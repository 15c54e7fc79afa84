"""The demo's arithmetic with 64 training questions, so that a question comes again soon."""

from tasks import arithmetic
from tasks.arithmetic import OUTCOME, REWARD_WEIGHTS, gold, messages, rewards  # noqa: F401

QUESTIONS = 64


def load(split):
    items = arithmetic.load(split)
    return items[:QUESTIONS] if split == "train" else items
