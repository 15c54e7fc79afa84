"""The scripts choose PyTorch's allocator before torch is imported."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
PINNED = "pinned_max_round_threshold_mb:64,pinned_max_cached_size_mb:64"
TELL = "import {}, torch; print(torch._C._accelerator_getAllocatorSettings())"


@pytest.mark.parametrize(
    ("script", "own", "settings"),
    [
        ("grpo_ref_split", {}, f"expandable_segments:True,{PINNED}"),
        ("ref_server", {NAMES[0]: "max_split_size_mb:99"}, "max_split_size_mb:99"),
    ],
)
def test_torch_starts_with_segments_that_grow_unless_the_user_chooses(script, own, settings):
    env = {name: value for name, value in os.environ.items() if name not in NAMES} | own
    command = [sys.executable, "-c", TELL.format(script)]
    done = subprocess.run(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout.strip() == settings
