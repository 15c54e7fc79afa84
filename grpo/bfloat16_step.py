"""The optimizer's step of a bfloat16 model, whose weights are rounded at random (bfloat16.py)."""

import torch
import torch.distributed as dist

from grpo.bfloat16 import blocks, rounded
from grpo.ranks import gathered

COUNTED = 1 << 20  # weights of a rank that are compared before and after an update


def step_and_round(engine, seed):
    """Collective: takes the optimizer's step; returns the share of the model's weights that it has
    changed, estimated from COUNTED weights of each rank."""
    before = sample_of(engine.optimizer)
    engine.step()  # gives the model the nearest bfloat16, which has no further use
    round_masters(engine.optimizer, seed)
    changed = int((before != sample_of(engine.optimizer)).sum())
    changed, counted = zip(*gathered((changed, len(before))), strict=True)
    return sum(changed) / sum(counted)


@torch.no_grad()
def sample_of(optimizer):
    """Returns a copy of about COUNTED of this rank's weights, evenly spread over its part."""
    rank, groups = dist.get_rank(), optimizer.parallel_partitioned_bit16_groups
    return torch.cat([parts[rank][:: len(parts[rank]) // COUNTED + 1] for parts in groups])


@torch.no_grad()
def round_masters(optimizer, seed):
    """Collective: gives the model its weights, from all ranks' masters. `optimizer` is DeepSpeed's,
    whose update_lp_params does the same with the nearest bfloat16."""
    from deepspeed.runtime.utils import all_gather_dp_groups

    rank, groups = dist.get_rank(), optimizer.parallel_partitioned_bit16_groups
    for parts, master in zip(groups, optimizer.single_partition_of_fp32_groups, strict=True):
        place = rank * len(master)  # ZeRO cuts the row of all weights into equal parts
        for first, end in blocks(place, len(master)):
            part = parts[rank][first:end]
            part.copy_(rounded(master[first:end].to(part.device), place + first, seed))
    all_gather_dp_groups(
        groups_flat=optimizer.bit16_groups_flat,
        partitioned_param_groups=groups,
        dp_process_group=optimizer.real_dp_process_group,
        start_alignment_factor=optimizer.nccl_start_alignment_factor,
        allgather_bucket_size=optimizer.allgather_bucket_size,
    )
