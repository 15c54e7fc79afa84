"""Finds the accelerator, knows what only NVIDIA's GPUs can do, and handles lack of memory."""

import contextlib
import ctypes
import os
import re

import torch


def accelerator():
    """Returns the device type of this machine's accelerator: "cuda" (also for ROCm's GPUs), "xpu",
    "npu", or None if it has none. A Mac's GPU does not count, as it has no float64."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return found.type if found and found.type != "mps" else None


def is_nvidia(device):
    """Returns whether a torch.device can use what was written for CUDA only: bf16 products in
    float32, Triton kernels. ROCm's GPUs, which PyTorch calls "cuda", run without these; to try them
    there, change this function."""
    return device.type == "cuda" and not torch.version.hip


DRIVER = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg")  # files of NVIDIA's, also in WSL


def check_driver():
    """Raises SystemExit if there is a GPU of NVIDIA's that torch, built for CUDA, can't use:
    training would run on the CPU for weeks, unnoticed."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "not set")
    if visible in ("", "-1") or not any(map(os.path.exists, DRIVER)):
        return
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        raise SystemExit(
            f"there is a GPU, but torch {torch.__version__} can't use it: {error} Install a newer"
            f" driver, or a build of torch for your driver. If CUDA_VISIBLE_DEVICES (now {visible})"
            " names a GPU that does not exist, correct it; -1 runs on the CPU"
        ) from error


def release_memory():
    """Returns the memory that torch caches unused to the accelerator, if there is one."""
    if accelerator():
        torch.accelerator.empty_cache()


def keep_freed_memory():
    """Makes malloc keep what large tensors on a CPU free. By default glibc unmaps each and maps the
    next anew, which the kernel fills with zeros: a third of the speed of sampler.draw."""
    with contextlib.suppress(AttributeError, TypeError):  # another libc: nothing to set
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-4, 0), mallopt(-1, 2**31 - 1)  # M_MMAP_MAX, M_TRIM_THRESHOLD


NO_MEMORY = re.compile(r"out.?of.?memory|alloc_failed|\ballocate\b", re.IGNORECASE)


def is_out_of_memory(error):
    """Returns whether an error means that memory ran out, as far as its class or text says so."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and bool(NO_MEMORY.search(str(error)))


@contextlib.contextmanager
def out_of_memory_names(name, value):
    """Raises SystemExit with the constant to lower if the block runs out of GPU memory."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        why = ". ".join(str(error).split(". ")[:2])  # torch's first two sentences
        raise SystemExit(
            f"{name} = {value} is too large ({why}): lower it, or save memory by another constant"
            " (docs/memory.md, Out of memory)"
        ) from error
