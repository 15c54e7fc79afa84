"""The GPU's code paths, on a simulated GPU: tests of rehearsal/, in processes of their own, as a
process has that GPU until it ends."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from rehearsal import build

HERE = Path(__file__).parent
REASON = build.why_not()


@pytest.mark.skipif(bool(REASON), reason=str(REASON))
@pytest.mark.parametrize("names", ["runs", "training device"])
def test_on_a_simulated_gpu(names):
    files = [HERE / f"rehearsal/gpu_{name}.py" for name in names.split()]
    paths = os.environ | {"PYTHONPATH": f"{HERE.parent}{os.pathsep}{HERE}"}
    command = [sys.executable, "-m", "rehearsal", *files]
    options = {"cwd": HERE.parent, "env": paths, "capture_output": True, "text": True}
    done = subprocess.run(command, check=False, **options)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
