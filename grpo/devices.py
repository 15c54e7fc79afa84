"""Which accelerator a process has, what is for NVIDIA's GPUs alone, and memory that runs out."""

import contextlib

import torch


def accelerator():
    """Returns the type of this machine's accelerator, as devices name it: "cuda" (ROCm's GPUs,
    too), "xpu", "npu"; None where there is none. A Mac's counts as none: it has no float64."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return found.type if found and found.type != "mps" else None


def is_nvidia(device):
    """Returns whether a torch.device may have what is written and checked for CUDA alone: graphs
    and their memory pool, attention in one kernel, bf16 products in float32, the Triton kernel.
    ROCm's GPUs, which PyTorch calls "cuda", do without, as all others: to try them, begin here."""
    return device.type == "cuda" and not torch.version.hip


def release_memory():
    """Gives what torch's allocator keeps unused back to the accelerator, if there is one."""
    if accelerator():
        torch.accelerator.empty_cache()


@contextlib.contextmanager
def out_of_memory_names(name, value):
    """If the block runs out of the GPU's memory, SystemExit names the constant to lower."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        why = ". ".join(str(error).split(". ")[:2])  # torch's sentences on what it tried
        raise SystemExit(
            f"{name} = {value} is too large ({why}): set a lower number, and start again to resume"
            " from the newest checkpoint (docs/memory.md)"
        ) from error
