"""GSM8K with the rewards of "GRPO from scratch" (the notebooks of aburkov/theLMbook).

A right answer earns 2 if it is written as the gold is, else 1.5; each tag earns 0.2. Differences:
the thoughts are in <think>, as in tasks/gsm8k.py, and the number is found without tags, too. There
a right answer without <answer> was wrong, so that learning the tag looked like learning to count.
"""

from tasks.answers import BLOCK, is_right
from tasks.gsm8k import OUTCOME, gold, load, messages  # noqa: F401 (this task's, too)

SAME_TEXT, SAME_NUMBER = 2.0, 1.5
TAGS, EACH_TAG = ("<think>", "</think>", "<answer>", "</answer>"), 0.2
REWARD_WEIGHTS = {"correctness": 1.0, "format": 1.0}


def rewards(item, completion):
    """Returns the two rewards, up to 2 and up to 0.8."""
    number = item["answer"].rpartition("####")[2].strip()
    same = [text.strip() for text in BLOCK.findall(completion)[-1:]] == [number]
    right = is_right(completion, item["answer"])
    return {
        "correctness": SAME_TEXT if same else SAME_NUMBER if right else 0.0,
        "format": EACH_TAG * sum(tag in completion for tag in TAGS),
    }
