"""NVIDIA's GPUs: what may keep torch or DeepSpeed from using one is reported at the start."""

import os
import re
import sys

import torch

from grpo.devices import is_nvidia

FILES = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg")  # of the driver, also in WSL


def is_there():
    """Returns whether there is a GPU of NVIDIA's that CUDA_VISIBLE_DEVICES does not hide."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "not set") in ("", "-1")
    return any(map(os.path.exists, FILES)) and not hidden


def check_driver():
    """Raises SystemExit if torch, built for CUDA, can't use the GPU: training would run on the CPU
    for weeks, unnoticed."""
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "not set")
        raise SystemExit(
            f"there is a GPU, but torch {torch.__version__} can't use it: {error} Install a newer"
            f" driver, or a build of torch for your driver. If CUDA_VISIBLE_DEVICES (now {visible})"
            " names a GPU that does not exist, correct it; -1 runs on the CPU"
        ) from error


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
    this capability alone.

    >>> has_code(["sm_86"], (8, 9)), has_code(["sm_86", "sm_90a"], (9, 1))
    (True, False)
    """
    for kind, major, minor, own in re.findall(r"(sm|compute)_(\d+)(\d)([a-z]?)", " ".join(builds)):
        oldest = capability if own == "a" else (0, 0) if kind == "compute" else (capability[0], 0)
        if oldest <= (int(major), int(minor)) <= capability:
            return True
    return False


def forget_pynvml(visible):
    """If CUDA_VISIBLE_DEVICES is `visible` and has names (GPU-..., MIG-...), as clusters set it:
    DeepSpeed 0.19.8, which takes them for numbers to ask pynvml for memory, asks torch instead."""
    cuda = sys.modules.get("deepspeed.accelerator.cuda_accelerator")
    if cuda and not visible.replace(",", "").isdigit():
        cuda.pynvml = None
