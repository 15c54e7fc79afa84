"""Reasoning Gym: a hundred procedural data sets, chosen by NAME, each with a verifier.

    pip install reasoning-gym==0.1.25    # 345 MB with what it needs
    python -m tasks reasoning_gym

A score may be partial, and some verifiers give junk a few hundredths: a score above 0.99 is right.
No two items have the same seed. If a data set has few problems, test questions may be trained.
"""

import functools

from tasks.answers import BLOCK, FORMAT

NAME = "leg_counting"  # or "countdown"; all: github.com/open-thought/reasoning-gym GALLERY.md
SEEDS = {"train": 0, "validation": 10**6, "test": 2 * 10**6}  # item i is drawn with seed + i
SIZES = {"train": 2000, "validation": 200, "test": 200}
SYSTEM_PROMPT = "Reason step by step in <think></think>, then give the answer in <answer></answer>."
OUTCOME = "correctness"
REWARD_WEIGHTS = {"correctness": 1.0, "score": 0.0, "format": 0.1}
# Found in version 0.1.25, with 105 data sets. These verifiers accept any text; "0" as a prefix
RIGHT_FOR_JUNK = {"game_of_life_halting", "coin_flip"}
# These fail on some texts, such as "zz" or "{}", which are then wrong
RAISES_ON_JUNK = {"boxnet", "game_of_life", "prime_factorization"}
# boxnet, graph_color, propositional_logic, rubiks_cube and rush_hour have no gold answers


def load(split):
    """Returns the split's items: question, answer (or None) and metadata."""
    import reasoning_gym

    if NAME in RIGHT_FOR_JUNK:
        raise ValueError(
            f"NAME = {NAME!r}: its verifier accepts junk as right; choose another data set"
        )
    return list(reasoning_gym.create_dataset(NAME, size=SIZES[split], seed=SEEDS[split]))


def messages(item):
    """Returns the chat that asks the item's question."""
    system = {"role": "system", "content": SYSTEM_PROMPT}
    return [system, {"role": "user", "content": item["question"]}]


@functools.cache
def verifier(name):
    import reasoning_gym

    return reasoning_gym.get_score_answer_fn(name)


def rewards(item, completion):
    """Returns whether the last answer is right, its score, and the format."""
    found = BLOCK.findall(completion)[-1:]
    try:
        score = float(verifier(NAME)(found[0].strip(), item)) if found else 0.0
    except Exception:  # of any kind, caused by the model's text
        if NAME not in RAISES_ON_JUNK:
            raise
        score = 0.0
    format = bool(FORMAT.fullmatch(completion))
    return {"correctness": score > 0.99, "score": score, "format": format}


def gold(item):
    """Returns a completion that is right; None if the item has no answer."""
    return None if item["answer"] is None else f"<think></think><answer>{item['answer']}</answer>"
