"""What a plain run loads of our files: the core. Options are imported only where a constant, the
task or the machine switches them on."""

import json
import os
import subprocess
import sys

from documents import ROOT

LINES = 5_197  # of our files that a plain run loads: a ceiling, which only goes down
SERVER = {f"grpo/{name}.py" for name in ("client", "remote", "wire")}  # only with REF_SERVER
HALF = {"grpo/bfloat16.py", "grpo/bfloat16_step.py"}  # only in bfloat16
RARE = {  # files of which such a run executes fewer than 60 % of the lines: what the others are for
    "grpo/constants.py",  # the command line, presets, names of other projects
    "grpo/faults.py",  # mistakes in a task
    "grpo/devices.py",  # GPUs, and lack of memory
    "tasks/data.py",  # data from the hub or from files
}
RUN = """
import json, os, sys, threading
from pathlib import Path
ours, ran = f"{Path().absolute()}/", set()

def trace(frame, event, _):
    path = frame.f_code.co_filename
    if not path.startswith(ours) or "/.venv" in path:
        return None
    if event == "line":
        ran.add((path, frame.f_lineno))
    return trace

import deepspeed, transformers.models.qwen2.modeling_qwen2  # untraced, as that is slow

threading.settrace(trace)
sys.settrace(trace)
import grpo_ref_split as trainer
from grpo.constants import read_preset
from tasks import arithmetic
arithmetic.SIZES = {"train": 64, "validation": 8, "test": 8}
given = {k: v for k, v in read_preset("presets/demo.py").items() if k in trainer.DEFAULTS}
given |= {"MODEL": sys.argv[1], "RUN_DIR": sys.argv[2], "REF_SERVER": None, "EVAL_STEPS": 1}
given |= {"PROMPTS_PER_STEP": 2, "SAVE_STEPS": 1, "EVAL_QUESTIONS": 2, "SKIP_FLAT_GROUPS": False}
trainer.main(**given | {"STEPS": 1})
trainer.main(**given | {"STEPS": 2})  # resumes
sys.settrace(None)

def lines_of(code):  # of a code object, and of those in it
    found = {line for _, _, line in code.co_lines() if line}
    return found.union(*(lines_of(c) for c in code.co_consts if hasattr(c, "co_lines")))

files = [getattr(module, "__file__", None) or "" for module in list(sys.modules.values())]
files = [file for file in files if file.startswith(ours) and "/.venv" not in file]
shares = {}
for file in files:
    lines = lines_of(compile(Path(file).read_text(), file, "exec"))
    shares[file] = sum((file, line) in ran for line in lines) / max(len(lines), 1)
allocator = os.environ["PYTORCH_CUDA_ALLOC_CONF"]
trainer.torch._C._accelerator_setAllocatorSettings(allocator)  # refuses what it does not know
print(allocator)
print(json.dumps(shares))
"""


def lines_of(path):
    return len((ROOT / path).read_text().splitlines())


def test_a_plain_run_loads_the_core_alone(tiny, tmp_path):
    """It samples, trains, evaluates, saves and resumes, without a server, on a CPU."""
    command = [sys.executable, "-c", RUN, str(tiny), str(tmp_path / "run")]
    kept = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}  # an earlier test's
    kept |= {"PYTORCH_CUDA_ALLOC_CONF"}
    env = {k: v for k, v in os.environ.items() if k not in kept}
    printed = subprocess.check_output(command, cwd=ROOT, text=True, timeout=900, env=env)
    *_, allocator, found = printed.splitlines()
    assert allocator.startswith("expandable_segments:True")
    found = json.loads(found)
    shares = {path.removeprefix(f"{ROOT}/"): share for path, share in found.items()}
    core = {path: lines_of(path) for path in shares if not path.startswith("tests")}
    core = {path: number for path, number in core.items() if number}
    for path, number in sorted(core.items(), key=lambda pair: -pair[1]):
        print(f"{number:4} {shares[path]:4.0%} {path}")
    total, server, half = (sum(map(lines_of, files)) for files in (core, SERVER, HALF))
    print(total, "lines;", total + server, "with REF_SERVER;", half, "more in bfloat16")
    assert not [
        path
        for path in core
        if path in SERVER or path.startswith(("grpo/options/", "grpo/commands/"))
    ]
    assert 4_000 < total <= LINES
    assert {path for path in core if shares[path] < 0.6} == RARE
