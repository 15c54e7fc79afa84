"""Shows a task as a run sees it, without loading a model; without a name it lists all tasks.

    python -m tasks
    python -m tasks gsm8k                             # or my/task.py
    python -m tasks gsm8k MODEL=Qwen/Qwen3-4B         # arguments and presets as grpo_ref_split.py's
    python -m tasks my/task.py OUT=runs/my_model      # first makes a tiny model: no hub, no GPU

It prints three prompts as the model sees them (only its tokenizer is loaded), the lengths of all
prompts, and the rewards of an empty completion and of the gold answer. With OUT, a tiny model
learns, until its loss is flat, from the task's right answers (gold(item), or item["answer"]) mixed
with wrong ones, or from the task's sloppy(item, draw); then the command that trains it is printed.
"""

import ast
import json
import random
import shlex
import sys
from dataclasses import replace
from pathlib import Path

from grpo.constants import begin, command_line, usage
from grpo.faults import called
from grpo.log import announced
from grpo.prepare import gold_of, prepare_task, recipe_of
from grpo.rewards import timely
from grpo.sample import Question
from grpo.stop import stop
from grpo.task import load_chat, load_items, load_questions, load_task, task_files

SHOWN = 3
WARM_STEPS = 800  # of the tiny model, at most
FLAT = 0.02  # of two that learn, 100 steps lower the loss by 3 %, of one that has learned by 0.3 %


def listed():
    """Returns a list of the tasks, one a line, with the first line of each file."""
    lines = ["The tasks in tasks/:"]
    for name, path in sorted(task_files().items()):
        text = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or "-"
        lines.append(f"    {name:12} {text.splitlines()[0]}")
    return "\n".join(lines)


def make_model(recipe, out):
    """Makes the tiny model in the folder `out`; returns the command that trains it. Raises
    TaskError if the task has no right answers, or a function of it fails or hangs."""
    from grpo.commands.tiny_model import warm_start

    c, task = recipe.c, recipe.task
    items = load_items(c.TASK, task, "train")
    for item in items:
        load_chat(c.TASK, task, item)

    def right_or_wrong(item, draw):
        must = 'return a right answer; without gold() each item needs an "answer"'
        return gold_of(recipe, draw.choice([item, draw.choice(items)]), must)

    def answer(item, draw):
        call, must = f"sloppy({item!r:.500})", "return a text, or a list of the model's turns"
        sloppy = getattr(task, "sloppy", right_or_wrong)
        holds = lambda got: isinstance(got, str | list) and got != []
        seconds, what = c.REWARD_TIMEOUT_SECONDS, f"gold() or sloppy() of {c.TASK}"
        with announced(what), timely(seconds):
            written = called(c.TASK, call, must, lambda: sloppy(item, draw), holds)
        written = without_opening(load_chat(c.TASK, task, item), written)
        return with_replies(recipe, item, written)

    answer(items[0], random.Random(0))  # a mistake is reported before a minute of training,
    replace(recipe, prompts=[Question(0, items[0], [])]).resolved()  # as are rewards
    print(f"a tiny model learns from the examples of {c.TASK}, until its loss is flat", flush=True)
    context = warm_start(out, task, seed=c.SEED, steps=WARM_STEPS, answer=answer, flat=FLAT)
    half = context // 2
    words = [f"MODEL={out}", f"TASK={c.TASK}", "REF_SERVER=None", f"RUN_DIR={out}_run"]
    words += [f"STOP_STRINGS={json.dumps(c.STOP_STRINGS)}"] * bool(c.STOP_STRINGS)
    words += [f"MAX_PROMPT_TOKENS={half}", f"MAX_COMPLETION_TOKENS={half}"]
    return f"python grpo_ref_split.py presets/demo.py {shlex.join(words)}"


def with_replies(recipe, item, written):
    """Returns the text of a completion in which the model has `written` a text or a list of turns;
    after one of STOP_STRINGS a reply stands inside the model's turn, else in a separate one."""
    if not recipe.turns:
        return written
    from grpo.commands.tiny_model import TURN

    turns, _, roles = recipe.turns.play(
        recipe, item, [written] if isinstance(written, str) else written
    )
    text, replies = "", zip(turns[1::2], roles, strict=True)
    for turn, (reply, role) in zip(turns[::2], [*replies, ("", "")], strict=True):
        inside = not role or recipe.turns.is_open(recipe.c, turn)
        text += turn + (reply if inside else TURN.format(role, reply))
    return text


def without_opening(chat, written):
    """Returns what the model has to write of a right answer, a text or a list of its turns: without
    the last message of the chat, if that is the assistant's."""
    opening = chat[-1]["content"].strip() if chat[-1]["role"] == "assistant" else ""
    if isinstance(written, str):
        return written.lstrip().removeprefix(opening) if opening else written
    return [without_opening(chat, written[0]), *written[1:]]


def main(name):
    outs = [word for word in sys.argv if word.startswith("OUT=")]
    sys.argv[:] = [word for word in sys.argv if word not in outs]
    begin()
    task = load_task(name)  # before torch, which takes seconds to import
    import grpo_ref_split as trainer

    _, given = command_line(trainer.DEFAULTS, __doc__)
    if outs:
        given["MODEL"] = out = outs[-1].removeprefix("OUT=")
        for path in (out, f"{out}_run"):  # the latter would resume a run of the older model
            if Path(path).exists():
                raise SystemExit(f"{path} exists already: delete it, or choose another OUT")
    c = trainer.checks.trainer_constants(trainer.DEFAULTS, given | {"TASK": name})
    command = make_model(recipe_of(c, task), out) if outs else ""
    with stop.listening(at_once=True):
        tokenizer, recipe = prepare_task(c, split="train", shown=SHOWN)
        load_questions(recipe.others(EVAL_STEPS=1), tokenizer)
    if outs:
        print(f"\nto train it:\n    {command}")


if __name__ == "__main__":
    if sys.argv[1:] and sys.argv[1] not in ("-h", "--help"):
        main(sys.argv.pop(1))
    else:
        begin()
        print(usage(__doc__), listed(), sep="\n\n")
