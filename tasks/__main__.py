"""Shows a task as a run would see it, without a model's weights; alone, lists the tasks there are.

    python -m tasks
    python -m tasks gsm8k                             # or my/task.py
    python -m tasks countdown MODEL=Qwen/Qwen3-4B     # arguments and presets as grpo_ref_split.py's

Three prompts as the model sees them (its tokenizer is all that is loaded), the lengths of all, and
the rewards of an empty completion and of the gold answer.
"""

import ast
import sys

from grpo.constants import command_line
from grpo.sampling.task import load_split, load_task, prepare_task, task_files

SHOWN = 3


def listed():
    """Returns the tasks there are, one a line, with the first line of their files."""
    lines = ["The tasks there are, in tasks/:"]
    for name, path in sorted(task_files().items()):
        text = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or "-"
        lines.append(f"    {name:12} {text.splitlines()[0]}")
    return "\n".join(lines)


def main(name):
    _, given = command_line("grpo_ref_split.py", __doc__)
    load_task(name)  # before torch, which takes seconds to import
    import grpo_ref_split as trainer

    c = trainer.constants(**given | {"TASK": name})
    tokenizer, recipe = prepare_task(c, split="train", shown=SHOWN)
    load_split(c, recipe.task, c.EVAL_SPLIT, tokenizer)


if __name__ == "__main__":
    if sys.argv[1:] and sys.argv[1] not in ("-h", "--help"):
        main(sys.argv.pop(1))
    else:
        print(listed())
