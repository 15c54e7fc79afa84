"""The demo's control: arithmetic, its rewards shuffled among the completions of a group.

Advantages depend on `shuffled` alone, which carries no information about its completion. The true
rewards have weight 0 and are only reported.
"""

import random

from tasks.arithmetic import OUTCOME, gold, load, messages, rewards  # noqa: F401 (this task's, too)
from tasks.arithmetic import REWARD_WEIGHTS as WEIGHTS


def shuffles(rewards, weights):
    """Returns group_rewards(item, completions), which gives each of the completions' weighted true
    rewards to a random one of them."""
    draw = random.Random(0)

    def group_rewards(item, completions):
        true = [rewards(item, completion) for completion in completions]
        totals = [sum(weights[name] * value for name, value in each.items()) for each in true]
        return [{"shuffled": total} for total in draw.sample(totals, len(totals))]

    return group_rewards


REWARD_WEIGHTS = dict.fromkeys(WEIGHTS, 0.0) | {"shuffled": 1.0}
group_rewards = shuffles(rewards, WEIGHTS)
