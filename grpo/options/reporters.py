"""REPORT_TO: rank 0 sends each record of metrics to TensorBoard or W&B, which use threads."""

import os
import re
from pathlib import Path


def numbers(record):
    """Returns the numeric metrics of a record, by name."""
    numeric = {k: v for k, v in record.items() if isinstance(v, int | float)}
    return {k: v for k, v in numeric.items() if k not in ("step", "time")}


class TensorBoard:
    """Writes event files to RUN_DIR/tensorboard. Readers forget what an earlier start of the run
    wrote there after the steps in `progress`."""

    def __init__(self, record, progress):
        from torch.utils.tensorboard import SummaryWriter

        folder, first = Path(record["RUN_DIR"], "tensorboard"), progress.step + 1
        self.writer = SummaryWriter(str(folder), purge_step=first if progress.saved else 0)

    def log(self, record):
        for name, value in numbers(record).items():
            self.writer.add_scalar(name, value, record["step"], walltime=record["time"])
        self.writer.flush()

    def close(self):
        self.writer.close()


class WandB:
    """Sends to a W&B run of this run's name, which keeps the steps that it has."""

    def __init__(self, record, progress):
        import wandb

        self.live = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "grpo-split"),
            name=progress.name,
            id=re.sub(r"[^\w.-]", "-", progress.name)[-128:],
            resume="allow",
            dir=record["RUN_DIR"],
            config=record,
            allow_val_change=True,
        )

    def log(self, record):
        self.live.log(numbers(record), step=record["step"])

    def close(self):
        self.live.finish()


REPORTERS = {"tensorboard": TensorBoard, "wandb": WandB}
