"""Guess a number from 1 to 7 in three turns: the environment answers "more" or "less".

    make demo-tools    # trains a tiny model (presets/guess.py): it learns binary search

A number is found by binary search in (1 + 2 * 2 + 4 * 3) / 7 = 2.43 turns on average. The right
second guess depends on the reply to the first, so this is learned across turns.
"""

import re

LAST, TURNS = 7, 3
GUESS = re.compile(r"<answer>(\d)</answer>")
QUESTION = f"Guess my number, from 1 to {LAST}. You have {TURNS} guesses."


def load(split):
    """Returns one item for each number, in any split."""
    return [{"question": QUESTION, "secret": secret} for secret in range(1, LAST + 1)]


def messages(item):
    return [{"role": "user", "content": item["question"]}]


def reply(item, turns):
    """Returns "more" or "less"; None after a right guess, no guess, or the last guess."""
    guess = GUESS.fullmatch(turns[-1])
    if not guess or int(guess[1]) == item["secret"] or len(turns) == 2 * TURNS - 1:
        return None
    return "more" if item["secret"] > int(guess[1]) else "less"


def rewards(item, turns):
    """Returns the sole reward: whether the last guess is the number."""
    guess = GUESS.fullmatch(turns[-1])
    return {"correctness": bool(guess) and int(guess[1]) == item["secret"]}


def sloppy(item, draw):
    """Returns guesses: six in ten follow the replies, the others are random numbers."""
    turns, low, high, hint = [], 1, LAST, ""
    while hint is not None:
        heeds = draw.random() < 0.6
        number = draw.randint(low, high) if heeds else draw.randint(1, LAST)
        turns.append(f"<answer>{number}</answer>")
        hint = reply(item, turns)
        low, high = (max(low, number + 1), high) if hint == "more" else (low, min(high, number - 1))
        turns.append(hint)
    return turns[::2]


def gold(item):
    """Returns the guesses of binary search."""
    low, high, guesses = 1, LAST, []
    while not guesses or guesses[-1] != item["secret"]:
        guesses.append(middle := (low + high) // 2)
        low, high = (middle + 1, high) if item["secret"] > middle else (low, middle - 1)
    return [f"<answer>{guess}</answer>" for guess in guesses]
