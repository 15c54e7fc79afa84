"""Finds the accelerator, knows what only NVIDIA's GPUs can do, and handles lack of memory."""

import contextlib
import errno
import re

import torch

# Completions sampled at once on a CPU, where nothing is tried: the system kills a process that
# takes too much memory
CPU_BATCH = 64


def accelerator():
    """Returns the device type of this machine's accelerator: "cuda" (also for ROCm's GPUs), "xpu",
    "npu", or None if it has none. A Mac's GPU does not count, as it has no float64."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return found.type if found and found.type != "mps" else None


def is_nvidia(device):
    """Returns whether a torch.device can use what was written for CUDA only: graphs and their
    memory pool, attention in one kernel, bf16 products in float32, Triton kernels. ROCm's GPUs,
    which PyTorch calls "cuda", run without these; to try them there, change this function."""
    return device.type == "cuda" and not torch.version.hip


def check_build(device):
    """Raises SystemExit if the installed torch was not built for this GPU of NVIDIA's: its first
    kernel would fail, with a traceback."""
    builds = torch.cuda.get_arch_list() if is_nvidia(device) else []
    if builds and not has_code(builds, capability := torch.cuda.get_device_capability(device)):
        name = f"{torch.cuda.get_device_name(device)}, compute capability {capability}"
        raise SystemExit(
            f"torch {torch.__version__} has no code for this GPU ({name}), only for"
            f" {', '.join(builds)}: use another GPU, or a build of torch that has it"
        )


def has_code(builds, capability):
    """Returns whether a GPU of this capability (major, minor) can run torch's `builds`: code (sm_)
    of its major version and no later minor one, PTX (compute_) of any earlier GPU; with a letter,
    its own alone.

    >>> has_code(["sm_86"], (8, 9)), has_code(["sm_86", "sm_90a"], (9, 1))
    (True, False)
    """
    for kind, major, minor, own in re.findall(r"(sm|compute)_(\d+)(\d)([a-z]?)", " ".join(builds)):
        oldest = capability if own else (0, 0) if kind == "compute" else (capability[0], 0)
        if oldest <= (int(major), int(minor)) <= capability:
            return True
    return False


def release_memory():
    """Returns the memory that torch caches unused to the accelerator, if there is one."""
    if accelerator():
        torch.accelerator.empty_cache()


# In errors of what allocates beside torch: drivers and kernels of CUDA, ROCm, Intel and Ascend,
# handles of cuBLAS and others, pinned memory, the CPU's allocator
NO_MEMORY = re.compile(
    r"out.?of.?memory|(not enough|(can't|cannot) allocate|unable to allocate) memory|alloc_?failed"
    r"|status_not_initialized|insufficient_resources|memory_error|out_of_(device_|host_)?(memory|resources)"
    r"|memoryallocation|invalid buffer size|nvml_success == r|207001",
    re.IGNORECASE,
)


def is_out_of_memory(error):
    """Returns whether an error means that memory ran out, in whatever class and words."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and bool(NO_MEMORY.search(str(error)))


@contextlib.contextmanager
def out_of_memory_names(name, value):
    """Raises SystemExit with the constant to lower if the block runs out of GPU memory."""
    try:
        yield
    except (RuntimeError, MemoryError, OSError) as error:
        if not is_out_of_memory(error):
            raise
        why = ". ".join(str(error).split(". ")[:2])  # torch's first two sentences
        raise SystemExit(
            f"{name} = {value} is too large ({why}): set a lower number and start again"
            " (docs/memory.md)"
        ) from error
