"""A number of ranks other than the checkpoint's: joins what its ranks saved, and cuts it anew.

ZeRO-2 lays all trained parameters end to end and gives each rank an equal part of this row, with
zeros after the last parameter. So a new rank's part lies in the files of one or more old ranks. We
map these files and copy what the rank needs: it holds no other rank's part in memory.

The data continues at the lowest of the old ranks' positions. Prompts that other ranks have sampled
beyond it are sampled again, and the log reports how many.
"""

import json
import random
from pathlib import Path

import torch
import torch.distributed as dist

from grpo.engine import load_states
from grpo.log import say
from grpo.rollout import seed_of

ADAM, WEIGHTS = "base_optimizer_state", "single_partition_of_fp32_groups"  # DeepSpeed's names


def recut(trainer, before, sizes, seed):
    """Returns this rank's part of the optimizer, as DeepSpeed's state_dict(), and its position and
    random states, as checkpoint.write_rank, from what `before` ranks have saved in the folder
    `trainer`. `sizes` are the sizes of the rank's part, by parameter group."""
    rank, world = dist.get_rank(), dist.get_world_size()
    part = optimizer_part(trainer, before, sizes, rank)
    saved = [json.loads(Path(trainer, f"rank_{r}.json").read_text()) for r in range(before)]
    lowest, again = repeated([own["position"] for own in saved])
    say(
        f"number of ranks {before} -> {world}: the optimizer's parts are joined and cut anew. The"
        f" order of prompts continues at number {lowest}; {again} prompts after it were sampled"
        " before and are sampled again"
    )
    own = saved[rank] if rank < before else random_states(seed_of(seed, trainer.parent.name, rank))
    return part, own | {"position": lowest + rank}


def optimizer_part(trainer, before, sizes, rank):
    """Returns a rank's part of the optimizer, as DeepSpeed's state_dict(), joined and cut anew."""
    files = [Path(trainer, f"optimizer_{r}.pt") for r in range(before)]
    states = list(map(load_states, files))
    weights, adam = [], {}
    for group, size in enumerate(sizes):
        theirs = [state[WEIGHTS][group] for state in states]  # without the zeros at the end
        weights.append(cut(theirs, rank * size, size))
        # Empty until the first update
        moments = [state[ADAM]["state"].get(group, {}) for state in states]
        adam[group] = dict(moments[0])
        for name, value in moments[0].items():
            if torch.is_tensor(value) and value.dim():  # not the number of updates
                pairs = zip(moments, theirs, strict=True)
                adam[group][name] = cut([m[name][: len(w)] for m, w in pairs], rank * size, size)
    return states[0] | {WEIGHTS: weights, ADAM: states[0][ADAM] | {"state": adam}}


def cut(parts, start, size):
    """Returns `size` numbers from `start` on of the joined parts, with zeros after the last.

    >>> cut([torch.tensor([1, 2]), torch.tensor([3])], 1, 3)
    tensor([2, 3, 0])
    """
    result, at = parts[0].new_zeros(size), -start  # at: where a part begins in the result
    for part in parts:
        begin, end = max(0, at), min(size, at + len(part))
        if begin < end:
            result[begin:end] = part[begin - at : end - at]
        at += len(part)
    return result


def repeated(positions):
    """Returns (lowest position, number of prompts from there on that a rank has sampled). A rank's
    position is its next prompt; its last ones are before it in steps of the number of ranks.

    >>> repeated([4, 9])  # the second has sampled 5 and 7
    (4, 2)
    """
    lowest = min(positions)
    return lowest, sum((position - lowest) // len(positions) for position in positions)


def random_states(seed):
    """Returns random states, as checkpoint.write_rank, of a rank that the checkpoint lacks."""
    numbers = torch.Generator().manual_seed(seed).get_state().tolist()
    return {"random": random.Random(seed).getstate(), "torch": numbers}
