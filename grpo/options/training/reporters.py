"""REPORT_TO: sends each record of metrics to TensorBoard, W&B, or functions of the user.

Rank 0 sends each record to every receiver. If a receiver fails, it gets no more records, and the
run goes on. TensorBoard and W&B are imported only if named; they use threads.
"""

import importlib.util
import os
import re
from pathlib import Path

from grpo.log import announced, say

LAST_SECONDS = 15  # for W&B's last records; deepspeed kills a run 30 s after a signal


def check_reporters(report_to):
    """Raises SystemExit if rank 0 lacks a package of REPORT_TO, or a key for W&B."""
    if os.environ.get("RANK", "0") != "0":
        return
    for name in report_to:
        if isinstance(name, str) and not importlib.util.find_spec(name):
            raise SystemExit(f"REPORT_TO = {report_to!r} needs a package: pip install {name}")
    if "wandb" in report_to and os.environ.get("WANDB_MODE", "online") == "online":
        import wandb

        try:
            wandb.login(verify=False, timeout=60)  # asks in a terminal
        except (wandb.Error, TimeoutError) as error:
            raise SystemExit(
                f"REPORT_TO = {report_to!r} finds no key for W&B ({error}): run `wandb login`, or"
                " set WANDB_MODE=offline and upload the files later with `wandb sync`"
            ) from None


class Reporter:
    """One receiver of REPORT_TO: a generator to which records are sent. The run begins, or resumes,
    after the steps in `progress`."""

    def __init__(self, to, record, progress):
        self.name = getattr(to, "__name__", str(to))
        first = progress.step + 1 if progress.saved is not None else 0
        self.receiver = RECEIVERS.get(to, to_function)(to, record, progress.name, first)
        with announced(f"{self.name} to open"):
            self.give(None)  # a generator begins

    def give(self, record):
        self._try(lambda: self.receiver.send(record))

    def close(self):
        with announced(f"{self.name} to take the last metrics"):
            self._try(lambda: self.receiver.close())

    def _try(self, call):
        try:
            if self.receiver:
                call()
        except Exception as error:  # noqa: BLE001 of any library: a report does not end a run
            self.receiver = None
            say(f"REPORT_TO: {self.name} failed and gets no more records of this run: {error!r}")


def numbers(record):
    """Returns the numeric metrics of a record, by name."""
    numeric = {k: v for k, v in record.items() if isinstance(v, int | float)}
    return {k: v for k, v in numeric.items() if k not in ("step", "time")}


def to_function(function, record, run, first):
    while True:
        function((yield))


def to_tensorboard(to, record, run, first):
    """Writes event files to RUN_DIR/tensorboard. Readers forget what an earlier start of the run
    wrote there from step `first` on."""
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(Path(record["RUN_DIR"], "tensorboard")), purge_step=first) as writer:
        while True:
            record = yield
            for name, value in numbers(record).items():
                writer.add_scalar(name, value, record["step"], walltime=record["time"])
            writer.flush()


def to_wandb(to, record, run, first):
    """Sends to a W&B run of this run's name, whose files are in RUN_DIR/wandb. W&B keeps the steps
    that it has; what the run logs again for them is overwritten by the first step after them."""
    import wandb

    live = wandb.init(
        project=os.environ.get("WANDB_PROJECT", "grpo-split"),
        name=run,
        id=re.sub(r"[^\w.-]", "-", run)[-128:],
        resume="allow",
        dir=record["RUN_DIR"],
        config=record,
        allow_val_change=True,
        settings=wandb.Settings(console="off", finish_timeout=LAST_SECONDS),
    )
    try:
        while True:
            record = yield
            live.log(numbers(record), step=max(record["step"], live.starting_step))
    finally:
        live.finish()


RECEIVERS = {"tensorboard": to_tensorboard, "wandb": to_wandb}
