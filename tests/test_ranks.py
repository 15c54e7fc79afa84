"""What ranks do together: no rank outlives another one;
the gradient does not depend on how a step is cut up: 1 x 8 micro-batches, 8 x 1, 2 ranks x 4.

A mean over each micro-batch would favour short completions, and change with the accumulation.
"""

import re
import sys
import time
from pathlib import Path

import pytest
import torch
from processes import PATIENCE, kill, launch, start_ranks

# Measured in float32 on a CPU: 1.0e-6 at most, over loss types, cuts and ranks.
TOLERANCE = 1e-5


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.long), 2])
def test_the_gradient_is_the_same_however_the_step_is_cut(ranks, tiny, tmp_path):
    script = Path(__file__).with_name("gradient_run.py")
    launch(ranks, [sys.executable, script, tiny, tmp_path / "out.pt"], tmp_path / "log")
    result = torch.load(tmp_path / "out.pt")
    storages, copied, largest = result["saved"]  # save_pretrained alone would copy 0.7 of the model
    assert storages == 1 and copied <= largest
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


SCRIPT = """
import sys, time
from datetime import timedelta
import torch.distributed as dist
from grpo import ranks

dist.init_process_group("gloo")
rank = dist.get_rank()
with ranks.explained():
    for step in range(3):
        if step == 1:  # not before all have started, which may take long
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=4))
        if (rank, step) == (1, 1):
            print("rank 1 sleeps", flush=True)
            time.sleep(2000)
        assert sum(ranks.gathered(rank)) == 3
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("how", ["kill -9", "hangs"])
def test_a_rank_that_is_gone_ends_the_others_within_the_limit(tmp_path, how):
    """Within 4 s, not gloo's 30 minutes; the one that hangs is then still there."""
    log, script = tmp_path / "log", tmp_path / "script.py"
    script.write_text(SCRIPT)
    processes = start_ranks(3, [sys.executable, script], log)
    while "rank 1 sleeps" not in log.read_text():
        assert all(process.poll() is None for process in processes), log.read_text()
        time.sleep(0.05)
    if how == "kill -9":
        kill(processes[1])
    assert all(processes[rank].wait(PATIENCE) for rank in (0, 2))
    assert (processes[1].poll() is None) == (how == "hangs")
    assert len(re.findall("closed by peer|reset by peer|[Tt]imed out", log.read_text())) >= 2
