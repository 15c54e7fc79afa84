"""Shows a task as a run would see it, without a model's weights; alone, lists the tasks there are.

    python -m tasks
    python -m tasks gsm8k                             # or my/task.py
    python -m tasks countdown MODEL=Qwen/Qwen3-4B     # that model's tokenizer; any constant

Three prompts as the model sees them, the lengths of all, and the rewards of an empty completion and
of the gold answer. The constants are those of grpo_ref_split.py.
"""

import ast
import sys

from grpo.sampling.recipe import load_split, load_task, task_files
from grpo.sampling.start import prepare_task

SHOWN = 3


def listed():
    """Returns the tasks there are, one a line, with the first line of their files."""
    lines = ["The tasks there are, in tasks/:"]
    for name, path in sorted(task_files().items()):
        text = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or "-"
        lines.append(f"    {name:12} {text.splitlines()[0]}")
    return "\n".join(lines)


def main(name, *words):
    if name not in task_files() and not name.endswith(".py"):
        raise SystemExit(f"there is no task {name!r}. {listed()}")
    load_task(name)  # before the trainer, which takes seconds to import
    import grpo_ref_split as trainer

    for word in words:
        constant, _, value = word.partition("=")
        setattr(trainer, constant, value)
    trainer.TASK = name
    c = trainer.constants()
    tokenizer, recipe = prepare_task(c, split="train", shown=SHOWN)
    load_split(c, recipe.task, c.EVAL_SPLIT, tokenizer)


if __name__ == "__main__":
    match sys.argv[1:]:
        case []:
            print(listed())
        case [name, *words]:
            main(name, *words)
