"""Does a bfloat16 run learn, if its weights are rounded in this way?

(grpo/bfloat16.py)

    python experiments/rounding.py placed presets/smollm2.py MODEL=runs/smollm2_bf16 REF_SERVER=None

placed    at random, by a number that each weight keeps, as the trainer does
redrawn   at random, by new numbers in each update
nearest   to the nearest bfloat16, as DeepSpeed and others do

    python experiments/rounding.py moved runs/smollm2_bf16    # how far do a model's weights move?

Arguments after the first are the trainer's. A CPU that can't multiply bfloat16 takes five times as
long as in float32. There this script multiplies in float32 and rounds the products, which is what
such hardware does, but for the order of sums.
"""

import functools
import itertools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

import grpo_ref_split as trainer
from grpo import bfloat16, bfloat16_step
from grpo.constants import command_line

round_masters, updates = bfloat16_step.round_masters, []


def redrawn(optimizer, seed):
    updates.append(seed)
    round_masters(optimizer, f"{seed}/{len(updates)}")


KINDS = {"placed": round_masters, "redrawn": redrawn}
KINDS["nearest"] = lambda optimizer, seed: optimizer.update_lp_params()


def moved(model):
    """Prints which share of the weights changes, and of the masters' movement reaches the model, if
    every eighth weight of the model moves by a rate in one direction for some steps."""
    from safetensors.torch import load_file

    weights = load_file(Path(model, "model.safetensors")).values()
    start = torch.cat([x.flatten() for x in weights])[::8].bfloat16().float()
    draw = torch.Generator().manual_seed(0)
    way = torch.randint(2, start.shape, generator=draw).double() * 2 - 1
    for rate, steps in itertools.product((1e-6, 5e-6, 1.5e-5), (1, 10, 100)):
        masters = start + (way * rate * steps).float()
        parts = bfloat16.blocks(0, len(masters))
        placed = torch.cat([bfloat16.rounded(masters[a:b], a, seed=0) for a, b in parts])
        for name, found in (("nearest", masters.bfloat16()), ("placed", placed)):
            share = (found.float() != start).double().mean()
            far = way @ (found.float() - start).double() / (way @ (masters - start).double())
            print(f"rate {rate:g}, {steps} steps, {name}: {share:.1%} changed, moved {far:.1%}")


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
    if sys.argv[1:2] == ["moved"]:
        sys.exit(moved(sys.argv[2]))
    if len(sys.argv) < 2 or sys.argv[1] not in KINDS:
        sys.exit(__doc__)
    bfloat16_step.round_masters = KINDS[sys.argv.pop(1)]
    _, given = command_line(trainer.DEFAULTS, __doc__)
    if not torch.cpu._is_avx512_bf16_supported():
        for owner, name in ((torch.nn.functional, "linear"), (torch, "mm"), (torch, "addmm")):
            setattr(owner, name, in_float32(getattr(owner, name)))
    trainer.main(**{"DTYPE": "bfloat16"} | given)
