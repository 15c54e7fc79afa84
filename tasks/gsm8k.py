"""GSM8K: grade-school word problems, their prompt and rewards. Copy this file for your task.

The trainer needs `load`, `messages` and `rewards`, and uses `gold`, REWARD_WEIGHTS and OUTCOME if a
task has them. A task knows nothing about torch, tokens or HTTP.
Correctness ignores the format, so that accuracy means the same before and after training.
"""

from tasks.answers import AGAIN, FORMAT, gold_number, is_right
from tasks.data import records

DATA = "openai/gsm8k"  # on the hub (its config "main"), or a folder with train.jsonl and test.jsonl
EXAMPLES = []  # (question, answer) turns before the question, if answers never have the format
SYSTEM_PROMPT = "Reason step by step in <think></think>, then give one number in <answer></answer>."
CORRECT, WRONG = 1.0, -1.0
FORMATTED, UNFORMATTED = 1.25, -1.0  # simple_GRPO's values
# At (2, 1) a right answer in the wrong format (+1) beats a wrong one in the right format (-0.75);
# at (1, 1), simple_GRPO's scale, it does not (0 against 0.25).
REWARD_WEIGHTS = {"correctness": 2.0, "format": 1.0, "looks_again": 0.0}  # 0: only logged
OUTCOME = "correctness"  # the reward that decides whether a completion is right: above 0 it is


def load(split):
    """Returns the items {"question", "answer": "... #### 18"} of `split`, "train" or "test"."""
    return records(DATA, split, "main")


def messages(item):
    """Returns the chat that asks the item's question. ValueError if its answer is no number."""
    gold_number(item["answer"])  # at the start of a run, of all items
    shown = [turn for pair in EXAMPLES for turn in zip(("user", "assistant"), pair, strict=True)]
    turns = [("system", SYSTEM_PROMPT), *shown, ("user", item["question"])]
    return [{"role": role, "content": text} for role, text in turns]


def rewards(item, completion):
    """Returns the rewards of a completion, a text without EOS, by the names in REWARD_WEIGHTS."""
    return {
        "correctness": CORRECT if is_right(completion, item["answer"]) else WRONG,
        "format": FORMATTED if FORMAT.fullmatch(completion) else UNFORMATTED,
        "looks_again": bool(AGAIN.search(completion)),
    }


def gold(item):
    """Returns a right completion, on which a run tries the rewards at its start."""
    work, _, number = item["answer"].rpartition("####")
    return f"<think>{work}</think><answer>{number}</answer>"
