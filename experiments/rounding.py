"""Does a bfloat16 run learn, if its weights are rounded in this way? (grpo/options/rounding.py)

    python experiments/rounding.py placed presets/smollm2.py MODEL=runs/smollm2_bf16 REF_SERVER=None

placed    at random, by a number that each weight keeps, as the trainer does
redrawn   at random, by new numbers in each update
nearest   to the nearest bfloat16, as DeepSpeed and others do

Arguments after the first are the trainer's. A CPU that can't multiply bfloat16 takes five times as
long as in float32. There this script multiplies in float32 and rounds the products, which is what
such hardware does, but for the order of sums.
"""

import functools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

import grpo_ref_split as trainer
from grpo.constants import command_line
from grpo.options import rounding

round_masters, updates = rounding.round_masters, []


def redrawn(optimizer, seed):
    updates.append(seed)
    round_masters(optimizer, f"{seed}/{len(updates)}")


KINDS = {"placed": round_masters, "redrawn": redrawn}
KINDS["nearest"] = lambda optimizer, seed: optimizer.update_lp_params()


def in_float32(product):
    """Returns a matrix product that multiplies bfloat16 tensors in float32, and rounds once."""

    @functools.wraps(product)  # torch.compile's registry wants different names
    def replaced(*tensors, out=None, **options):
        options |= {} if out is None else {"out": out}
        if tensors[1].dtype != torch.bfloat16:
            return product(*tensors, **options)
        options.pop("out", None)
        found = product(*(x if x is None else x.float() for x in tensors), **options)
        return found.bfloat16() if out is None else out.copy_(found)

    return replaced


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in KINDS:
        sys.exit(__doc__)
    rounding.round_masters = KINDS[sys.argv.pop(1)]
    _, given = command_line(trainer.DEFAULTS, __doc__)
    if not torch.cpu._is_avx512_bf16_supported():
        for owner, name in ((torch.nn.functional, "linear"), (torch, "mm"), (torch, "addmm")):
            setattr(owner, name, in_float32(getattr(owner, name)))
    trainer.main(**{"DTYPE": "bfloat16"} | given)
