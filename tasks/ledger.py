"""An account whose balance only its tools know: methods of class Environment (docs/tasks.md).

    python -m tasks ledger OUT=runs/ledger    # makes a tiny model, and prints how to train it

Each completion has a separate account. Its reward asks whether account and answer are as ordered.
"""

import re

from tasks.data import generated

SIZES = {"train": 2000, "validation": 200, "test": 200}
MAX_CALLS = 3  # of a completion; the next one ends it
CALL = '<tool_call>{{"name": "{}", "arguments": {{{}}}}}</tool_call>'
ANSWER = re.compile(r"<answer>(\d+)</answer>")
SYSTEM_PROMPT = f"""You keep an account with deposit, withdraw and balance. A call:
{CALL.format("deposit", '"amount": 5')}
At the end: <answer>the balance</answer>"""


class Environment:
    def __init__(self, item):
        self.money, self.due = item["start"], int(item["answer"])

    def deposit(self, amount: int) -> int:
        """Puts money into the account and returns the balance.

        Args:
            amount: How much.
        """
        self.money += amount
        return self.money

    def withdraw(self, amount: int) -> int:
        """Takes money out of the account and returns the balance.

        Args:
            amount: How much, at most the balance.
        """
        if amount > self.money:
            raise ValueError(f"the balance is only {self.money}")
        self.money -= amount
        return self.money

    def balance(self) -> int:
        """Returns the balance."""
        return self.money

    TOOLS = (deposit, withdraw, balance)

    def rewards(self, turns):
        """Returns the sole reward: whether account and answer have the balance that is due."""
        found = ANSWER.fullmatch(turns[-1])
        return {"correctness": bool(found) and int(found[1]) == self.money == self.due}


def load(split):
    """Returns the split's items: the question, the account's start, the orders, the balance."""
    return generated(problem, split, SIZES[split])


def problem(draw):
    kinds = draw.choices(["deposit", "withdraw"], k=draw.randint(0, 2))
    start, orders = draw.randint(50, 99), [(kind, draw.randint(1, 25)) for kind in kinds]
    left = start + sum(n if kind == "deposit" else -n for kind, n in orders)
    words = [f"Account {draw.randint(1000, 9999)}."]
    words += [f"{kind.capitalize()} {n}." for kind, n in orders] + ["What is the balance?"]
    return {"question": " ".join(words), "start": start, "orders": orders, "answer": str(left)}


def messages(item):
    texts = {"system": SYSTEM_PROMPT, "user": item["question"]}
    return [{"role": role, "content": text} for role, text in texts.items()]


def gold(item):
    """Returns the model's turns of a completion that is right."""
    calls = [CALL.format(kind, f'"amount": {n}') for kind, n in item["orders"]]
    return [*(calls or [CALL.format("balance", "")]), f"<answer>{item['answer']}</answer>"]
