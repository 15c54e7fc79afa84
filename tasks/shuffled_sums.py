"""The control of presets/smollm2.py: sums, its reward shuffled among the completions of a group."""

from tasks.shuffled import shuffles
from tasks.sums import gold, load, messages, rewards  # noqa: F401 (this task's, too)

REWARD_WEIGHTS = {"correctness": 0.0, "shuffled": 1.0}
group_rewards = shuffles(rewards, {"correctness": 1.0})
