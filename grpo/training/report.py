"""Where metrics and samples go: the run's folder, the bar, REPORT_TO, and a checkpoint's card.

REPORT_TO names TensorBoard, Weights & Biases and functions. Rank 0 sends each record in a thread of
its own: a receiver that is slow or fails neither delays nor ends the run. Both packages are
optional, and imported only if named.
"""

import contextlib
import functools
import importlib.util
import itertools
import json
import math
import os
import queue
import re
import subprocess
import time
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist

from grpo.log import SPEAK_SECONDS, announced, in_background, say
from grpo.sampling.rollout import tally_of_one
from grpo.stop import stop
from grpo.training.metrics import PARTS

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
LAST_SECONDS = 15  # for the last records; deepspeed kills a run 30 s after a signal


# --- RUN_DIR ------------------------------------------------------------------------
class RunFolder:
    """RUN_DIR's metrics.jsonl, samples.jsonl and bad steps; checkpoint.py writes there too."""

    def __init__(self, path, reporters=()):
        self.path, self.reporters = Path(path), reporters
        self.path.mkdir(parents=True, exist_ok=True)

    def log(self, file, record):
        """Appends a record, with the time, to a file of one JSON object per line."""
        if dist.get_rank() == 0:
            record = {k: finite(v) for k, v in record.items()} | {"time": round(time.time(), 2)}
            with open(self.path / file, "a") as f:
                f.write(json.dumps(record) + "\n")
            for reporter in self.reporters if file == "metrics.jsonl" else ():
                reporter.put(dict(record))

    def log_evaluation(self, evaluation, step):
        """Logs and says an evaluation; returns its accuracy, -1 where it has none."""
        self.log("metrics.jsonl", {"step": step} | evaluation)
        say(f"step {step}: " + ", ".join(f"{k} {v:.3f}" for k, v in evaluation.items()))
        return evaluation.get("eval_accuracy", -1.0)

    def log_samples(self, run, groups, advantages_of):
        """Writes SAMPLES_PER_STEP completions of one group, of those that rank 0 or a worker
        sampled for the next rollout, to samples.jsonl: those of the highest and the lowest
        advantage, then others."""
        if dist.get_rank() != 0 or not groups:
            return
        step, number = run.progress.step + 1, run.c.SAMPLES_PER_STEP
        skips = run.recipe.c.SKIP_FLAT_GROUPS  # what is flat is not trained
        group, decode = groups[step % len(groups)], run.policy.tokenizer.decode
        item = next(item for index, item, _ in run.recipe.prompts if index == group.item)
        asked = {name: item.get(name) for name in ("question", "answer")}
        advantages = advantages_of(group, run.recipe.c.REWARD_WEIGHTS).tolist()
        ids = group.completions(group.completion_ids)
        best, *others = sorted(range(len(ids)), key=advantages.__getitem__, reverse=True)
        for i in [best, *others[-1:], *others[:-1]][:number]:
            rewards = zip(group.reward_names, group.rewards[i].tolist(), strict=True)
            record = {
                "step": step,
                "group": group.id,
                "number": i,
                "prompt": decode(group.prompt_ids),
                "item": {name: value for name, value in item.items() if is_plain(value)},
                **{name: x if is_plain(x) else str(x) for name, x in asked.items()},
                "completion": decode(ids[i]),
                "rewards": {name: finite(reward) for name, reward in rewards},
                "advantage": advantages[i],
                "flat": bool(skips and tally_of_one(run.recipe, group)["flat"]),
                "truncated": group.truncated[i].item(),
                "sampler": group.sampler,
                "policy_version": group.policy_version,
            }
            self.log("samples.jsonl", record)

    def bad_step(self, progress, sequences, metrics, limit):
        """Says that a step is skipped, and keeps its sequences in a file. RuntimeError after
        `limit` such steps in a row."""
        path = self.path / f"bad_step_{progress.step:06d}.json"
        if dist.get_rank() == 0:
            path.write_text(json.dumps([asdict(s) for s in sequences], default=torch.Tensor.tolist))
            for old in sorted(self.path.glob("bad_step_*"))[:-limit]:
                old.unlink()
        progress.bad += 1
        why = f"loss {metrics['loss']}, norm of the gradient {metrics['grad_norm']}"
        say(f"step {progress.step} is skipped: {why}; {progress.bad} in a row; kept in {path}")
        if progress.bad >= limit:
            raise RuntimeError(f"{progress.bad} steps in a row were not finite; see {path}")

    def undo(self, step):
        """Removes records of steps after `step`, which the run makes again, and a line that was
        being written when the run ended."""
        for path in (self.path / "metrics.jsonl", self.path / "samples.jsonl"):
            if dist.get_rank() == 0 and path.exists():
                kept = []
                for line in path.read_text().splitlines():
                    with contextlib.suppress(ValueError):
                        if json.loads(line)["step"] <= step:
                            kept.append(line + "\n")
                draft = path.with_suffix(".draft")
                draft.write_text("".join(kept))
                draft.replace(path)

    def set_aside(self):
        """Moves the records of a run that ended before its first checkpoint to a folder of their
        own: the run begins anew."""
        files = [self.path / name for name in ("metrics.jsonl", "samples.jsonl")]
        files = [path for path in files if path.exists() and path.stat().st_size]
        if dist.get_rank() == 0 and files:
            numbers = itertools.count(1)
            folder = next(f for n in numbers if not (f := self.path / f"earlier_{n}").exists())
            folder.mkdir()
            for path in files:
                path.rename(folder / path.name)
            say(f"the run had no checkpoint and begins anew; what it logged is now in {folder}")


def is_plain(value):
    """Returns whether JSON can hold the value."""
    try:
        return json.dumps(value, allow_nan=False) is not None
    except (TypeError, ValueError, RecursionError):
        return False


def finite(value):
    """Returns the value, or None if it is NaN or infinite, which JSON does not have."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def constants_of(variables):
    """Returns the constants among values by name, as they come back from JSON."""
    plain = int | float | str | list | tuple | dict | None
    kept = {k: v for k, v in variables.items() if k.isupper() and isinstance(v, plain)}
    return json.loads(
        json.dumps(kept, default=lambda value: getattr(value, "__name__", str(value)))
    )


# --- What is printed ----------------------------------------------------------------
SHOWN = {  # by the bar, those that there are
    "reward": "reward {:+.2f}",
    "accuracy": "accuracy {:.2f}",
    "kl": "kl {:.3f}",
    "completions/mean_length": "length {:.0f}",
    "tokens_per_second": "sampling at {:.0f} tokens/s",
}


def show(bar, step, metrics):
    """Advances the progress bar to a step, and shows its metrics; where no bar is drawn, says them,
    at most every SPEAK_SECONDS, and at the last step."""
    found = {name: metrics.get(name) for name in SHOWN}
    shown = [SHOWN[k].format(v) for k, v in found.items() if v is not None and math.isfinite(v)]
    bar.set_postfix_str(" ".join(shown), refresh=False)
    bar.update()
    rewarding = metrics.get("seconds_reward", 0) / metrics["seconds"]
    if rewarding > 0.5 and metrics["seconds"] > 1 and not getattr(bar, "warned", False):
        bar.warned = True
        say(f"rewards took {rewarding:.0%} of step {step}: REWARD_PROCESSES takes them aside")
    now = time.monotonic()
    if bar.disable and (
        step == bar.total or now - getattr(bar, "said", -math.inf) >= SPEAK_SECONDS
    ):
        bar.said = now
        say(f"step {step} of {bar.total}: {' '.join(shown)}, {metrics['seconds']:.1f} s a step")


def say_parts(laps):
    """Says where the time of the run's steps went."""
    total = sum(lap["seconds"] for lap in laps)
    shares = {p: sum(lap.get(f"seconds_{p}", 0) for lap in laps) / total for p in PARTS}
    parts = ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
    say(f"{len(laps)} steps of {total / len(laps):.2f} s: {parts}")


def say_end(run, asked):
    """Says how a run has ended. SystemExit if it was `asked` to end, or had nothing to train."""
    p, c = run.progress, run.c
    if run.laps:
        say_parts(run.laps)
    if asked:
        by = stop.asked or "a signal"
        raise SystemExit(
            f"ended by {by} after step {p.step}, which is saved: start again to resume"
        )
    if p.idle >= c.IDLE_LIMIT:
        raise SystemExit(
            f"nothing to train for {p.idle} steps, in the last one {run.idle_reason}. Read"
            f" {c.RUN_DIR}/samples.jsonl: is TASK = {c.TASK!r} too easy, too hard, or judged"
            " wrongly? Or has the model broken down (LEARNING_RATE too high)?"
        )
    if not run.laps:
        ended = f"the run in {c.RUN_DIR} has ended, at step {p.step}"
        say(f"{ended}: raise STEPS to go on with it, or choose another RUN_DIR")


def why_idle(metrics, groups, recipe):
    """Returns why a rollout with these metrics trains nothing; `groups` are without the flat ones
    that were skipped."""
    share, limit = metrics["completions/clipped_ratio"], recipe.c.MAX_COMPLETION_TOKENS
    cut = f"{'all' if share == 1 else f'{share:.0%}'} truncated at MAX_COMPLETION_TOKENS = {limit}"
    if groups:
        kept = f"the {len(groups)} groups that are not skipped"
        return f"{kept} are all truncated (MASK_TRUNCATED), and of what was sampled {cut}"
    accuracy, outcome = metrics.get("accuracy"), f"by OUTCOME = {recipe.c.OUTCOME!r}"
    judged = "which applied to none" if accuracy is None else f"accuracy {accuracy:.2f}"
    flat = {0: "all wrong", 1: "all right"}.get(accuracy, "each all right or all wrong")
    if recipe.c.SKIP_FLAT_GROUPS == "reward" or accuracy is None:
        flat, outcome = "each of equal total rewards", f"(mean {metrics['reward']:.2g}), {outcome}"
    sampled = f"{metrics['groups_sampled']} groups, {flat} {outcome} ({judged})"
    why = f"{sampled}, {cut}, are skipped (SKIP_FLAT_GROUPS = {recipe.c.SKIP_FLAT_GROUPS!r})"
    differ = 1 - metrics["frac_reward_zero_std"]  # 0 where "reward" has skipped them
    return f'{why}; "reward" would train {differ:.0%} of them, by other rewards' if differ else why


def say_idle(run, metrics, groups):
    """Says that the next step trains nothing, and why."""
    run.idle_reason = why_idle(metrics, groups, run.recipe)
    p = run.progress
    say(f"step {p.step + 1} trains nothing ({p.idle} in a row): {run.idle_reason}")


# --- REPORT_TO ----------------------------------------------------------------------
def check_reporters(report_to):
    """Raises SystemExit where rank 0 lacks a package of REPORT_TO, or a key for W&B."""
    if os.environ.get("RANK", "0") != "0":
        return
    for name in filter(lambda name: isinstance(name, str), report_to):
        if not importlib.util.find_spec(name):
            raise SystemExit(f"REPORT_TO = {report_to!r} needs a package: pip install {name}")
    if "wandb" in report_to and os.environ.get("WANDB_MODE", "online") == "online":
        import wandb

        try:
            wandb.login(verify=False, timeout=60)  # asks in a terminal
        except (wandb.Error, TimeoutError) as error:
            raise SystemExit(
                f"REPORT_TO = {report_to!r} finds no key for W&B ({error}): run `wandb login`, or"
                " set WANDB_MODE=offline and send the files later, by `wandb sync`"
            ) from None


def open_reporters(c, progress):
    """Returns a Reporter for each of REPORT_TO; `c` has the trainer's constants as attributes, and
    the run resumes, or begins, after the steps in `progress`, which goes on while they open."""
    begun = progress.step + 1 if progress.saved >= 0 else 0
    return [Reporter(to, c, progress.run, begun) for to in c.REPORT_TO]


class Reporter:
    """A thread that hands records, in order, to one of REPORT_TO: of this `run`, from the step
    `begun` on."""

    def __init__(self, to, c, run, begun):
        self.name, self.records = getattr(to, "__name__", str(to)), queue.SimpleQueue()
        self.thread = in_background(self._send, to, c, run, begun)

    def put(self, record):
        if self.thread.is_alive():
            self.records.put(record)

    def _send(self, to, c, run, begun):
        try:
            send, close = OPEN[to](c, run, begun) if to in OPEN else (to, lambda: None)
            while record := self.records.get():
                send(record)
            close()
        except Exception as error:  # noqa: BLE001 of any library: a report does not end a run
            say(f"REPORT_TO: {self.name} gets nothing more of this run, as it failed: {error!r}")


def close_reporters(reporters):
    """Waits until they have the last records, LAST_SECONDS at most."""
    end = time.monotonic() + LAST_SECONDS
    for reporter in reporters:
        reporter.records.put(None)
    for reporter in reporters:
        with announced(f"{reporter.name} to take the last metrics"):
            reporter.thread.join(max(0.0, end - time.monotonic()))
        if reporter.thread.is_alive():
            say(f"REPORT_TO: {reporter.name} did not take all metrics in {LAST_SECONDS} s")


def numbers(record):
    """Returns the numeric metrics of a record, by name."""
    numeric = {k: v for k, v in record.items() if isinstance(v, int | float)}
    return {k: v for k, v in numeric.items() if k not in ("step", "time")}


# --- Receivers ----------------------------------------------------------------------
def to_tensorboard(c, run, begun):
    """Returns (send, close) for the event files in RUN_DIR/tensorboard. Readers forget what a run
    wrote there after the step from which it resumes."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(Path(c.RUN_DIR, "tensorboard")), purge_step=begun)

    def send(record):
        for name, value in numbers(record).items():
            writer.add_scalar(name, value, record["step"], walltime=record["time"])
        writer.flush()

    return send, writer.close


def to_wandb(c, run, begun):
    """Returns (send, close) for a W&B run with this run's name, whose files are in RUN_DIR/wandb.

    W&B can't take steps back: those that it has already, of a run that resumes from an earlier one,
    keep their first values. The evaluation that a stopped run still owed goes to its next step.
    """
    import wandb

    live = wandb.init(
        project=os.environ.get("WANDB_PROJECT", "grpo-split"),
        name=run,
        id=re.sub(r"[^\w.-]", "-", run)[-128:],
        resume="allow",
        dir=c.RUN_DIR,
        config=constants_of(vars(c)),
        allow_val_change=True,
        settings=wandb.Settings(console="off", finish_timeout=LAST_SECONDS),
    )
    first = live.starting_step
    owed = first == begun  # of the step before, W&B may lack the evaluation
    if first > begun:
        say(f"W&B has this run's steps up to {first - 1}, and keeps them as they were")

    def send(record):
        if record["step"] >= first - owed:
            live.log(numbers(record), step=max(record["step"], first))

    return send, live.finish


OPEN = {"tensorboard": to_tensorboard, "wandb": to_wandb}


# --- A checkpoint's README.md -------------------------------------------------------
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
