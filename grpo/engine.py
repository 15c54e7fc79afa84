"""DeepSpeed's engine, ZeRO-2, around the policy's model."""

import contextlib
import os

import torch

from grpo.forward import CompletionModel
from grpo.log import say

BUCKET = 50_000_000  # parameters whose gradients are reduced together


def make_engine(c, policy):
    """Collective: returns DeepSpeed's engine around a CompletionModel of the policy's model. `c`
    has the trainer's constants as attributes."""
    import deepspeed

    on_gpu = policy.model.device.type != "cpu"
    model = CompletionModel(policy.model, gradient_checkpointing=c.GRADIENT_CHECKPOINTING)
    for note in model.notes:
        say(note)
    optimizer = torch.optim.AdamW(  # 1711.05101
        [p for p in policy.model.parameters() if p.requires_grad],
        lr=c.LEARNING_RATE,
        betas=(0.9, 0.99),
        weight_decay=c.WEIGHT_DECAY,
        fused=True,  # on a CPU a tenth of the time; DeepSpeedCPUAdam compiles for minutes
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
        # Not used: the trainer plans micro-batches by tokens, and marks a step's last one itself
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_allreduce_op": "sum",  # the weights of the loss hold every denominator
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": max_grad_norm,
        "bf16": {"enabled": dtype == "bfloat16"},
        "data_types": {"grad_accum_dtype": "fp32"},
    }


def load_states(file):
    """Returns what torch.save has written of DeepSpeed's optimizer. Its tensors are mapped: they
    are read when they are copied, and keep the file in use until then. A file with anything but
    tensors and DeepSpeed's classes is not unpickled."""
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    with torch.serialization.safe_globals([LossScaler, ZeroStageEnum, fragment_address]):
        return torch.load(file, map_location="cpu", mmap=True, weights_only=True)


def learning_rate(c, step):
    """Returns the rate of step `step` (from 1): linear warm-up, then linear decay to FINAL_LR. `c`
    has the trainer's constants as attributes."""
    warm = min(1.0, step / max(c.WARMUP_STEPS, 1))
    done = max(0, step - c.WARMUP_STEPS) / max(1, c.STEPS - c.WARMUP_STEPS)
    return c.LEARNING_RATE * warm * (1 - (1 - c.FINAL_LR) * done)


def take_step(engine, rate, seed):
    """Collective: takes the optimizer's step with this learning rate. If a part of the gradient is
    not finite, weights and optimizer stay as they are, on all ranks. Returns metrics: the norm of
    the gradient before clipping (-1 or not finite: no step), and changed weights in bfloat16."""
    for group in engine.optimizer.param_groups:
        group["lr"] = rate
    metrics = {}
    if engine.bfloat16_enabled():
        from grpo.bfloat16_step import step_and_round

        metrics["weights_changed"] = step_and_round(engine, seed)
    else:
        engine.step()
    if engine.optimizer.overflow:
        # With offload in bf16 DeepSpeed 0.19.8 would add to these sums for ever: all NaN
        for part in engine.optimizer.averaged_gradients:
            engine.optimizer.averaged_gradients[part] = None
    return metrics | {"grad_norm": float(engine.get_global_grad_norm())}


def give_weights(engine, seed):
    """Collective: gives the model its weights, from the float32 master weights of all ranks."""
    if engine.bfloat16_enabled():
        from grpo.bfloat16_step import round_masters

        round_masters(engine.optimizer, seed)
    else:
        engine.optimizer.update_lp_params()


def training_threads():
    """Returns how many CPU threads a rank has for forward, backward and update: torch's number if
    OMP_NUM_THREADS is above 1 (torchrun sets 1), otherwise the rank's share of the cores."""
    if os.environ.get("OMP_NUM_THREADS", "1") != "1":
        return torch.get_num_threads()
    # Set by deepspeed, or torchrun. If each rank took all cores, a step would take twice the time
    ranks = int(os.environ.get("LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE") or "1")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, cores // ranks)


@contextlib.contextmanager
def cpu_threads():
    """Sets torch's CPU threads in the block: see training_threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(training_threads())
    try:
        yield
    finally:
        torch.set_num_threads(before)
