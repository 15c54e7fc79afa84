"""Where metrics go beside metrics.jsonl: TensorBoard, Weights & Biases, functions.

REPORT_TO names them. Rank 0 sends each record in a thread of its own: a receiver that is slow or
fails neither delays nor ends the run. Both packages are optional, and imported only if named.
"""

import importlib.util
import os
import queue
import re
import time
from pathlib import Path

from grpo.log import announced, in_background, say
from grpo.training.checkpoint import constants_of

LAST_SECONDS = 15  # for the last records; deepspeed kills a run 30 s after a signal


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
