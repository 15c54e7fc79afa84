"""What a plain run loads of our files: the core. Options are imported only where a constant, the
task or the machine switches them on."""

import os
import subprocess
import sys

from documents import ROOT

from grpo.ranks import NEEDED

LINES = 6_200  # of our files that a plain run loads; to become 4 500
SERVER = {f"grpo/{name}.py" for name in ("client", "remote", "wire")}  # only with REF_SERVER
GPU = {f"grpo/options/{name}.py" for name in ("sizes", "sample_sizes", "cuda_graph", "nvidia")}
GPU |= {f"grpo/options/{name}.py" for name in ("lora", "plain_decoder")}  # that those import
RUN = """
import sys
from pathlib import Path
import grpo_ref_split as trainer
from grpo.constants import read_preset
given = {k: v for k, v in read_preset("presets/demo.py").items() if k in trainer.DEFAULTS}
given |= {"MODEL": sys.argv[1], "RUN_DIR": sys.argv[2], "REF_SERVER": None, "EVAL_STEPS": 1}
given |= {"PROMPTS_PER_STEP": 2, "SAVE_STEPS": 1, "EVAL_QUESTIONS": 2, "SKIP_FLAT_GROUPS": False}
given |= {"TASK": "tests/tasks/even.py"}
trainer.main(**given | {"STEPS": 1})
trainer.main(**given | {"STEPS": 2})  # resumes
print(trainer.torch._C._accelerator_getAllocatorSettings())
files = {getattr(module, "__file__", None) or "" for module in list(sys.modules.values())}
print(*(f for f in files if f.startswith(f"{Path().absolute()}/") and "/.venv" not in f))
"""


def lines_of(path):
    return len((ROOT / path).read_text().splitlines())


def test_a_plain_run_loads_the_core_alone(tiny, tmp_path):
    """It samples, trains, evaluates, saves and resumes, without a server, on a CPU."""
    command = [sys.executable, "-c", RUN, str(tiny), str(tmp_path / "run")]
    kept = {*NEEDED, "PYTORCH_CUDA_ALLOC_CONF"}  # of an earlier test's rank
    env = {k: v for k, v in os.environ.items() if k not in kept}
    printed = subprocess.check_output(command, cwd=ROOT, text=True, timeout=300, env=env)
    *_, allocator, files = printed.splitlines()
    assert allocator.startswith("expandable_segments:True,pinned_max")  # set before torch came
    core = [path.removeprefix(f"{ROOT}/") for path in files.split()]
    core = [path for path in core if lines_of(path) and not path.startswith("tests")]
    for path in sorted(core, key=lines_of):
        print(f"{lines_of(path):4} {path}")
    total, server, gpu = (sum(map(lines_of, files)) for files in (core, SERVER, GPU))
    print(total, "lines;", total + server, "with REF_SERVER;", gpu, "more on a GPU")
    assert not [path for path in core if path in SERVER or path.startswith("grpo/options/")]
    assert 4_000 < total <= LINES
    for page in ("README.md", "README.zh.md", "CONTRIBUTING.md"):
        assert f"{LINES:_}".replace("_", " ") in (ROOT / page).read_text(), page
