"""The gradient does not depend on how a step is cut up: 1 x 8 micro-batches, 8 x 1, 2 ranks x 4.

Ancestors normalise within each micro-batch (FIELD: length bias, accumulation changes results).
"""

import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

# Measured in float32 on a CPU: 1.0e-6 at most, over loss types, cuts and ranks.
TOLERANCE = 1e-5


def launch(ranks, script, *arguments, timeout=200):
    """Runs a script under the deepspeed launcher; -> its output. Fails with it if it fails."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    deepspeed = Path(sys.executable).with_name("deepspeed")
    command = [deepspeed, "--num_gpus", ranks, "--no_local_rank", "--master_port", port, script]
    run = subprocess.run(
        [str(word) for word in (*command, *arguments)],
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
    )
    assert run.returncode == 0, run.stdout[-4000:]
    return run.stdout


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_gradient_is_the_same_however_the_step_is_cut(ranks, tiny, tmp_path):
    script = Path(__file__).with_name("gradient_run.py")
    launch(ranks, script, tiny, tmp_path / "out.pt")
    result = torch.load(tmp_path / "out.pt")
    for loss_type in ("grpo", "dapo", "dr_grpo"):
        plain = result[loss_type, "plain"]
        assert plain.norm() > 1e-3
        for cut in ("one batch", "some", "a row each"):
            gap = (result[loss_type, cut] - plain).norm() / plain.norm()
            assert gap < TOLERANCE, (loss_type, cut, gap)
            first, metrics = (result[loss_type, c, "metrics"] for c in ("one batch", cut))
            for name, value in metrics.items():  # means over the step, not over micro-batches
                assert value == pytest.approx(first[name], rel=1e-4, abs=1e-6), (cut, name)
        assert 0 < first["clip_low"] < 1 and 0 < first["clip_high"] < 1 and first["kl"] > 0
