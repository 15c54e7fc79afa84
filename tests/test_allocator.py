"""The scripts choose PyTorch's allocator before torch is imported; vLLM keeps its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from grpo.sampling.vllm_policy import set_environment

ROOT = Path(__file__).parent.parent
NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
TELL = "import {}, torch; print(torch._C._accelerator_getAllocatorSettings())"


@pytest.mark.parametrize(
    ("script", "own", "settings"),
    [
        ("grpo_ref_split", {}, "expandable_segments:True"),
        ("ref_server", {NAMES[0]: "max_split_size_mb:99"}, "max_split_size_mb:99"),
    ],
)
def test_torch_starts_with_segments_that_grow_unless_the_user_chooses(script, own, settings):
    env = {name: value for name, value in os.environ.items() if name not in NAMES} | own
    command = [sys.executable, "-c", TELL.format(script)]
    done = subprocess.run(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout.strip() == settings


def test_vllm_starts_without_them(monkeypatch):
    """Its sleep mode gives no memory back with them (vLLM #11743)."""
    grows = {NAMES[1]: "expandable_segments:True"}  # a preset has imported the trainer before
    cases = [({}, "expandable_segments:False"), ({NAMES[0]: "a:1"}, "a:1")]
    for own, settings in [*cases, (grows, "expandable_segments:False"), ({NAMES[1]: "b:2"}, "b:2")]:
        monkeypatch.setattr(os, "environ", own)
        set_environment()
        assert os.environ[NAMES[1]] == settings
