"""The gradient does not depend on how a step is cut up: 1 x 8 micro-batches, 8 x 1, 2 ranks x 4.

A mean over each micro-batch would favour short completions, and change with the accumulation.
"""

import sys
from pathlib import Path

import pytest
import torch
from processes import launch

# Measured in float32 on a CPU: 1.0e-6 at most, over loss types, cuts and ranks.
TOLERANCE = 1e-5


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_gradient_is_the_same_however_the_step_is_cut(ranks, tiny, tmp_path):
    script = Path(__file__).with_name("gradient_run.py")
    launch(ranks, [sys.executable, script, tiny, tmp_path / "out.pt"], tmp_path / "log")
    result = torch.load(tmp_path / "out.pt")
    # NaN and infinity are skipped on all ranks, and the steps after them are not
    assert len(result["bad"]) == (3 if ranks > 1 else 1)  # with offload, too
    for how, steps in result["bad"].items():
        assert steps == [(1, False), (1, False), (0, True), (0, True)], how
    for loss_type in ("grpo", "dapo", "dr_grpo"):
        plain = result[loss_type, "plain"]
        assert plain.norm() > 1e-3
        for cut in ("one batch", "some", "a row each"):
            gap = (result[loss_type, cut] - plain).norm() / plain.norm()
            assert gap < TOLERANCE, (loss_type, cut, gap)
            first, metrics = (result[loss_type, c, "metrics"] for c in ("one batch", cut))
            for name, value in metrics.items():  # means over the step, not over micro-batches
                assert value == pytest.approx(first[name], rel=1e-4, abs=1e-6), (cut, name)
        assert 0 < first["clip_ratio/low_mean"] < 1 and first["kl"] > 0
        assert 0 < first["clip_ratio/high_mean"] < 1
