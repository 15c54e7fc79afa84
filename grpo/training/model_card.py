"""The model card of a checkpoint, its README.md: what was trained, how, by which code, how well."""

import contextlib
import functools
import json
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROWS = 20  # evaluations in the table, the newest

LOADING = {
    "transformers": """from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained("FOLDER", dtype="auto")
tokenizer = AutoTokenizer.from_pretrained("FOLDER")""",
    "peft": """from peft import AutoPeftModelForCausalLM; from transformers import AutoTokenizer
model = AutoPeftModelForCausalLM.from_pretrained("FOLDER")  # loads the base model too
tokenizer = AutoTokenizer.from_pretrained("FOLDER")""",
}


def model_card(c, state):
    """Returns the text of README.md, with the front matter that the hub reads; `c` has the
    trainer's constants as attributes, `state` is what trainer/state.json begins with."""
    library = "peft" if c.LORA_RANK else "transformers"
    front = {"library_name": library, "pipeline_tag": "text-generation", "tags": ["grpo"]}
    if not Path(c.MODEL).exists():  # the hub refuses a path
        front["base_model"] = c.MODEL
    head = "\n".join(f"{name}: {json.dumps(value)}" for name, value in front.items())
    constants = "\n".join(f"{name} = {value!r}" for name, value in state["constants"].items())
    kind = f"LoRA adapter of rank {c.LORA_RANK} for" if c.LORA_RANK else "model trained from"
    return f"""---
{head}
---

# {c.TASK}, step {state["step"]}

The {kind} `{c.MODEL}`, after {state["step"]} of {c.STEPS} updates with GRPO (arXiv 2402.03300) on
the task `{c.TASK}`. Code: {commit()}.

```python
{LOADING[library]}
```

## Evaluations

Greedy answers to at most {c.EVAL_QUESTIONS} questions of the split `{c.EVAL_SPLIT}`. If these
accuracies chose the checkpoint, report those of another split.

{table(evaluations(c.RUN_DIR))}

## Constants

```python
{constants}
```
"""


@functools.cache  # the code that was loaded, not what is there when a later checkpoint is saved
def commit():
    """Returns which code this is: the commit of the git checkout, and whether it was changed."""
    with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError):
        top, commit = git("rev-parse", "--show-toplevel", "HEAD").split()
        if Path(top) == ROOT.resolve():  # not a repository around ours
            changed = git("status", "--porcelain", "--untracked-files=no")
            return f"commit `{commit}`" + (", with changes that are not committed" * bool(changed))
    return "not a git checkout"


def git(*words):
    command = ["git", "-C", str(ROOT), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout


def evaluations(folder):
    """Returns the evaluations in a run's metrics.jsonl, a list of records."""
    path = Path(folder, "metrics.jsonl")
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if '"eval_' in line]


def table(records):
    """Returns a Markdown table of the newest evaluations, a row for each."""
    if not records:
        return "None yet."
    shown = records[-ROWS:]
    names = list(dict.fromkeys(k for record in shown for k in record if k.startswith("eval_")))
    rows = [["step", *names], ["---:"] * (1 + len(names))]
    for record in shown:
        values = [record.get(name) for name in names]
        rows.append([record["step"], *("" if v is None else f"{v:.3f}" for v in values)])
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in rows)
