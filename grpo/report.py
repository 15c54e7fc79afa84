"""Reports metrics and samples: in RUN_DIR, by the progress bar, and to REPORT_TO's reporters."""

import contextlib
import itertools
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from tqdm import tqdm

from grpo.constants import ROOT, STOPPED
from grpo.log import SPEAK_SECONDS, say
from grpo.rollout import is_flat
from grpo.run import PARTS
from grpo.stop import stop

ITEM_CHARS = 2000  # of each value of an item in samples.jsonl
SHOWN = {  # the metrics in the progress bar, if the step has them
    "reward": "reward {:+.2f}",
    "accuracy": "accuracy {:.2f}",
    "kl": "kl {:.3f}",
    "completions/mean_length": "length {:.0f}",
    "tokens_per_second": "sampling at {:.0f} tokens/s",
}


# --- RUN_DIR ------------------------------------------------------------------------
def as_json(value):
    """Returns the value as JSON holds it: NaN and infinity become None, a function its name, and an
    object that JSON does not know its text, at most 1000 characters of it."""
    text = json.dumps(value, default=lambda x: getattr(x, "__name__", str(x)[:1000]), skipkeys=True)
    return json.loads(text, parse_constant=lambda _: None)


@contextlib.contextmanager
def naming_run_dir(folder):
    """Raises SystemExit, with RUN_DIR's name, if the block can't write to it (`folder`)."""
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        # On a full disk torch.save raises a RuntimeError while it handles the file's OSError
        if isinstance(error, RuntimeError) and not isinstance(error.__context__, OSError):
            raise
        raise SystemExit(
            f"RUN_DIR = {str(folder)!r} can't be written ({error}): is its disk full or read-only?"
            " Free some space, or choose another RUN_DIR; a run resumes from what it has saved"
        ) from error


class RunFolder:
    """RUN_DIR's metrics.jsonl and samples.jsonl; checkpoint.py and bad_step.py write there too."""

    def __init__(self, path, reporters=()):
        self.path, self.reporters = Path(path), reporters
        self.files = [self.path / name for name in ("metrics.jsonl", "samples.jsonl")]
        self.path.mkdir(parents=True, exist_ok=True)

    def close(self):
        for reporter in self.reporters:
            reporter.close()
        with contextlib.suppress(OSError):  # a full disk
            (self.path / STOPPED).touch()

    def log(self, file, record):
        """Appends a record, with the time, to a file of one JSON object per line."""
        if dist.get_rank() == 0:
            record = as_json(record) | {"time": round(time.time(), 2)}
            with naming_run_dir(self.path), open(self.path / file, "a") as f:
                f.write(json.dumps(record) + "\n")
            for reporter in self.reporters if file == "metrics.jsonl" else ():
                reporter.log(record)

    def log_samples(self, run, groups):
        """Writes the completions of one group of the rollout, trained on or not, the one with the
        highest advantage first. Ranks but 0 write nothing."""
        if dist.get_rank() != 0 or not groups:
            return
        step, decode = run.progress.step + 1, run.policy.tokenizer.decode
        group = groups[step % len(groups)]
        item = next(q.item for q in run.recipe.prompts if q.index == group.index)
        short = lambda x: x if len(text := str(x)) <= ITEM_CHARS else f"{text[:ITEM_CHARS]} ..."
        item = {name: short(value) for name, value in item.items()}
        once, numbered = {"item": item}, enumerate(group.samples)
        for i, sample in sorted(numbered, key=lambda pair: -pair[1].advantage):
            record = {
                "step": step,
                "group": group.id,
                "number": i,
                "prompt": decode(group.prompt),
                **once,
                "question": item.get("question"),
                "answer": item.get("answer"),
                "completion": decode(sample.ids),
                "rewards": sample.rewards,
                "advantage": sample.advantage,
                "flat": is_flat(group),
                "truncated": sample.truncated,
                "sampler": group.sampler,
                "policy_version": group.version,
            }
            if sample.is_model_token:  # model, task, model, ...
                pairs = zip(sample.is_model_token, sample.ids, strict=True)
                parts = itertools.groupby(pairs, key=lambda pair: pair[0])
                record["turns"] = [decode([id for _, id in part]) for _, part in parts]
            self.log("samples.jsonl", record)
            once = {}

    def undo(self, step):
        """Removes the records of steps after `step`, which the run repeats, and an incomplete last
        line."""
        for path in filter(Path.exists, self.files if dist.get_rank() == 0 else ()):
            draft = path.with_suffix(".draft")
            with open(path, errors="replace") as old, open(draft, "w") as new:
                for line in old:
                    with contextlib.suppress(ValueError, LookupError, TypeError):  # no record
                        if json.loads(line)["step"] <= step:
                            print(line.rstrip("\n"), file=new)
            draft.replace(path)

    def set_aside(self):
        """Renames the records of a run that ended before its first checkpoint: it starts again."""
        when = time.strftime("%Y%m%d-%H%M%S")
        for path in filter(Path.exists, self.files if dist.get_rank() == 0 else ()):
            path.rename(earlier := path.with_suffix(f".{when}.jsonl"))
            say(f"the run had no checkpoint and starts again; its old records are in {earlier}")


# --- What is printed ----------------------------------------------------------------
class Bar(tqdm):
    """Rank 0's bar on a terminal; else a line at most every SPEAK_SECONDS, and at the last step."""

    def __init__(self, step, steps):
        hidden = os.environ.get("RANK", "0") != "0" or not sys.stderr.isatty()
        super().__init__(total=steps, initial=step, unit="step", disable=hidden)
        self.logged, self.began = -math.inf, None  # the last line; (step, time) at the start

    def show(self, step, metrics):
        found = {name: metrics.get(name, math.nan) for name in SHOWN}
        shown = " ".join(SHOWN[name].format(v) for name, v in found.items() if math.isfinite(v))
        self.set_postfix_str(shown, refresh=False)
        self.update()
        now, seconds = time.monotonic(), metrics["seconds"]
        # The mean over all steps, with evaluations and checkpoints: a single step says little
        before, began = self.began = self.began or (step - 1, now - seconds)
        if self.disable and (step == self.total or now - self.logged >= SPEAK_SECONDS):
            self.logged = now
            minutes = (self.total - step) * (now - began) / (step - before) / 60
            left = f", {minutes:.0f} minutes left" * (step < self.total)
            say(f"step {step} of {self.total}: {shown}, {seconds:.1f} s a step{left}")


def give_hints(metrics):
    """Logs what the first step shows: the peak of a GPU's memory, and if rewards are slow."""
    if peak := metrics.get("gpu_memory_gb"):
        room = torch.accelerator.get_memory_info()[1] / 1e9
        more = ": MICRO_BATCH_TOKENS may be raised" if peak < room / 2 else ""
        say(f"the start and the first step took {peak:.0f} of {room:.0f} GB{more}")
    if 2 * metrics.get("seconds_reward", 0) > metrics["seconds"]:
        say("rewards took most of the first step: see `async def rewards` in docs/tasks.md")


def report_end(run, asked):
    """Logs the time of each part and the end of a run. Raises SystemExit if a stop was requested
    (`asked`), or if there was nothing to train on."""
    p, c, laps = run.progress, run.c, run.laps
    if laps:
        total = sum(lap["seconds"] for lap in laps)
        shares = {name: sum(lap.get(f"seconds_{name}", 0) for lap in laps) for name in PARTS}
        parts = ", ".join(f"{name} {seconds / total:.0%}" for name, seconds in shares.items())
        say(f"{len(laps)} steps, {total / len(laps):.2f} s each: {parts}")
    if asked:
        is_saved = "is saved: start again to resume" if p.saved == p.step else "is not saved"
        raise SystemExit(f"stopped by {stop.asked or 'a signal'}; step {p.step} {is_saved}")
    if p.idle >= c.IDLE_LIMIT:
        raise SystemExit(
            f"{p.idle} steps in a row had nothing to train on; in the last one {p.idle_reason}."
            f" Read {c.RUN_DIR}/samples.jsonl: is TASK = {c.TASK!r} too easy or too hard, or are"
            " its rewards wrong? Or has the model collapsed (is LEARNING_RATE too high)?"
        )
    if not laps:
        ended = f"the run in {c.RUN_DIR} has ended, at step {p.step}"
        say(f"{ended}: raise STEPS to continue it, or choose another RUN_DIR")


def commit():
    """Returns the version of the code: the commit of the git checkout, and if it has changes."""
    git = ["git", f"--git-dir={ROOT}/.git", f"--work-tree={ROOT}"]  # not a repository around ours
    git += ["describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.check_output(
            git, stderr=subprocess.DEVNULL, text=True, timeout=10
        ).strip()
    return "not a git checkout"
