"""Run by test_recut.py as ranks: the trainer, with each step's groups from a file. A step
without a file samples its groups, and rank 0 writes them.

python tests/given_groups.py FOLDER '[{"MODEL": "...", "RUN_DIR": "..."}, ...]'
"""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [os.path.dirname(HERE), HERE]  # HERE for tasks/even.py

import grpo_ref_split as trainer

sample_rollout = trainer.sample_rollout


def given(run):
    """As trainer.sample_rollout, which no rank leaves before all have looked for the file."""
    kind = "lora" if run.c.LORA_RANK else "full"
    file = Path(sys.argv[1], f"{kind}_{run.progress.step}.pt")
    if file.exists():
        return *torch.load(file, weights_only=False), []
    found = sample_rollout(run)[:2]
    if dist.get_rank() == 0:
        torch.save(found, file)
    return *found, []


if __name__ == "__main__":
    trainer.sample_rollout = given
    for preset in json.loads(sys.argv[2]):
        trainer.main(**preset)
