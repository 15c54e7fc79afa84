"""Compares tasks/trl.py with TRL's own GRPOTrainer: the same reward functions, weights and data.

    python3 -m venv ../venv-trl && ../venv-trl/bin/pip install torch==2.13.0 trl==1.16.0 math-verify
    ../venv-trl/bin/python -m benchmarks.trl_rewards

TRL's values come from `_calculate_rewards` of a real GRPOTrainer, which gets all groups as one
batch; ours from grpo.task.reward_group, group by group, as in a run. Every value, None included,
and every weighted total must be equal as float32.
"""

import itertools
import math
import tempfile
from types import SimpleNamespace

import torch
import trl
from datasets import Dataset
from trl.rewards import accuracy_reward, reasoning_accuracy_reward, think_format_reward

from benchmarks.trl_loss_table import save_tiny_model
from grpo.task import Recipe, reward_group, total
from tasks import trl as task

G = 8
HALF = r"\frac{1}{2}"
# For the solution 1/2: right, wrong, and neither
COMPLETIONS = [
    r"\boxed{\frac{1}{2}}", r"\boxed{0.5}", r"\boxed{.5}", r"\boxed{1/2}", r"\boxed{50\%}",
    r"$\frac12$", r"The answer is $0.50$.", "0.5", "1/2", "the answer is 1/2", "",
    " ", "\n\n", "\x00", "\ud7ff\u202e0.5", "１／２", r"\boxed{}", r"\boxed{", r"}\boxed{0.5",
    r"\boxed{\boxed{0.5}}", r"\boxed{1/3} no, \boxed{1/2}", r"\boxed{1/2} no, \boxed{1/3}",
    r"\boxed{1/2, 1/3}", r"\boxed{\{1/2\}}", r"\boxed{x=1/2}", r"\boxed{y=\frac{2}{4}}",
    r"\boxed{\frac{1}{0}}", r"\boxed{\text{one half}}", r"\boxed{0,5}", r"\boxed{1\frac{-1}{2}}",
    r"\boxed{0.5\text{ cm}}", r"\boxed{-\frac{1}{2}}", r"\boxed{\sqrt{0.25}}", r"\boxed{2^{-1}}",
    r"\boxed{\infty}", r"\boxed{0.49999999999999999999}", r"\boxed{0.5000001}", r"\[\frac{1}{2}\]",
    "<think>a</think>$0.5$", "<think>a</think>", "<think></think>", "<think>", "</think>$0.5$",
    " <think>a</think>$0.5$", "<think>a<think>b</think></think>$0.5$", "<think>a\nb</think>\n$0.5$",
    "<think>a</think>b<think>c</think>$0.5$", "<THINK>a</THINK>$0.5$", "<think>$0.5$</think>$0.6$",
    "x\n<think>a</think>$0.5$", "<think>a</think>" * 50 + "$0.5$", "<think>" * 500 + "$0.5$",
    "<|im_end|>$0.5$", "assistant\n$0.5$", "{'role': 'user'}", "$" * 999, "\\" * 999, "{" * 300,
    r"\boxed{" * 50 + "0.5" + "}" * 50, "9" * 5000, r"\boxed{" + "9" * 400 + "}", "0.5 " * 500,
    "⁠½", r"\boxed{½}",
]  # fmt: skip
SOLUTIONS = [HALF, "$0.5$", "no number here", "", r"\boxed{50\%}", r"$\{1, 2\}$", "A"]


def shares_letters(prompts, completions, **columns):
    """Of text or messages: how much of the prompt's letters a completion has; None if it is ''."""
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    asked = [p if isinstance(p, str) else p[-1]["content"] for p in prompts]
    pairs = zip(asked, texts, strict=True)
    return [len(set(p) & set(t)) / len(set(p)) if t else None for p, t in pairs]


async def column(completions, solution, level, **columns):
    return [len(s) * n / 7 if n else None for s, n in zip(solution, level, strict=True)]


def longest_here(prompts, completions, **columns):
    """Compares the completions of a call, but only those of the same prompt."""
    texts = [str(c) for c in completions]
    best = {str(p): 0 for p in prompts}
    for prompt, text in zip(prompts, texts, strict=True):
        best[str(prompt)] = max(best[str(prompt)], len(text))
    return [len(t) == best[str(p)] for p, t in zip(prompts, texts, strict=True)]


def longest_of_all(completions, **columns):
    """Compares all completions of a call: TRL's batch, here a group. It is expected to differ."""
    sizes = [len(str(c)) for c in completions]
    return [size == max(sizes) for size in sizes]


def make_trainer(folder, functions, weights):
    args = {"output_dir": folder, "use_cpu": True, "bf16": False, "report_to": "none"}
    args |= {"per_device_train_batch_size": G, "num_generations": G, "reward_weights": weights}
    return trl.GRPOTrainer(
        model=folder,
        reward_funcs=functions,
        args=trl.GRPOConfig(**args),
        train_dataset=Dataset.from_list([{"prompt": "hello"}] * G),
    )


def theirs(functions, items, texts):
    """Returns TRL's values (B, F) and totals (B,), float32, of one batch."""
    weights = list(task.REWARD_WEIGHTS.values())
    with tempfile.TemporaryDirectory() as folder:
        save_tiny_model(folder)
        real = make_trainer(folder, list(functions.values()), weights)
    inputs = [item for item in items for _ in range(G)]
    flat = [text for group in texts for text in group]
    chat = [[{"role": "assistant", "content": text}] for text in flat]
    said = [c if isinstance(i["prompt"], list) else t for i, c, t in zip(inputs, chat, flat)]
    values = real._calculate_rewards(inputs, [i["prompt"] for i in inputs], said, [[1]] * len(flat))
    totals = (values * torch.tensor(weights)).nansum(dim=1)  # as _generate_and_score_completions
    totals[values.isnan().all(dim=1)] = math.nan
    return values, totals


def ours(functions, items, texts):
    task.functions = lambda: functions
    c = SimpleNamespace(TASK="trl", REWARD_TIMEOUT_SECONDS=300)
    recipe = Recipe(c, task, [], dict(task.REWARD_WEIGHTS), next(iter(functions)))
    found = [reward_group(recipe, i, group) for i, group in zip(items, texts, strict=True)]
    flat = [rewards for group in found for rewards in group]
    values = torch.tensor([list(rewards.values()) for rewards in flat])
    return values, torch.tensor([total(rewards, recipe.weights) for rewards in flat])


def compare(name, functions, items, texts):
    task.REWARD_WEIGHTS = {n: 1 + i / 3 for i, n in enumerate(functions)}
    pairs = list(zip(ours(functions, items, texts), theirs(functions, items, texts), strict=True))
    same = [(a == b) | (a.isnan() & b.isnan()) for a, b in pairs]
    values = pairs[0][0]
    for i, function in enumerate(functions):
        mine = values[:, i]
        kinds = f"{int((mine == 0).sum())} zero, {int(mine.isnan().sum())} None"
        print(f"{name}: {function}: {int(same[0][:, i].sum())} of {len(mine)} equal ({kinds})")
    close = (pairs[1][0] - pairs[1][1]).nan_to_num().abs().max()
    print(f"{name}: totals: {int(same[1].sum())} of {len(same[1])} equal, largest gap {close:.1g}")


def main():
    texts = [COMPLETIONS[i : i + G] for i in range(0, len(COMPLETIONS), G)]
    assert all(len(group) == G for group in texts), len(COMPLETIONS)
    versions = {"trl": trl.__version__, "torch": torch.__version__}
    print(f"{versions}; {len(COMPLETIONS)} completions, {len(SOLUTIONS)} solutions")
    own = {"letters": shares_letters, "column": column, "here": longest_here}
    of_trl = {"accuracy": accuracy_reward, "format": think_format_reward}
    of_trl["reasoning"] = reasoning_accuracy_reward
    for name, functions in (("messages", of_trl | own), ("text", own)):
        items, groups = [], []
        for i, (solution, group) in enumerate(itertools.product(SOLUTIONS, texts)):
            ask = f"{i}: what is half of one?"
            chat = [{"role": "system", "content": "Think."}, {"role": "user", "content": ask}]
            prompt = chat if name == "messages" else ask
            items.append({"prompt": prompt, "solution": solution, "level": i % 3})
            groups.append(group)
        compare(name, functions, items, groups)
    compare("text", {"longest of all": longest_of_all}, items, groups)


if __name__ == "__main__":
    main()
