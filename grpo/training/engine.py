"""DeepSpeed's engine, ZeRO-2, around the policy's model, and the processes that are its ranks."""

import contextlib
import importlib.util
import math
import os
from datetime import timedelta

import torch
import torch.distributed as dist

from grpo.forward import CompletionModel
from grpo.log import announced, say
from grpo.models import own_device
from grpo.sampling.memory import BUCKET
from grpo.training.liveness import gathered

# The number of processes that mpirun or srun has started
LAUNCHED = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
# What tells a process which rank it is, and where the others are
NEEDED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
SCHEDULES = ("linear", "cosine")  # LR_SCHEDULE


def stand_alone():
    """Makes a process that no launcher has started the only rank: without this DeepSpeed would look
    for MPI. Raises SystemExit where one of several processes can't know its rank."""
    if "RANK" in os.environ or any(int(os.environ.get(name) or 1) > 1 for name in LAUNCHED):
        missing = [name for name in NEEDED if name not in os.environ]
        if missing and not importlib.util.find_spec("mpi4py"):  # by which DeepSpeed would find out
            raise SystemExit(
                f"this process is one of several, but {', '.join(missing)} is not set: start them"
                " as docs/several_machines.md does, with deepspeed, torchrun or srun"
            )
        return
    # MASTER_PORT 0: the system picks a free one
    only = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_SIZE": "1"}
    os.environ.update(only | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"})
    if (gpus := torch.accelerator.device_count()) > 1:
        say(f"this process trains on one of {gpus} GPUs; `deepspeed` starts one on each")


def join_ranks(wait_limit_seconds):
    """Collective: makes this process a rank with a GPU of its own, unless it is one. Comes before
    the model is loaded, which may take longer on one machine than a collective waits."""
    if dist.is_initialized():
        return
    import deepspeed  # takes seconds; tests of the trainer's functions do without

    own_device()
    # DeepSpeed would compile an all-reduce for CPU inference, which training never calls: a minute,
    # and a compiler that may be missing. Other versions of it may compile: say what we wait for
    getattr(deepspeed.ops, "__compatible_ops__", {})["deepspeed_shm_comm"] = False
    say("starting DeepSpeed; if it compiles an op of its own now, that takes about a minute, once")
    stand_alone()
    # Longer than a rank waits for the server, whose error says more
    with announced("all ranks to start"):
        deepspeed.init_distributed(timeout=timedelta(seconds=wait_limit_seconds + 60))


def make_engine(c, policy):
    """Collective: returns DeepSpeed's engine around a CompletionModel of the policy's model. `c`
    has the trainer's constants as attributes."""
    import deepspeed

    join_ranks(c.WAIT_LIMIT_SECONDS)
    on_gpu = policy.model.device.type != "cpu"
    if not on_gpu:
        threads = training_threads(c.CPU_THREADS)
        say(f"on a CPU: {threads} threads of each rank for forward and backward")
    model = CompletionModel(
        policy.model,
        share_prompts=c.SHARE_PROMPTS,
        gradient_checkpointing=c.GRADIENT_CHECKPOINTING,
    )
    # What one rank's model can't do, none does: all must plan the same micro-batches
    abilities = model.shares, model.separable, model.notes
    shares, separable, notes = zip(*gathered(abilities, "all ranks to load the model"), strict=True)
    model.shares, model.separable = all(shares), all(separable)
    for note in sorted(set().union(*notes)):
        say(note)
    optimizer = torch.optim.AdamW(  # 1711.05101
        [p for p in policy.model.parameters() if p.requires_grad],
        lr=c.LEARNING_RATE,
        betas=c.ADAM_BETAS,
        weight_decay=c.WEIGHT_DECAY,
        # On a CPU about as fast as DeepSpeedCPUAdam, whose first use compiles for minutes
        fused=on_gpu or c.OFFLOAD_OPTIMIZER,
    )
    config = engine_config(policy.dtype, c.MAX_GRAD_NORM, c.OFFLOAD_OPTIMIZER, on_gpu)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def engine_config(dtype, max_grad_norm, offload_optimizer, on_gpu):
    """Returns DeepSpeed's configuration."""
    zero = {"stage": 2, "contiguous_gradients": True, "reduce_bucket_size": BUCKET}
    # Each part of a bucket is reduced to the rank that keeps it: half the bytes of an all-reduce
    zero["use_multi_rank_bucket_allreduce"] = False
    if offload_optimizer:  # copies from and to pinned memory take a fraction of the time
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": on_gpu}
    return {
        # A formality: the trainer plans micro-batches by tokens, and marks a step's last one itself
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_allreduce_op": "sum",  # the weights of the loss hold every denominator
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": max_grad_norm,
        "bf16": {"enabled": dtype == "bfloat16"},
        "data_types": {"grad_accum_dtype": "fp32"},
    }


def learning_rate(c, step):
    """Returns the rate of update `step` (from 1): linear warm-up, then LR_SCHEDULE's decay to
    FINAL_LR (cosine: SGDR, 1608.03983, with one period). `c` has the trainer's constants as
    attributes."""
    warm = min(1.0, step / max(c.WARMUP_STEPS, 1))
    done = max(0, step - c.WARMUP_STEPS) / max(1, c.STEPS - c.WARMUP_STEPS)
    if c.LR_SCHEDULE == "cosine":
        done = (1 - math.cos(math.pi * done)) / 2
    return c.LEARNING_RATE * warm * (1 - (1 - c.FINAL_LR) * done)


def take_step(engine):
    """Collective: takes the optimiser's step, unless a part of the gradient is not finite: then
    weights and optimiser stay as they are, on all ranks. Returns the gradient's norm before
    clipping; -1 or not finite where the step was not taken."""
    engine.step()
    if engine.optimizer.overflow:
        # With offload in bf16 DeepSpeed 0.19.8 would add to these sums for ever: all NaN
        for part in engine.optimizer.averaged_gradients:
            engine.optimizer.averaged_gradients[part] = None
    return float(engine.get_global_grad_norm())


def training_threads(asked):
    """Returns a rank's CPU threads for forward and backward: `asked`, or if that is 0 its share of
    the machine's cores. None is left to a server on it, which scores little meanwhile."""
    # deepspeed's name, or torchrun's: with all cores for each rank a step takes twice the time
    ranks = int(os.environ.get("LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE") or "1")
    own, launcher = len(os.sched_getaffinity(0)), len(os.sched_getaffinity(os.getppid()))
    bound = own < launcher  # deepspeed --bind_cores_to_rank: they are this rank's alone
    return asked or (own if bound else max(1, own // ranks))


@contextlib.contextmanager
def cpu_threads(number):
    """Sets torch's CPU threads in the block: see training_threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(training_threads(number))
    try:
        yield
    finally:
        torch.set_num_threads(before)
