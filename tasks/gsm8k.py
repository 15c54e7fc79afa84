"""GSM8K: grade-school word problems, their prompt and two rewards. Copy this file for your task.

The trainer asks for `load`, `messages` and `rewards`; nothing here knows of torch, tokens or HTTP.
Correctness ignores the format, so that accuracy means the same before and after training.
"""

import json
import re
from pathlib import Path

from tasks.answers import INSIDE, gold_number, is_right

DATA = "openai/gsm8k"  # on the hub (config "main"), or a folder with train.jsonl and test.jsonl
SYSTEM_PROMPT = "Reason step by step in <think></think>, then give one number in <answer></answer>."
CORRECT, WRONG = 1.0, -1.0
FORMATTED, UNFORMATTED = 1.25, -1.0  # simple_GRPO's; see REWARD_WEIGHTS for what beats what
FORMAT = re.compile(rf"\s*<think>{INSIDE}</think>\s*<answer>{INSIDE}</answer>\s*", re.DOTALL)
# The trainer passes text without EOS; other callers may not, and FORMAT must end in </answer>
SPECIAL = re.compile(r"(?:(?:<\|[a-z_]+\|>|</s>|<eos>|<pad>|<end_of_turn>)\s*)+$")


def load(split):
    """Returns the items {"question", "answer": "... #### 18"} of `split`, "train" or "test"."""
    folder = Path(DATA).expanduser()
    if folder.is_dir() or DATA.startswith((".", "/", "~")):
        return read_jsonl(folder / f"{split}.jsonl")
    import datasets

    try:
        return list(datasets.load_dataset(DATA, "main", split=split))
    except OSError as error:
        where = "is not a folder here, and not a data set on the hub"
        raise OSError(f"DATA = {DATA!r} in tasks/gsm8k.py {where}: {error}") from error


def messages(question):
    """Returns the chat that asks the question."""
    return [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": question}]


def rewards(item, completion):
    """Returns the raw rewards of one completion, a decoded text, by the names in REWARD_WEIGHTS."""
    text = SPECIAL.sub("", completion)
    return {
        "correctness": CORRECT if is_right(text, item["answer"]) else WRONG,
        "format": FORMATTED if FORMAT.fullmatch(text) else UNFORMATTED,
    }


def read_jsonl(path):
    """Returns one dict per line of `path`. Raises ValueError at a malformed line."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: set DATA to a folder that has it")
    items = []
    for row, line in enumerate(path.read_text(encoding="utf-8").rstrip("\n").split("\n"), start=1):
        try:
            items.append(json.loads(line))
            gold_number(items[-1]["answer"])
            good = "####" in items[-1]["answer"] and items[-1]["question"].strip()
        except (ValueError, KeyError, TypeError, AttributeError):
            good = False
        if not good:
            raise ValueError(f"{path}, line {row}: give it a question and an answer with '#### 18'")
    return items
